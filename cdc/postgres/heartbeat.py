"""Heartbeats and watermarks: transactional logical messages, the only thing we write to the source."""

from __future__ import annotations

from contextlib import suppress

import psycopg

from cdc.lsn import Lsn
from cdc.postgres.sqlstate import map_errors


def emit_message(conn: psycopg.Connection, prefix: str, content: str) -> Lsn:
    """Send one message in a transaction of its own; gives the LSN of the message, below that of its commit.

    Under `synchronous_commit = local`: a synchronous standby that hangs must not stop the reader.
    """
    with map_errors(), conn.transaction():
        conn.execute("SET LOCAL synchronous_commit = local")
        row = conn.execute("SELECT pg_logical_emit_message(true, %s, %s)::text", [prefix, content]).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return Lsn.parse(row[0])


def is_standby(conn: psycopg.Connection) -> bool:
    """Whether nothing can be written there."""
    with map_errors():
        return conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)


def log_standby_snapshot(conn: psycopg.Connection) -> None:
    """Tell standbys which transactions run, so that a slot on one can begin; nothing without the right to."""
    with map_errors(), suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction):
        conn.execute("SELECT pg_log_standby_snapshot()")
