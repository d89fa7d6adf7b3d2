"""Logical messages from a real server through a real reader into the log, streamed transactions included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from cdc.log.format_upgrade import migrate_log
from cdc.log_row import OWN_PREFIXES
from cdc.logical_message import LogicalMessage
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from tests.faults.capture import Captured, capture_table
from tests.fixtures.postgres import run_sql
from tests.pgoutput.streams import ODD_PREFIXES

STREAMED = "?options=-c%20logical_decoding_work_mem%3D64kB"
EMIT = "SELECT pg_logical_emit_message(%s, %s, %s::bytea)::text"
RANDOM = b"\xff\x00{}"
SPOOLED = "INSERT INTO t SELECT generate_series(%s::int, %s::int)"


def emit(conn: psycopg.Connection[Any], prefix: str, *, transactional: bool, content: bytes = RANDOM) -> LogicalMessage:
    """Write a message, and return it as the log shall have it."""
    row = conn.execute(EMIT, [transactional, prefix, content]).fetchone()
    assert row is not None
    return LogicalMessage(prefix=prefix, transactional=transactional, lsn=Lsn.parse(row[0]), content=content)


def logged(captured: Captured) -> list[LogicalMessage]:
    """The messages of the log in its order, without those that a test's reader waits for."""
    found = [LogicalMessage.from_row(row) for row in captured.rows() if row["op"] == "m"]
    return [message for message in found if message.prefix != "cdc.test"]


def test_messages_of_any_prefix_are_logged_with_kind_lsn_and_content(tmp_path: Path, database: str) -> None:
    captured = capture_table(tmp_path, database)
    with connect(database) as conn:
        written = [
            emit(conn, prefix, transactional=transactional, content=content)
            for prefix in ODD_PREFIXES
            for transactional, content in ((True, RANDOM), (False, b""))
        ]
        for prefix in OWN_PREFIXES:
            emit(conn, prefix, transactional=True, content=b"{}")
    captured.stream()

    assert logged(captured) == written
    for row in captured.rows():
        message = LogicalMessage.from_row(row) if row["op"] == "m" else None
        if message and message.transactional is False and message.lsn is not None:
            assert (row["position"], row["xid"]) == (message.lsn - 1, 0)
    migrated = migrate_log(tmp_path / "log")
    assert migrated.before == migrated.after == 3


def test_messages_of_a_streamed_transaction_are_logged_unless_their_savepoint_was_rolled_back(
    tmp_path: Path, database: str
) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)")
    captured = Captured(tmp_path, database + STREAMED, slot=database.rpartition("/")[2])
    captured.copy()
    with connect(database) as conn, connect(database) as other:
        with conn.transaction():
            conn.execute(SPOOLED, [1, 3000])
            first = emit(conn, "in 'it'", transactional=True)
            with conn.transaction(force_rollback=True):
                conn.execute(SPOOLED, [4000, 6000])
                emit(conn, "rolled back", transactional=True)
            at_once = emit(conn, "\U0001f600", transactional=False)
            second = emit(other, "", transactional=True)
            conn.execute(SPOOLED, [7000, 9000])
            last = emit(conn, "last\n", transactional=True)
        with conn.transaction(force_rollback=True):
            kept = emit(conn, "kept", transactional=False)
    captured.stream()

    assert logged(captured) == [at_once, second, first, last, kept]
