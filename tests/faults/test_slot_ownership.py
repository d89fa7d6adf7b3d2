"""Slot ownership: no slot is dropped or moved unless it is proven to be the log's, whatever was copied or lost."""

from __future__ import annotations

import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from cdc.capture.operator_recovery import adopt_slot, begin_epoch
from cdc.capture.startup_checks import check_log, find_problems
from cdc.catalog import Catalog, SinkProgress
from cdc.errors import (
    ConfigError,
    ExitCode,
    LogError,
    SlotInUse,
    SlotNotCreated,
    SlotNotOwned,
    SourceGap,
    UnexpectedSlot,
)
from cdc.failpoint import VARIABLE
from cdc.log.epoch_and_slot_records import SLOT_RECORD_FILE, read_slot_record
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import SlotStatus, copy_lock, drop_slot, slot_status
from tests.cli.command import run, spawn
from tests.faults.capture import Captured, ReaderProcess
from tests.faults.test_kill_reader import KILLED
from tests.faults.test_kill_reader_bucket import lies_in_a_bucket
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import drop_when_free, fresh_database, rows_of, run_sql
from tests.fixtures.s3 import S3
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import read_rows

POINTS = ["slot_recorded", "slot_created", "after_copy_staged"]


@pytest.fixture(name="held")
def _held(tmp_path: Path, either_database: str) -> Captured:
    """A table with a row, and a definition in a folder of its own; nothing is copied yet."""
    return begun(tmp_path, either_database)


def begun(tmp_path: Path, dsn: str) -> Captured:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
    (tmp_path / "own").mkdir()
    return Captured(tmp_path / "own", dsn)


def copied(held: Captured) -> Captured:
    """The same definition, with the log in another folder."""
    other = held.folder.parent / "copied"
    other.mkdir()
    return Captured(other, held.dsn, slot=held.slot)


def slot_of(held: Captured) -> SlotStatus | None:
    with connect(held.dsn) as conn:
        until(lambda: not (found := slot_status(conn, held.slot)) or not found.active, "the slot free")
        return slot_status(conn, held.slot)


def place_of(held: Captured) -> tuple[Lsn | None, Lsn | None]:
    found = slot_of(held)
    assert found is not None
    return found.confirmed_flush, found.restart_lsn


def make_slot(held: Captured) -> None:
    with connect(held.dsn) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [held.slot])


def stays(held: Captured, code: str) -> str:
    """The reader ends with the code, doctor says it before, and the slot stays as it is; what the reader printed."""
    before = place_of(held)
    assert code in {problem.code for problem in find_problems(held.definition) if problem.fatal}
    ended = spawn("reader", "-c", held.path)
    assert ended.status not in {0, None}
    assert code in ended.errors
    assert place_of(held) == before
    return ended.errors


def exact(held: Captured) -> None:
    run_sql(held.dsn, "INSERT INTO t SELECT max(id) + 1, 'more' FROM t")
    held.stream()
    assert held.folded("t") == sorted(rows_of(held.dsn, "SELECT id::text, v FROM t"))


def test_a_slot_of_somebody_else_stays_and_the_three_explanations_are_given(held: Captured) -> None:
    make_slot(held)
    said = stays(held, UnexpectedSlot.code)
    for part in ("was moved", "mounted", "source.slot.name", "cdc slots ls", "cdc slots drop"):
        assert part in said
    with connect(held.dsn) as conn:
        drop_slot(conn, held.slot)
    check_log(held.definition)
    held.copy()
    exact(held)


def test_a_copied_definition_leaves_the_slot_to_the_log_that_made_it(held: Captured) -> None:
    held.copy()
    exact(held)
    stays(copied(held), UnexpectedSlot.code)
    exact(held)


def test_a_log_that_was_moved_away_stops_the_reader_and_continues_once_it_is_back(held: Captured) -> None:
    held.copy()
    exact(held)
    away = (held.folder / "log").rename(held.folder / "away")
    stays(held, UnexpectedSlot.code)
    shutil.rmtree(held.folder / "log", ignore_errors=True)
    away.rename(held.folder / "log")
    exact(held)


