"""Transactions that the stream has before snapshots see them: their commit waits for a synchronous standby."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import LiteralString

import pytest
from psycopg import Connection

from cdc.capture.reader import ReaderContext
from cdc.config.source import SourceLoad, StandbyLimit
from cdc.errors import CommitNotVisible
from cdc.postgres.connection import connect
from cdc.postgres.visibility import await_definition
from cdc.snapshot.chunk_sender import ChunkSender
from cdc.snapshot.copy_limits import CopyRateLimit
from cdc.table import UNPROVED, TableState
from tests.fixtures.postgres import reader_of, rows_of, run_sql
from tests.fixtures.waiting import until
from tests.postgres.decoding_session import decoding_session

WAITING: LiteralString = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
ASKED: LiteralString = """
    SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cdc catalogs' AND query LIKE '%pg_locks%'
    OR application_name = 'cdc catalogs' AND query LIKE '%pg_current_snapshot%'
"""


@contextmanager
def commit_that_waits(dsn: str, *statements: LiteralString) -> Iterator[Callable[[], None]]:
    """One transaction whose commit waits for a standby that does not exist; gives a function that ends the waiting."""

    def commit() -> None:
        with connect(dsn, autocommit=False) as conn:
            for statement in statements:
                conn.execute(statement)
            conn.commit()

    def release() -> None:
        run_sql(dsn, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        committing.join()

    run_sql(dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    committing = Thread(target=commit)
    committing.start()
    try:
        until(lambda: rows_of(dsn, WAITING) == [(1,)], "a commit that waits")
        yield release
    finally:
        release()


@pytest.mark.parametrize(
    ("change", "ids", "state"),
    [("ADD b text", [1, 2, 3], TableState.LIVE), ("DROP a, ADD b text", [1, UNPROVED + 1], TableState.NEEDS_RESYNC)],
)
def test_a_definition_that_a_waiting_commit_changed_is_the_one_that_it_left(
    database: str, change: LiteralString, ids: list[int], state: TableState
) -> None:
    """Under the older definition an added column has no number, and a column that replaced another has its number."""
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, a text)")
    with (
        decoding_session(database) as session,
        commit_that_waits(database, f"ALTER TABLE t {change}", "INSERT INTO t (id, b) VALUES (2, 'b')") as release,
    ):
        releasing = Thread(target=lambda: (until(lambda: rows_of(database, ASKED) != [(0,)], "the reader"), release()))
        releasing.start()
        session.catch_up()
        releasing.join()
        assert ([column.id for column in session.latest.columns], session.latest.state) == (ids, state)


def test_only_a_transaction_that_changed_the_definition_is_waited_for(database: str) -> None:
    """Also for a role that sees nothing of other sessions."""
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, a text)", "CREATE TABLE u (id int)")
    with (
        connect(database, autocommit=False) as other,
        reader_of(database) as own_dsn,
        connect(own_dsn) as own,
    ):
        (oid, xid) = other.execute("SELECT 't'::regclass::oid, pg_current_xact_id()::xid::text::bigint").fetchone()  # type: ignore[misc]
        other.execute("INSERT INTO t VALUES (1, 'a')")
        other.execute("ALTER TABLE u ADD b text")
        await_definition(own, oid, xid, patience=0)
        other.execute("ALTER TABLE t ADD b text")
        with pytest.raises(CommitNotVisible, match=f"transaction {xid} changed the definition"):
            await_definition(own, oid, xid, patience=0)
        other.commit()
        await_definition(own, oid, xid, patience=0)


def test_a_role_that_does_not_see_standbys_is_told_so_and_not_that_there_is_none(database: str) -> None:
    with reader_of(database) as own_dsn, connect(own_dsn) as own, connect(database) as primary:
        limit = CopyRateLimit(None, SourceLoad(standby=StandbyLimit(name="second")), sender_on(own), Event())
        reason = limit.pause_reason() or ""
        message, _, grant = reason.partition(": ")
        assert "does not see the lag of standbys" in message
        primary.execute(grant.encode())
        assert sender_on(own).standby_lag("second") is None


def sender_on(conn: Connection) -> ChunkSender:
    return ChunkSender(conn, ReaderContext().link)
