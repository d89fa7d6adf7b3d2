"""Columns and rows that a publication sends of a table, so that copies contain the same ones.

A copy must not contain columns that a column list hides, and the schema that decodes the stream must list exactly the
columns that the stream sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

import psycopg

from cdc.postgres.chunk_snapshot import table_query
from cdc.postgres.copy import copy_rows, copy_table
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName, read_schemas
from cdc.table import Column, ReplicaIdentity, TableSchema

# to_jsonb: column lists and filters came with version 15
_SENT: Final = """
    SELECT c.oid::bigint, to_jsonb(t) -> 'attnames' FROM pg_publication_tables t
    JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = %s AND c.oid = ANY(%s)
"""
_FILTERED: Final = """
    SELECT t.schemaname, t.tablename FROM pg_publication_tables t
    WHERE t.pubname = %s AND to_jsonb(t) ->> 'rowfilter' IS NOT NULL
"""
COMPUTED_SENT: Final = 180000
"""First server version that can publish generated columns; 15 to 17 list them without sending them."""


def published_schema(
    conn: psycopg.Connection, oid: int, publication: str, relation: int | None = None
) -> TableSchema | None:
    """Schema of one table with its published columns; `relation` defaults to the OID; None without such a table."""
    schema = published_schemas(conn, [oid], publication).get(oid)
    return schema if schema is None or relation is None else replace(schema, relation=relation)


def published_schemas(conn: psycopg.Connection, oids: Sequence[int], publication: str) -> dict[int, TableSchema]:
    """Schemas of tables with their published columns, by OID; with all columns if the table is not published."""
    schemas = read_schemas(conn, oids, publication=publication)
    with map_errors():
        found = conn.execute(_SENT, [publication, list(oids)]).fetchall()
    listed = {oid: columns for oid, columns in found if columns is not None}
    computed = conn.info.server_version >= COMPUTED_SENT
    return {
        oid: _known_by_sent(
            replace(schema, columns=_sent(schema.columns, listed[oid], computed=computed)) if oid in listed else schema
        )
        for oid, schema in schemas.items()
    }


def published_rows(conn: psycopg.Connection, publication: str) -> Callable[[TableSchema], Iterator[memoryview]]:
    """A function that copies the published rows of a table; it reads once which tables have row filters."""
    with map_errors():
        filtered = {TableName(*row) for row in conn.execute(_FILTERED, [publication])}

    def rows_of(schema: TableSchema) -> Iterator[memoryview]:
        if (schema.schema, schema.name) not in filtered:
            return copy_table(conn, schema)
        with map_errors():
            query = table_query(conn, schema, publication)
        return copy_rows(conn, query, schema)

    return rows_of


def _known_by_sent(schema: TableSchema) -> TableSchema:
    """Without key if REPLICA IDENTITY is FULL and a key column is not sent: then whole rows identify rows."""
    if schema.replica_identity is not ReplicaIdentity.FULL or not any(column.generated for column in schema.key):
        return schema
    return replace(schema, columns=tuple(replace(column, key=None) for column in schema.columns))


def _sent(columns: Sequence[Column], listed: Collection[str], *, computed: bool) -> tuple[Column, ...]:
    """The listed columns, and generated ones, which the schema contains even if they are not sent."""
    return tuple(
        replace(column, generated=column.generated and not (computed and column.name in listed))
        for column in columns
        if column.generated or column.name in listed
    )