def test_the_position_that_the_catalog_knows_is_named_as_evidence(held: Captured) -> None:
    held.copy()
    exact(held)
    seen = held.log.durable or Position(0)
    (held.folder / "log").rename(held.folder / "away")
    with Catalog.open(held.definition.catalog.url) as catalog:
        catalog.sinks.record("held", SinkProgress("lake", int(seen), None, 0.0, "running"))
    with pytest.raises(UnexpectedSlot, match=f"the catalog last recorded this pipeline's log at {seen}"):
        check_log(held.definition)


def test_a_log_whose_commit_the_catalog_has_seen_is_no_unfinished_copy(held: Captured) -> None:
    (held.folder / "log").mkdir()
    assert spawn("reader", "-c", held.path, environment={VARIABLE: "after_copy_staged"}).status == -signal.SIGKILL
    slot = slot_of(held)
    assert slot is not None
    check_log(held.definition)  # proven: it would begin again
    with Catalog.open(held.definition.catalog.url) as catalog:
        catalog.sinks.record("held", SinkProgress("lake", int(slot.confirmed_flush or 0), None, 0.0, "running"))
    with pytest.raises(UnexpectedSlot, match="the catalog last recorded"):
        check_log(held.definition)


@pytest.mark.parametrize("point", POINTS)
def test_a_first_copy_killed_around_its_slot_begins_again_by_itself(tmp_path: Path, database: str, point: str) -> None:
    held = begun(tmp_path, database)
    for _ in range(2):
        assert spawn("reader", "-c", held.path, environment={VARIABLE: point}).status == -signal.SIGKILL
    assert (slot_of(held) is None) == (point == "slot_recorded")
    check_log(held.definition)
    held.copy()
    exact(held)


