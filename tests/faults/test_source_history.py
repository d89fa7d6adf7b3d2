"""Every way in which a source can stop being the one that the log was written from, on real servers.

Each is an error of its own with the way out; none is a gap that nobody sees.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import LiteralString

import pytest
from psycopg.errors import UndefinedFile

from cdc.capture.operator_recovery import begin_epoch
from cdc.capture.startup_checks import check_log, find_problems
from cdc.errors import (
    CdcError,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    SlotInvalidated,
    SlotMissing,
    SlotUnsuitable,
    SourceGap,
    SourceReplaced,
)
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import slot_status
from cdc.snapshot.backfill_documents import BackfillRequest
from tests.faults.capture import Captured
from tests.faults.test_new_epoch import restore
from tests.faults.write_load import Load
from tests.fixtures.postgres import drop_when_free, fresh_database, rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION
from tests.snapshot.reader_with_backfills import Running


@pytest.fixture(name="server", params=["postgres", pytest.param("postgres_15", marks=pytest.mark.slow)])
def _server(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    server: EmbeddedPostgres = request.getfixturevalue(request.param)
    return server


@pytest.fixture(name="held")
def _held(tmp_path: Path, server: EmbeddedPostgres) -> Iterator[Captured]:
    """A copied table `t` and one `u`, with a log and nobody who reads."""
    databases = fresh_database(server)
    dsn = next(databases)
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    run_sql(dsn, "INSERT INTO t VALUES (1, 'one')")
    captured = Captured(tmp_path, dsn)
    captured.copy()
    yield captured
    next(databases, None)


def refused(held: Captured, error: type[CdcError], says: str) -> CdcError:
    """Doctor, the look before and the reader itself refuse, with a next step; the log does not move."""
    before = held.log.durable
    with pytest.raises(error, match=says) as caught:
        check_log(held.definition)
    assert error.code in {problem.code for problem in find_problems(held.definition) if problem.fatal}
    with pytest.raises(CdcError):
        held.stream()
    assert held.log.durable == before
    return caught.value


def recovers(held: Captured) -> None:
    """The way out that the error names leads out."""
    begin_epoch(held.definition)
    run_sql(held.dsn, "INSERT INTO t SELECT max(id) + 1, 'after' FROM t")
    held.stream()
    assert held.folded("t") == sorted(rows_of(held.dsn, "SELECT id::text, v FROM t"))


NEVER_SEEN: LiteralString = "INSERT INTO t SELECT max(id) + 1, 'never seen' FROM t"


def test_a_slot_that_was_moved_or_dropped_or_made_anew_is_refused_until_a_new_epoch(held: Captured) -> None:
    run_sql(held.dsn, NEVER_SEEN)
    with connect(held.dsn) as conn:
        conn.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [held.slot])
        assert (
            "--new-epoch" in refused(held, SourceGap, r"slot 's_test_\w+' is at \S+, ahead of the log's position").fix
        )
        recovers(held)

        drop_when_free(conn, held.slot)
        assert "--new-epoch" in refused(held, SlotMissing, r"slot \(source\.slot\.name\) does not exist").fix
        recovers(held)

        run_sql(held.dsn, NEVER_SEEN)
        drop_when_free(conn, held.slot)
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [held.slot])
        refused(held, SourceGap, "ahead of the log")


def test_a_slot_that_another_reader_moves_meanwhile_is_no_gap(held: Captured) -> None:
    began = held.log.durable
    with held.reading() as reading, Load(held.dsn):
        for _ in range(8):
            check_log(held.definition)
        reading.until(lambda: held.log.durable != began, "the reader to write meanwhile")


def test_a_publication_that_is_gone_or_made_anew_is_missed_at_once(held: Captured) -> None:
    run_sql(held.dsn, "DROP PUBLICATION cdc_held_pub", NEVER_SEEN)
    refused(held, PublicationMissing, r"the publication \(source\.publication\.name\) does not exist")
    recovers(held)

    run_sql(held.dsn, "DROP PUBLICATION cdc_held_pub", NEVER_SEEN)
    run_sql(held.dsn, "CREATE PUBLICATION cdc_held_pub FOR TABLE t, u WITH (publish_via_partition_root = true)")
    refused(held, PublicationReplaced, "was dropped and created again")
    recovers(held)


def test_a_publication_without_a_captured_table_names_it(held: Captured) -> None:
    run_sql(held.dsn, "ALTER PUBLICATION cdc_held_pub DROP TABLE t", "INSERT INTO t VALUES (9, 'never sent')")
    fix = refused(held, PublicationNarrowed, r"no longer contains public\.t").fix
    with connect(held.dsn) as conn:
        conn.execute(fix.removeprefix("run ").partition(";")[0])  # type: ignore[arg-type]
    with Running(held) as running:
        assert running.ended(running.ask(BackfillRequest(("public.t",), resync=True))).state == "done"
        run_sql(held.dsn, "INSERT INTO t VALUES (2, 'after')")
        running.caught_up()
    assert held.folded("t") == sorted(rows_of(held.dsn, "SELECT id::text, v FROM t"))


def test_a_table_that_was_dropped_does_not_narrow_the_publication(held: Captured) -> None:
    run_sql(held.dsn, "DROP TABLE u")
    check_log(held.definition)


@pytest.mark.parametrize(
    ("making", "says"),
    [
        ("SELECT pg_create_physical_replication_slot(%s)", "is a physical slot"),
        ("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", "has plugin 'test_decoding'"),
    ],
)
def test_a_slot_of_another_kind_is_named(held: Captured, making: str, says: str) -> None:
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
        try:
            conn.execute(making, [held.slot])  # type: ignore[call-overload]
        except UndefinedFile as absent:  # the plugin is no part of this distribution
            pytest.skip(str(absent))
        try:
            refused(held, SlotUnsuitable, says)
        finally:
            drop_when_free(conn, held.slot)


def test_a_slot_of_another_database_is_named(held: Captured, server: EmbeddedPostgres) -> None:
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
    with connect(server.dsn()) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [held.slot])
        try:
            refused(held, SlotUnsuitable, "belongs to database 'postgres'")
        finally:
            drop_when_free(conn, held.slot)


def test_another_cluster_is_refused(held: Captured, postgres_16: EmbeddedPostgres) -> None:
    databases = fresh_database(postgres_16)
    elsewhere = next(databases)
    held.dsn = elsewhere
    held.write(slot=held.slot)
    with pytest.raises(SourceReplaced, match="another cluster"):
        check_log(held.definition)
    run_sql(elsewhere, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (5, 'upgraded')")
    recovers(held)
    with connect(elsewhere) as conn:
        drop_when_free(conn, held.slot)
    next(databases, None)


@pytest.fixture(name="own_server", params=[MAIN_VERSION, pytest.param(15, marks=pytest.mark.slow)])
def _own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    request.getfixturevalue({MAIN_VERSION: "postgres", 15: "postgres_15"}[request.param])  # skips without the programs
    small = {"min_wal_size": "32MB", "max_wal_size": "32MB"}
    with EmbeddedPostgres(tmp_path / "pg", version=request.param, settings=small, tcp=True) as server:
        yield server


def test_a_slot_whose_wal_was_removed_names_the_limit_and_a_promoted_copy_with_every_transaction_continues(
    tmp_path: Path, own_server: EmbeddedPostgres
) -> None:
    held = captured_on(own_server, tmp_path)
    removed_wal_names_the_limit(held)
    held.stream()
    promoted_copy_continues(held, own_server)


def removed_wal_names_the_limit(held: Captured) -> None:
    run_sql(held.dsn, "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
    for _ in range(4):
        run_sql(held.dsn, "INSERT INTO u SELECT i FROM generate_series(1, 40000) i", "SELECT pg_switch_wal()")
        run_sql(held.dsn, "DELETE FROM u", "CHECKPOINT")
    assert "max_slot_wal_keep_size" in refused(held, SlotInvalidated, "is invalidated: wal_removed").fix
    run_sql(held.dsn, "ALTER SYSTEM SET max_slot_wal_keep_size = -1", "SELECT pg_reload_conf()")
    recovers(held)


@pytest.mark.slow
def test_a_slot_that_nobody_used_for_too_long_says_so(tmp_path: Path, own_server: EmbeddedPostgres) -> None:
    if own_server.version < 18:
        pytest.skip("idle_replication_slot_timeout came with 18")
    held = captured_on(own_server, tmp_path)
    run_sql(held.dsn, "ALTER SYSTEM SET idle_replication_slot_timeout = '1s'", "SELECT pg_reload_conf()")

    def lost() -> bool:
        run_sql(held.dsn, "INSERT INTO u VALUES (1)", "DELETE FROM u", "SELECT pg_switch_wal()", "CHECKPOINT")
        with connect(held.dsn) as conn:
            slot = slot_status(conn, held.slot)
        return slot is not None and slot.invalidation_reason is not None

    for _ in range(100):
        if lost():
            break
        Event().wait(0.1)
    assert "idle_replication_slot_timeout" in refused(held, SlotInvalidated, "is invalidated: idle_timeout").fix


def promoted_copy_continues(held: Captured, own_server: EmbeddedPostgres) -> None:
    own_server.stop()
    backup = held.folder / "backup"
    shutil.copytree(own_server.data_directory, backup, symlinks=True)
    (backup / "standby.signal").touch()
    restore(backup, own_server.data_directory)
    own_server.start()
    before = held.log.durable
    run_sql(held.dsn, "SELECT pg_promote()", "INSERT INTO t SELECT max(id) + 1, 'after the promotion' FROM t")
    check_log(held.definition)
    held.stream()
    assert held.folded("t") == sorted(rows_of(held.dsn, "SELECT id::text, v FROM t"))
    last = held.log.last_commit
    assert last is not None
    assert before is not None
    assert (last.timeline, last.last.epoch) == (2, before.epoch)


def captured_on(server: EmbeddedPostgres, folder: Path) -> Captured:
    run_sql(server.dsn(), "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int)")
    run_sql(server.dsn(), "INSERT INTO t VALUES (1, 'one')")
    held = Captured(folder, server.dsn(), tables="public.t")
    held.copy()
    return held
