"""TPC-B while reader and driver are killed: at every cut that is kept, the balances of all tables are equal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest

from cdc.errors import CutUnavailable
from cdc.failpoint import VARIABLE
from cdc.position import Position
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import TargetState
from pipelines.sinks.delta.settings import Writer
from tests.faults.capture import Captured
from tests.faults.driven_lake import lake_in
from tests.fixtures import forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of
from tests.fixtures.waiting import PATIENCE
from tests.pipelines.test_balances import ACCOUNTS, BALANCES, SCRIPT, make_bank, paid, pgbench

KILLED = -signal.SIGKILL
FAILPOINTS = {
    Writer.AUTO: ["delta_before_publish:3", "after_table_merge:6"],
    Writer.SPARK: ["delta_before_publish:2", "delta_before_merge:2", "delta_after_merge:1"],
}
CUTS = {Writer.AUTO: 5, Writer.SPARK: 1}
"""More than so many have to be published before somebody is killed: Spark merges four tables in some ten seconds."""
KILLS = {Writer.AUTO: 4, Writer.SPARK: 3}
WRITERS = (Writer.AUTO, pytest.param(Writer.SPARK, marks=pytest.mark.slow))
SUMS = "select " + ", ".join(
    f"(select coalesce(sum({column}), 0) from {topic}) as {column}" for topic, column in BALANCES.items()
)


def balances(folder: Path) -> list[int]:
    """The one sum that all tables come to, of each kept cut to which all four belong; fails where they differ."""
    lake, found = Lake.open(lake_in(folder)), []
    for listed in lake.cuts():
        try:
            cut = lake.cut(Position(listed.position))
        except CutUnavailable:
            continue  # of many of one moment the driver has thinned it out since they were listed
        if len(cut.tables) == len(BALANCES) and all(t.state == TargetState.STREAMING for t in cut.tables.values()):
            (row,) = lake.query(SUMS, cut).read_all().to_pylist()
            assert len(set(row.values())) == 1, (cut.position, row)
            found.append(next(iter(row.values())))
    return found


def driven(folder: Path, writer: Writer, environment: Mapping[str, str] | None = None) -> forked.Ended:
    """A driver that has come to the end of the log, or was killed."""
    return forked.run("tests.faults.driven_lake", folder, writer.value, environment=environment, timeout=PATIENCE)


def total(dsn: str) -> int:
    ((found,),) = rows_of(dsn, "SELECT sum(delta) FROM pgbench_history")
    return int(found)


@pytest.mark.parametrize("writer", WRITERS)
def test_at_every_cut_that_killed_drivers_published_the_balances_are_equal(
    tmp_path: Path, database: str, writer: Writer
) -> None:
    make_bank(database)
    held = Captured(tmp_path, database)
    held.copy()
    (tmp_path / "tpcb.sql").write_text(SCRIPT)
    script, accounts = str(tmp_path / "tpcb.sql"), f"accounts={ACCOUNTS}"
    command = [pgbench(), "-n", "-f", script, "-D", accounts, "-c", "3", "-t", "14", database]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    held.stream()
    for failpoint in FAILPOINTS[writer]:
        ended = driven(tmp_path, writer, {VARIABLE: failpoint})
        assert ended.status == KILLED, f"{failpoint}\n{ended.errors}"
    ended = driven(tmp_path, writer)
    assert ended.status == 0, ended.errors
    found = balances(tmp_path)
    assert len(found) > CUTS[writer]
    assert found[-1] == total(database)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("writer", CUTS)
def test_at_every_cut_the_balances_are_equal_while_reader_and_driver_are_killed(
    pipeline: Pipeline, writer: Writer, seed: int
) -> None:
    random, lake, more = Random(seed), Lake.open(lake_in(pipeline.folder)), CUTS[writer]

    def has_more_than(cuts: int) -> Callable[[], bool]:
        return lambda: len(lake.cuts()) > cuts

    make_bank(pipeline.dsn)
    target = f"type: delta, name: lake, path: '{lake_in(pipeline.folder)}', writer: {writer.value}"
    pipeline.write(tables="public.*", sinks=f"[{{{target}}}]")
    processes = {"reader": pipeline.reader(), "apply": pipeline.apply()}
    (pipeline.folder / "bank").mkdir()
    with paid(Captured(pipeline.folder / "bank", pipeline.dsn)):
        for _ in range(KILLS[writer]):
            pipeline.wait(has_more_than(len(lake.cuts()) + more), "some cuts more", seconds=2 * PATIENCE)
            balances(pipeline.folder)
            for name in random.choice([("reader",), ("apply",), ("reader", "apply")]):
                processes[name].send_signal(signal.SIGKILL)
                processes[name].wait()
                processes[name] = pipeline.reader() if name == "reader" else pipeline.apply()
    pipeline.settle()
    pipeline.wait(lambda: balances(pipeline.folder)[-1:] == [total(pipeline.dsn)], "the last cut is the source's")
    assert len(balances(pipeline.folder)) > 2 * more