def test_a_first_copy_killed_after_it_dropped_its_slot_begins_again_by_itself(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    for point in ("slot_created", "slot_dropped"):
        assert spawn("reader", "-c", held.path, environment={VARIABLE: point}).status == -signal.SIGKILL
    assert slot_of(held) is None
    held.copy()
    exact(held)


def test_an_unfinished_slot_that_somebody_has_moved_since_stays(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    assert spawn("reader", "-c", held.path, environment={VARIABLE: "after_copy_staged"}).status == -signal.SIGKILL
    slot_of(held)
    run_sql(held.dsn, "INSERT INTO t VALUES (2, 'two')")
    with connect(held.dsn) as conn:
        conn.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [held.slot])
    stays(held, UnexpectedSlot.code)


def test_a_record_of_an_emptied_log_proves_nothing(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    assert spawn("reader", "-c", held.path, environment={VARIABLE: "after_copy_staged"}).status == -signal.SIGKILL
    slot_of(held)
    shutil.rmtree(held.folder / "log" / "changes")
    assert (held.folder / "log" / SLOT_RECORD_FILE).exists()
    stays(held, UnexpectedSlot.code)


@pytest.mark.slow
def test_a_killed_first_copy_into_a_bucket_begins_again_by_itself(pipeline: Pipeline, s3: S3) -> None:
    lies_in_a_bucket(pipeline, s3)
    run_sql(pipeline.dsn, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    pipeline.write(tables="public.*")
    for point in ("slot_created", "after_copy_staged"):
        assert pipeline.reader(point).wait(60) == KILLED
    record = read_slot_record(pipeline.log)
    assert record is not None
    assert record.slot == f"cdc_{pipeline.name}"
    pipeline.reader()
    pipeline.wait_for_copy()
    pipeline.settle()


def test_a_log_is_not_continued_from_a_slot_of_another_name(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    run_sql(held.dsn, "SELECT pg_create_logical_replication_slot('theirs_' || current_database(), 'pgoutput')")
    held.copy()
    exact(held)
    held.write(slot=f"theirs_{database.rpartition('/')[2]}")
    with pytest.raises(SlotNotOwned, match="the log was written from slot 's_test"):
        check_log(held.definition)
    stays(held, SlotNotOwned.code)


def test_a_log_from_before_there_were_records_gets_one_when_it_is_continued(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    held.copy()
    (held.folder / "log" / SLOT_RECORD_FILE).unlink()
    exact(held)
    record = read_slot_record(held.folder / "log")
    assert record is not None
    assert (record.slot, record.log_id) == (held.slot, held.log.log_id)


def test_with_mode_when_needed_a_slot_ahead_of_the_log_stays(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    with held.path.open("a") as definition:
        definition.write("snapshot: {mode: when_needed}\n")
    held.copy()
    run_sql(held.dsn, "INSERT INTO t VALUES (9, 'never seen')")
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
    make_slot(held)
    before = place_of(held)
    with ReaderProcess(held) as process:
        assert process.child.wait(60) == ExitCode.HALTED
    assert SlotNotOwned.code in process.output()
    assert place_of(held) == before
    with pytest.raises(SourceGap):  # nothing was declared: the log is as it was
        check_log(held.definition)


def test_a_new_epoch_leaves_a_slot_that_another_log_was_written_from(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    held.copy()
    other = copied(held)
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
    other.copy()
    exact(other)
    before = place_of(other)
    with pytest.raises(SlotNotOwned, match="a reader of another log has confirmed this position") as refused:
        begin_epoch(held.definition)
    assert "pg_drop_replication_slot" in refused.value.fix
    assert place_of(other) == before
    exact(other)


def test_a_new_epoch_leaves_a_slot_of_another_server(
    tmp_path: Path, database: str, postgres_16: EmbeddedPostgres
) -> None:
    held = begun(tmp_path, database)
    held.copy()
    databases = fresh_database(postgres_16)
    held.dsn = next(databases)
    held.write(slot=held.slot)
    run_sql(held.dsn, "CREATE TABLE t (id int PRIMARY KEY)")
    make_slot(held)
    with pytest.raises(SlotNotOwned, match="is on cluster"):
        begin_epoch(held.definition)
    assert slot_of(held) is not None
    next(databases, None)


@pytest.mark.parametrize("command", [("drop",), ("recover", "--new-epoch")])
def test_no_command_drops_a_slot_that_a_reader_copies_for(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    held = begun(tmp_path, database)
    held.copy()
    before = place_of(held)
    with connect(held.dsn) as conn, copy_lock(conn, held.slot):
        outcome = run(capsys, "slots", *command, "-c", held.path, "--yes")
    assert SlotInUse.code in outcome.errors
    assert place_of(held) == before


def without_right(held: Captured) -> None:
    held.path.write_text(held.path.read_text().replace(f"name: {held.slot}}}", f"name: {held.slot}, create: false}}"))


def test_a_reader_that_may_not_create_a_slot_neither_creates_nor_drops_one(held: Captured) -> None:
    without_right(held)
    with pytest.raises(SlotNotCreated, match=r"source\.slot\.create is false") as missing:
        check_log(held.definition)
    assert "pg_create_logical_replication_slot" in missing.value.fix
    assert spawn("reader", "-c", held.path).status == ExitCode.HALTED
    assert slot_of(held) is None
    make_slot(held)
    assert "cdc slots adopt" in stays(held, SlotNotCreated.code)


def test_an_adopted_slot_begins_the_log_and_is_moved_only_by_it(
    held: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    without_right(held)
    run_sql(held.dsn, "CREATE PUBLICATION cdc_held_pub FOR TABLE t WITH (publish_via_partition_root = true)")
    make_slot(held)
    run_sql(held.dsn, "INSERT INTO t VALUES (2, 'between')", "CREATE TABLE later (a int)")
    run_sql(held.dsn, "ALTER TABLE later REPLICA IDENTITY FULL", "INSERT INTO later VALUES (7)")
    assert run(capsys, "slots", "adopt", "-c", held.path, "--yes").status == 0
    with ReaderProcess(held) as process:
        run_sql(held.dsn, "UPDATE t SET v = 'after' WHERE id = 1")
        until(lambda: is_copied(held), process.output)
    slot_of(held)
    stays_copied = copied(held)
    without_right(stays_copied)
    stays(stays_copied, SlotNotCreated.code)


def is_copied(held: Captured) -> bool:
    """Whether both tables are copied; one of them has no key, so that its rows are counted."""
    with suppress(LogError, StopIteration):
        read = [row["topic"] for row in read_rows(held)]
        return read.count("public.later") == 1 and held.folded("t") == sorted(
            rows_of(held.dsn, "SELECT id::text, v FROM t")
        )
    return False


def test_a_slot_is_adopted_only_where_the_reader_may_not_create_one(tmp_path: Path, database: str) -> None:
    held = begun(tmp_path, database)
    make_slot(held)
    with pytest.raises(ConfigError, match=r"source\.slot\.create is true"):
        adopt_slot(held.definition)
