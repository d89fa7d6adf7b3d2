"""New epochs: a log goes on from a source that lost its past, and what it folds to is the source again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.capture.operator_recovery import begin_epoch
from cdc.capture.startup_checks import check_log
from cdc.errors import ExitCode, SlotMissing, SourceBehindLog
from cdc.failpoint import VARIABLE
from cdc.log.epoch_and_slot_records import read_pending_epoch
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.table import TableSchema, TableState
from tests.cli.command import spawn
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import drop_when_free, rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION
from tests.fixtures.waiting import until


def text_rows(dsn: str) -> list[tuple[str | None, ...]]:
    return sorted(rows_of(dsn, "SELECT id::text, v FROM t"))


def seed(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE doomed (id int PRIMARY KEY)",
        "INSERT INTO t SELECT i, 'old' FROM generate_series(1, 20) i",
        "INSERT INTO doomed VALUES (1)",
    )


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    seed(database)
    return Captured(tmp_path, database)


def lose_the_slot(held: Captured) -> None:
    """The slot goes, and rows come, change and go while nobody watches."""
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
    run_sql(
        held.dsn,
        "DELETE FROM t WHERE id <= 5",
        "UPDATE t SET v = 'unseen' WHERE id = 6",
        "INSERT INTO t VALUES (100, 'unseen')",
        "DROP TABLE doomed",
        "ALTER TABLE t ADD COLUMN later int",
        "CREATE TABLE young (id int PRIMARY KEY)",
        "INSERT INTO young VALUES (7)",
    )


def test_rows_that_vanished_while_no_slot_was_there_vanish_from_the_log_and_tables_keep_their_numbers(
    held: Captured,
) -> None:
    held.copy()
    known = {s.topic: s for s in held.log.schemas().values()}
    run_sql(held.dsn, "INSERT INTO t VALUES (50, 'seen')")
    before = held.stream()
    lose_the_slot(held)
    with pytest.raises(SlotMissing, match=r"slot \(source\.slot\.name\) does not exist"):
        check_log(held.definition)
    begin_epoch(held.definition)
    run_sql(held.dsn, "UPDATE t SET v = 'after' WHERE id = 7", "DELETE FROM t WHERE id = 8")
    after = held.stream()

    assert (before.epoch, after.epoch) == (0, 1)
    assert after > before
    assert [row[:2] for row in held.folded("t")] == text_rows(held.dsn)
    assert held.folded("young") == [("7",)]
    keep_their_numbers(held, known)


def keep_their_numbers(held: Captured, known: dict[str, TableSchema]) -> None:
    """A table keeps its number and columns, and new ones get numbers that were never used."""
    now = {s.name: s for s in held.log.schemas().values()}

    assert now["t"].relation == known["public.t"].relation
    assert [(c.name, c.id) for c in now["t"].columns][:2] == [("id", 1), ("v", 2)]
    assert now["t"].columns[2].id > 1600
    assert now["young"].relation >> 32 == 1
    assert now["doomed"].state is TableState.DROPPED
    assert now["doomed"].relation not in held.relations_with_rows()


@pytest.mark.parametrize("point", ["after_intent", "after_copy_staged"])
def test_a_recovery_killed_anywhere_is_ended_by_the_reader_and_begins_one_epoch(held: Captured, point: str) -> None:
    held.copy()
    lose_the_slot(held)
    arguments = ("slots", "recover", "-c", held.path, "--new-epoch", "--yes")
    assert spawn(*arguments, environment={VARIABLE: point}).status == -signal.SIGKILL
    assert held.log.last_commit is not None
    assert held.log.last_commit.last.epoch == 0
    check_log(held.definition)  # the reader may start: it ends what was begun
    after = held.stream()

    assert after.epoch == 1
    assert read_pending_epoch(held.folder / "log") is None
    assert [row[:2] for row in held.folded("t")] == text_rows(held.dsn)


def test_a_recovery_killed_in_the_middle_can_be_run_again(held: Captured) -> None:
    held.copy()
    lose_the_slot(held)
    arguments = ("slots", "recover", "-c", held.path, "--new-epoch", "--yes", "--json")
    assert spawn(*arguments, environment={VARIABLE: "after_copy_staged"}).status == -signal.SIGKILL
    again = spawn(*arguments).envelope

    assert again["ok"]
    assert again["result"]["epoch"] == 1
    held.stream()
    assert [row[:2] for row in held.folded("t")] == text_rows(held.dsn)


@pytest.fixture(name="own_server", params=[MAIN_VERSION, pytest.param(15, marks=pytest.mark.slow)])
def _own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server that the test may stop."""
    request.getfixturevalue({MAIN_VERSION: "postgres", 15: "postgres_15"}[request.param])  # skips without the programs
    server = EmbeddedPostgres(tmp_path / "pg", version=request.param, tcp=True)
    with server:
        yield server


