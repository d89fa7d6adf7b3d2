"""Planned moves of the source on real servers: upgrades, a switch-over to a logical replica, and kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.capture.startup_checks import check_log
from cdc.errors import MovedRowsDiffer, SlotAtNewServer, SourceReplaced
from cdc.failpoint import VARIABLE
from cdc.postgres.embedded_server import EmbeddedPostgres, find_binaries
from tests.cli.command import spawn
from tests.faults.capture import ReaderProcess
from tests.faults.write_load import Load
from tests.fixtures import forked
from tests.fixtures.moving_source import MovingSource, replicated, run_move
from tests.fixtures.postgres import fresh_database, rows_of, run_sql
from tests.fixtures.upgraded_postgres import UpgradedPostgres
from tests.fixtures.waiting import until

pytestmark = pytest.mark.slow
POINTS = ("slot_recorded", "slot_created", "after_copy_staged", "before_move_recorded", "after_move_recorded")


@pytest.fixture(name="former")
def _former(another_cluster: EmbeddedPostgres) -> Iterator[str]:
    """A database on another cluster than that of `database`."""
    yield from fresh_database(another_cluster)


@pytest.fixture(name="held")
def _held(tmp_path: Path, former: str) -> MovingSource:
    held = MovingSource(tmp_path, former)
    held.begin()
    return held


def moved(held: MovingSource, to: str) -> None:
    """Move, and set the new DSN."""
    done = run_move(held.path, to)
    assert done.envelope["ok"], done
    assert all(table["equal"] for table in done.envelope["result"]["tables"])
    held.point_at(to)
    check_log(held.definition)


@pytest.mark.parametrize("point", POINTS)
def test_a_move_that_is_killed_is_finished_by_the_next_one(
    held: MovingSource, former: str, database: str, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with replicated(former, database):
        pass
    before, copies = held.last.last, held.copies()
    arguments = ("pipelines", "move", "--to", database, "-c", held.path)
    ended = forked.run(*arguments, environment={VARIABLE: point})
    assert ended.status == -signal.SIGKILL, ended
    assert held.last.last.epoch == before.epoch + (point == "after_move_recorded")
    if point != "after_move_recorded":
        held.stream()  # the former server still continues the log
    again = run_move(held.path, database)
    assert again.envelope["ok"], again
    held.point_at(database)
    held.continues(capsys)
    assert (held.last.last.epoch, held.copies()) == (before.epoch + 1, copies)
    slots = rows_of(database, "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    assert slots == [("cdc_held",)]


def test_writers_may_write_to_the_new_server_while_its_tables_are_compared(
    held: MovingSource, former: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with replicated(former, database), ReaderProcess(held) as reader, Load(former) as load:
        until(lambda: load.transactions > 20, reader.output)
    copies = held.copies()
    output = held.folder / "move.out"
    with output.open("ab") as file:
        moving = forked.start(
            "pipelines", "move", "--to", database, "-c", held.path, output=file,
            environment={VARIABLE: "slot_recorded:1:stop"},
        )  # fmt: skip
    until(lambda: held.folder / "log" / "_slot.json", output.read_text)
    until(lambda: Path(f"/proc/{moving.pid}/stat").read_text().split()[2] == "T", output.read_text)
    run_sql(database, "INSERT INTO t VALUES (6000, 'during the comparison')", "DELETE FROM t WHERE id = 13")
    os.kill(moving.pid, signal.SIGCONT)
    assert moving.wait(60) == 0, output.read_text()
    assert "from now on writers may write to the new server" in output.read_text()
    held.point_at(database)
    held.continues(capsys)
    assert held.copies() == copies


def test_the_reader_copies_the_tables_that_differ_and_no_other(
    held: MovingSource, former: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with replicated(former, database):
        pass
    run_sql(database, "DELETE FROM t WHERE id = 11", "INSERT INTO t VALUES (11, 'only here', 1, now())")
    copies = held.copies()
    refused = run_move(held.path, database)
    assert (refused.status, refused.envelope["error"]["code"]) == (4, MovedRowsDiffer.code)
    assert run_move(held.path, database, "--resync").envelope["ok"]
    held.point_at(database)
    with ReaderProcess(held) as reader:
        until(lambda: {schema.state.value for schema in held.log.schemas().values()} == {"live"}, reader.output)
    held.continues(capsys)
    assert held.copies() == {**copies, "t": copies["t"] + 1}


@pytest.mark.parametrize(("old", "new"), [(15, 16), (15, 18), (16, 18), (18, 18)])
def test_an_upgraded_cluster_continues_the_log_without_a_copy(
    tmp_path: Path, old: int, new: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if not all(find_binaries(version).is_dir() for version in (old, new)):
        pytest.skip(f"no binaries of {old} and {new}")
    with EmbeddedPostgres(tmp_path / "old", version=old, tcp=True) as former:
        held = MovingSource(tmp_path, former.dsn())
        held.begin()
        with ReaderProcess(held) as reader, Load(former.dsn()) as load:
            until(lambda: load.transactions > 20, reader.output)
            load.stop()
            end = held.wal_end()
            until(lambda: held.holds(end), reader.output)
            former.stop()
        copies = held.copies()
        with UpgradedPostgres(tmp_path / "new", former, new) as upgraded:
            if old >= 17:  # pg_upgrade copies slots
                refused = run_move(held.path, upgraded.dsn())
                assert refused.envelope["error"]["code"] == SlotAtNewServer.code, refused
                run_sql(upgraded.dsn(), "SELECT pg_drop_replication_slot('cdc_held')")
            assert run_move(held.path, upgraded.dsn(), "--check").envelope["ok"]
            moved(held, upgraded.dsn())
            held.continues(capsys)
            assert held.copies() == copies
            for command in (("log", "verify"), ("verify", "--against", "log")):
                assert spawn(*command, "-c", held.path, "--json").envelope["ok"], command


def test_a_switch_over_to_a_logical_replica_continues_the_log_without_a_copy(
    held: MovingSource, former: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with replicated(former, database), ReaderProcess(held) as reader, Load(former) as load:
        until(lambda: load.transactions > 20, reader.output)
        running = run_move(held.path, database)  # a reader uses the slot
        assert running.envelope["error"]["code"] == "CDC-2101", running
    copies = held.copies()
    moved(held, database)
    former_source = MovingSource(held.folder, former)
    with pytest.raises(SourceReplaced):
        check_log(former_source.definition)
    held.point_at(database)
    held.continues(capsys)
    assert held.copies() == copies
    for command in (("log", "verify"), ("verify", "--against", "log")):
        assert spawn(*command, "-c", held.path, "--json").envelope["ok"], command
