"""The publication: which tables pgoutput sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

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


def ensure_publication(conn: psycopg.Connection, name: str, tables: Sequence[TableName]) -> None:
    """Make the publication, or add what it lacks; nothing is taken out of it.

    Partitions are published under their root's name, so that moving a row between them is an update
    of one table. Raises PreflightFailed if the role owns neither publication nor tables.
    """
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
    return sql.SQL(", ").join(sql.Identifier(*table) for table in tables)
