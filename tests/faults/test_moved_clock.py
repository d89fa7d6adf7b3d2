"""The clock of a writer or a compactor jumps: no row is lost or doubled, and no file goes before its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogFenced
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.faults.log_workload import CLOSED, LAST, aged, assert_lived
from tests.fixtures.moved_clock import WANDERS, MovedClock
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import compact, open_compactor, read_range

HOUR = 3600
KEPT = Retention(max_age=60.0, grace=1800.0)
APPENDS_AND_COMPACTS = """
import sys
from cdc.position import Position
from cdc.log.writer import LogWriter
from tests.faults.log_workload import CLOSED
from pipelines.compaction.compaction_steps import compact
from tests.log.rows import info, row, table
position = int(sys.argv[2])
writer = LogWriter(sys.argv[1], CLOSED)
writer.commit(writer.stage(table(row(position, key=[str(position)]))), info(position))
compact(None, sys.argv[1], upto=Position(int(sys.argv[3])))
"""
SWEEPS = """
import sys
from cdc.log.vacuum import vacuum
from tests.faults.test_moved_clock import KEPT
vacuum(sys.argv[1], KEPT)
"""


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A log of four segments, two of which are compacted and trimmed."""
    root = tmp_path / "log"
    writer = LogWriter.open(root, IDENTITY, CLOSED)
    for position in (10, 20, 30, 40):
        writer.commit(writer.stage(table(row(position, key=[str(position)]))), info(position))
    compact(root, 20)
    writer.trim([0, 1], Position(20))
    return root


def rows(root: Path) -> list[int]:
    log = LogReader(root)
    return [row["position"] for row in read_range(log, Position(0), log.durable or Position(0))]


def said_at(root: Path) -> float:
    """When the last commit of changes was made, by the clock of who made it, in seconds."""
    last = map(json.loads, commit_file(root / CHANGES, LogReader(root).version).read_text().splitlines())
    return next(float(said["commitInfo"]["timestamp"]) / 1e3 for said in last if "commitInfo" in said)


@pytest.mark.slow
def test_a_log_lives_and_is_whole_under_a_clock_that_jumps_in_the_midst_of_every_step(
    tmp_path: Path, moved_clock: MovedClock
) -> None:
    root, confirmed = tmp_path / "log", tmp_path / "confirmed"
    aged(root)
    confirmed.write_bytes(bytes(8))
    moved_clock.run(WANDERS, "-m", "tests.faults.log_workload", root, confirmed)
    assert int.from_bytes(confirmed.read_bytes(), sys.byteorder) == LAST
    assert_lived(root)


@pytest.mark.parametrize("clock", [pytest.param(-HOUR, marks=pytest.mark.slow), HOUR])
def test_who_was_overtaken_is_refused_whichever_clock_is_ahead(root: Path, moved_clock: MovedClock, clock: int) -> None:
    writer, compactor, before = LogWriter(root, CLOSED), open_compactor(root), said_at(root)
    moved_clock.run(clock, "-c", APPENDS_AND_COMPACTS, root, 50, 30)
    assert abs(said_at(root) - before - clock) < 120, "the clock is also that of who makes the commits"
    with pytest.raises(LogFenced):
        writer.commit(writer.stage(table(row(60))), info(60))
    with pytest.raises(LogFenced):
        compactor.commit([], horizon=Position(20), floor=Position(0))
    after = LogWriter(root, CLOSED)  # by the right clock, which is on the other side of that
    after.commit(after.stage(table(row(60, key=["60"]))), info(60))
    assert rows(root) == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("clock", [pytest.param(-HOUR, marks=pytest.mark.slow), HOUR])
def test_no_file_goes_before_its_grace_is_over_because_the_clock_jumped(
    root: Path, moved_clock: MovedClock, clock: int
) -> None:
    view = LogReader(root)
    compact(root, 30, merge=True)
    held = [*root.glob(f"{CHANGES}/segment=*/*.parquet"), *root.glob(f"{COMPACTED}/segment=*/*.parquet")]
    assert vacuum(root, KEPT).files == 0  # from here on the grace is counted
    moved_clock.run(clock, "-c", SWEEPS, root)
    assert [file for file in held if not file.exists()] == []
    assert [row["position"] for row in read_range(view, Position(0), Position(40))] == [10, 20, 30, 40]
