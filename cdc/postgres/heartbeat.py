"""Heartbeats and watermarks: transactional logical messages, the only writes of a reader to the source."""

from __future__ import annotations

from contextlib import suppress

import psycopg

from cdc.lsn import Lsn
from cdc.postgres.sqlstate import map_errors


def emit_message(conn: psycopg.Connection, prefix: str, content: str) -> Lsn:
    """Write one message in its own transaction; returns the LSN of the message, which is below that of the commit.

    Uses `synchronous_commit = local`, so that a hanging synchronous standby does not block the reader.
    """
    with map_errors(), conn.transaction():
        conn.execute("SET LOCAL synchronous_commit = local")
        row = conn.execute("SELECT pg_logical_emit_message(true, %s, %s)::text", [prefix, content]).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return Lsn.parse(row[0])


def is_standby(conn: psycopg.Connection) -> bool:
    """Whether the server is in recovery and therefore read-only."""
    with map_errors():
        return conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)


def log_standby_snapshot(conn: psycopg.Connection) -> None:
    """Log the running transactions, so that a slot on a standby can be created; ignored without the privilege."""
    with map_errors(), suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction):
        conn.execute("SELECT pg_log_standby_snapshot()")