def test_a_restored_backup_is_refused_and_goes_on_under_a_new_epoch(
    tmp_path: Path, own_server: EmbeddedPostgres
) -> None:
    seed(own_server.dsn())
    held = Captured(tmp_path, own_server.dsn())
    held.copy()
    held.stream()
    own_server.stop()
    backup = tmp_path / "backup"
    shutil.copytree(own_server.data_directory, backup, symlinks=True)
    own_server.start()
    run_sql(held.dsn, "INSERT INTO t SELECT i, repeat('lost', 999) FROM generate_series(1000, 1100) i")
    before = held.stream()
    own_server.stop()
    restore(backup, own_server.data_directory)
    own_server.start()

    with pytest.raises(SourceBehindLog, match="the source's WAL ends at"):
        check_log(held.definition)
    begin_epoch(held.definition)
    run_sql(held.dsn, "INSERT INTO t VALUES (50, 'after')")
    assert held.stream() > before
    assert held.folded("t") == text_rows(held.dsn)


def restore(backup: Path, data: Path) -> None:
    """Put the copy in the place of the data directory, with its owner."""
    owner = data.stat()
    shutil.rmtree(data)
    shutil.copytree(backup, data, symlinks=True)
    for place in (data, *data.rglob("*")):
        os.chown(place, owner.st_uid, owner.st_gid, follow_symlinks=False)


def test_a_rename_under_a_later_epoch_is_proved_or_marked_and_never_a_column_that_starts_empty(held: Captured) -> None:
    held.copy()
    lose_the_slot(held)
    begin_epoch(held.definition)
    run_sql(held.dsn, "ALTER TABLE t RENAME COLUMN v TO w", "INSERT INTO t VALUES (300, 'new')")
    held.stream()
    (table,) = (s for s in held.log.schemas().values() if s.name == "t")
    kept = [c.id for c in table.columns if c.name == "w"] == [2]

    assert kept or table.state is TableState.NEEDS_RESYNC


@pytest.mark.parametrize("beside", ["8MiB", pytest.param("0", marks=pytest.mark.slow)])
def test_with_mode_when_needed_a_reader_begins_the_next_epoch_by_itself(held: Captured, beside: str) -> None:
    with held.path.open("a") as definition:
        definition.write(f"snapshot: {{mode: when_needed, beside: {beside}}}\n")
    held.copy()
    before = held.stream()
    lose_the_slot(held)
    with ReaderProcess(held) as process:
        until(lambda: (held.log.durable or before).epoch == 1, process.output)
        run_sql(held.dsn, "UPDATE t SET v = 'after' WHERE id = 7", "DELETE FROM t WHERE id = 8")
        until(lambda: is_source(held) and all_live(held), process.output)
        assert process.child.poll() is None
        process.child.terminate()
        assert process.child.wait(30) == 0
    assert held.folded("young") == [("7",)]
    assert "copies all tables again" in process.output()


def test_with_mode_initial_a_reader_without_its_slot_stops_and_touches_nothing(held: Captured) -> None:
    held.copy()
    before = held.stream()
    lose_the_slot(held)
    with ReaderProcess(held) as process:
        assert process.child.wait(60) == ExitCode.HALTED
    assert SlotMissing.code in process.output()
    assert held.log.durable == before
    assert rows_of(held.dsn, "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []


def is_source(held: Captured) -> bool:
    return [row[:2] for row in held.folded("t")] == text_rows(held.dsn)


def all_live(held: Captured) -> bool:
    """Whether every table that is there is copied."""
    return {s.state for s in held.log.schemas().values()} == {TableState.LIVE, TableState.DROPPED}
