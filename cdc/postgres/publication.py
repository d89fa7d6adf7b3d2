"""The publication: which tables pgoutput sends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

from cdc.errors import SlotBlocked
from cdc.postgres.sqlstate import mapped
from cdc.postgres.tables import TableName

_PUBLICATION: Final = "SELECT puballtables, pubviaroot FROM pg_publication WHERE pubname = %s"
_LISTED: Final = """
    SELECT n.nspname, c.relname
    FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE p.pubname = %s
"""
_SCHEMAS: Final = """
    SELECT n.nspname FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
    JOIN pg_namespace n ON n.oid = s.pnnspid WHERE p.pubname = %s
"""


_OLDEST: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text, pg_snapshot_xmax(pg_current_snapshot())::text"
_HOLDERS: Final = """
    SELECT format('pid %s (xid %s)', pid, backend_xid) FROM pg_stat_activity WHERE backend_xid IS NOT NULL
    UNION ALL SELECT format('prepared transaction %L (xid %s)', gid, transaction) FROM pg_prepared_xacts
"""
_ASK_EVERY: Final = 0.05
"""Seconds between two questions whether they have ended; there is nothing in SQL to wait on."""


def ensure_publication(
    conn: psycopg.Connection, name: str, tables: Sequence[TableName], *, patience: float = 10.0
) -> None:
    """Make the publication, or add what it lacks; nothing is taken out of it. Gives back when a snapshot may follow.

    Partitions are published under their root's name, so that moving a row between them is an update
    of one table. `conn` commits by itself. Raises PreflightFailed if the role owns neither publication nor tables,
    and SlotBlocked if older transactions are still open after `patience` seconds; it can be called again.
    """
    _publish(conn, name, tables)
    wait_for_older(conn, patience)


def wait_for_older(conn: psycopg.Connection, patience: float) -> None:
    """Wait for the end of every transaction that has an xid now.

    What one of them wrote in a table before it was published is not sent, though it commits later; a snapshot taken
    while it is open would not have it either. Locking the tables would do as well, and hold up their writers.
    """
    deadline = time.monotonic() + patience
    with mapped():
        _, horizon = _xids(conn)
        while (oldest := _xids(conn)[0]) < horizon:
            if time.monotonic() >= deadline:
                listed = ", ".join(text for (text,) in conn.execute(_HOLDERS)) or f"somebody with xid {oldest}"
                raise SlotBlocked(f"open since before the tables were published, for {patience:.0f} s now: {listed}")
            time.sleep(_ASK_EVERY)


def _xids(conn: psycopg.Connection) -> tuple[int, int]:
    """The oldest xid that is open, and the next that will be given."""
    row = conn.execute(_OLDEST).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return int(row[0]), int(row[1])


def _publish(conn: psycopg.Connection, name: str, tables: Sequence[TableName]) -> None:
    with mapped():
        found = conn.execute(_PUBLICATION, [name]).fetchone()
        if found is None:
            conn.execute(_create(name, tables))
            return
        everything, via_root = found
        if not via_root:
            conn.execute(
                sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)").format(sql.Identifier(name))
            )
        if not everything and (lacking := missing_tables(conn, name, tables)):
            conn.execute(sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), _names(lacking)))


def missing_tables(conn: psycopg.Connection, name: str, tables: Sequence[TableName]) -> list[TableName]:
    """Those of the tables that a publication by list or by schema does not name."""
    listed = {TableName(*row) for row in conn.execute(_LISTED, [name])}
    schemas: set[str] = set()
    if conn.info.server_version >= 150000:  # noqa: PLR2004 - FOR TABLES IN SCHEMA came with 15
        schemas = {row[0] for row in conn.execute(_SCHEMAS, [name])}
    return [table for table in tables if table not in listed and table.schema not in schemas]


def withdraw(conn: psycopg.Connection, name: str, table: TableName) -> None:
    """Take a table out of the publication; nothing if it is not listed there."""
    with mapped():
        if table in {TableName(*row) for row in conn.execute(_LISTED, [name])}:
            statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}")
            conn.execute(statement.format(sql.Identifier(name), sql.Identifier(*table)))


def creation_sql(name: str, tables: Sequence[TableName]) -> str:
    """The statement that makes the publication, for a person to run."""
    return _create(name, tables).as_string(None) + ";"


def addition_sql(name: str, tables: Sequence[TableName]) -> str:
    """The statement that adds the tables, for a person to run."""
    statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE {};").format(sql.Identifier(name), _names(tables))
    return statement.as_string(None)


def _create(name: str, tables: Sequence[TableName]) -> sql.Composed:
    members = sql.SQL(" FOR TABLE {}").format(_names(tables)) if tables else sql.SQL("")
    return sql.SQL("CREATE PUBLICATION {}{} WITH (publish_via_partition_root = true)").format(
        sql.Identifier(name), members
    )


def _names(tables: Sequence[TableName]) -> sql.Composed:
    # without ONLY the children of a table come along, whether a rule matches them or not
    return sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(*table)) for table in tables)
