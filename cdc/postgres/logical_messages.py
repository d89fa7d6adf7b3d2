"""Logical messages that cdc writes to the WAL: heartbeats and watermarks.

Apart from these messages, a reader changes only its slot and its publication at the source.
"""

from __future__ import annotations

import psycopg

from cdc.lsn import Lsn
from cdc.postgres.sqlstate import map_errors


def emit_message(conn: psycopg.Connection, prefix: str, content: str) -> Lsn:
    """Write one logical message in its own transaction, and return the LSN of the message.

    This LSN is not above the commit LSN. The transaction uses `synchronous_commit = local`, so that a hanging
    synchronous standby does not block the reader.
    """
    with map_errors(), conn.transaction():
        conn.execute("SET LOCAL synchronous_commit = local")
        row = conn.execute("SELECT pg_logical_emit_message(true, %s, %s)::text", [prefix, content]).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return Lsn.parse(row[0])
