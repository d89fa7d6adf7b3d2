"""Queries that read chunks of a table, and the transaction whose snapshot they read.

A query selects a chunk by block range or by key range, never by OFFSET. So a chunk at the end of a table costs no more
than one at its beginning. A key value in a query is a literal of unknown type with the text that Postgres printed.
Postgres parses it as a value of the column's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from cdc.errors import PreflightFailed, SnapshotInvalidated
from cdc.postgres.copy_in_snapshot import select_table
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName
from cdc.postgres.visibility import Visibility, sees_statistics, statistics_grant
from cdc.table import TableSchema

_ESTIMATE: Final = """
    SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class c
    WHERE c.oid = %(oid)s OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass))
"""
_LEAVES: Final = """
    SELECT c.oid::bigint, n.nspname, c.relname, c.relfilenode::bigint,
        a.amname = 'heap' AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
        AND NOT row_security_active(c.oid),
        pg_relation_size(c.oid) / current_setting('block_size')::int
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_am a ON a.oid = c.relam
    WHERE c.relkind = 'r' AND (
        c.oid = %(oid)s OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass) WHERE isleaf))
    ORDER BY c.oid
"""
_SIZES: Final = """
    SELECT asked, coalesce(sum(pg_table_size(relid)), 0)::bigint FROM (
        SELECT asked, asked AS relid FROM unnest(%(oids)s::oid[]) asked
        UNION SELECT asked, relid::oid FROM unnest(%(oids)s::oid[]) asked, pg_partition_tree(asked)) t
    GROUP BY asked
"""
_TYPE_NAMES: Final = "SELECT oid::bigint, format_type(oid, -1) FROM unnest(%s::oid[]) AS oid"
_REPLAYED: Final = """
    SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn)::bigint FROM pg_stat_replication
    WHERE application_name = %s AND replay_lsn IS NOT NULL
"""
_SNAPSHOT: Final = """
    SELECT pg_current_snapshot()::text, (SELECT relfilenode::bigint FROM pg_class WHERE oid = %(oid)s), (
        SELECT c.oid::bigint FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = %(schema)s AND c.relname = %(name)s)
"""
_COLUMNS: Final = """
    SELECT attname, atttypid::bigint FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
    ORDER BY attnum
"""
# to_jsonb: filters came with version 15
_FILTER: Final = """
    SELECT to_jsonb(t) ->> 'rowfilter' FROM pg_publication_tables t
    WHERE t.pubname = %s AND t.schemaname = %s AND t.tablename = %s
"""


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Selection of rows by key range, by key list and by an optional condition."""

    after: tuple[str, ...] | None = None
    """Lower bound of the keys, not included; None for no such bound."""
    first: tuple[str, ...] | None = None
    """Lower bound of the keys, included; ignored if `after` is set."""
    last: tuple[str, ...] | None = None
    """Upper bound of the keys, included; None for no bound."""
    where: str | None = None
    """Condition in the SQL of the source; its query runs in a read-only transaction. None for no condition."""
    keys: tuple[tuple[str, ...], ...] | None = None
    """The only keys to select; None selects all keys."""


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A relation of Postgres that stores rows: an ordinary table, or a leaf partition."""

    oid: int
    name: TableName
    file: int
    """`pg_class.relfilenode`. A rewrite changes it, and makes block numbers invalid."""
    blocks: int


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The rows in a range of blocks of a stored table, or in a part of one block."""

    leaf: StoredTable
    first: int
    end: int
    """Number of the first block after the range."""
    lines: tuple[int, int] | None = None
    """For a part of one block: its first line pointer, and the line pointer after the part. None for whole blocks."""


@contextmanager
def snapshot_transaction(
    conn: psycopg.Connection, schema: TableSchema, leaf: StoredTable | None = None
) -> Iterator[Visibility]:
    """Open a read-only REPEATABLE READ transaction that locks the table, and yield the visibility of its snapshot.

    `conn` is in autocommit mode. With `leaf`, only this leaf partition is locked. The transaction takes the lock before
    its snapshot. So no DDL changes the table after the snapshot, and the system catalogs describe the rows that the
    transaction reads.

    Raises SnapshotInvalidated if the table's name now belongs to a different table, or if the leaf was rewritten.
    Raises UnknownRelation if the table does not exist.
    """
    oid, name = (schema.oid, TableName(schema.schema, schema.name)) if leaf is None else (leaf.oid, leaf.name)
    with map_errors(), conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.Identifier(*name)))
        row = conn.execute(_SNAPSHOT, {"oid": oid, "schema": name.schema, "name": name.name}).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM has one row
        visibility, file, named = row
        if named != oid:
            raise SnapshotInvalidated(f"table {str(name)!r} cannot be copied: another table now has this name")
        if leaf is not None and file != leaf.file:
            raise SnapshotInvalidated(
                f"table {schema.topic!r} must be copied again: the source rewrote the table during the copy"
            )
        yield Visibility.parse(visibility)


def has_columns(conn: psycopg.Connection, schema: TableSchema) -> bool:
    """Return True if the table in the current snapshot has the columns `schema.sent`, in that order.

    The function ignores other columns of the table.
    """
    with map_errors():
        columns = conn.execute(_COLUMNS, [schema.oid]).fetchall()
    sent = [(column.name, column.type_oid) for column in schema.sent]
    names = {name for name, _ in sent}
    return [(name, of) for name, of in columns if name in names] == sent


def stored_tables(conn: psycopg.Connection, oid: int) -> list[StoredTable] | None:
    """Return the relations that store the rows of a table, sorted by OID; None if one cannot be read by block ranges.

    Only a heap can be read by block ranges, and only if the role may read it: the right to read a partitioned table is
    not a right to read its partitions by their own names.
    """
    with map_errors():
        found = conn.execute(_LEAVES, {"oid": oid}).fetchall()
    if not all(is_readable for _, _, _, _, is_readable, _ in found):
        return None
    return [StoredTable(leaf, TableName(schema, name), file, blocks) for leaf, schema, name, file, _, blocks in found]


def table_sizes(conn: psycopg.Connection, oids: Sequence[int]) -> dict[int, int]:
    """Return the size of each table in bytes, by OID; 0 for a dropped table.

    The size includes leaf partitions and TOAST, but no indexes.
    """
    with map_errors():
        return dict(conn.execute(_SIZES, {"oids": list(oids)}).fetchall())


def replay_lag(conn: psycopg.Connection, standby: str) -> int | None:
    """Return the bytes of WAL that a standby has not applied yet; None if the standby is not connected.

    `conn` is a connection to the primary, and `standby` the `application_name` of the standby. Raises PreflightFailed
    if the role may not see standbys.
    """
    with map_errors():
        if not sees_statistics(conn):
            raise PreflightFailed(
                f"role {conn.info.user!r} does not see the lag of standbys", remedy=statistics_grant(conn.info.user)
            )
        row = conn.execute(_REPLAYED, [standby]).fetchone()
    return None if row is None else int(row[0])


def key_range_query(
    conn: psycopg.Connection, schema: TableSchema, bounds: KeyBounds, limit: int, publication: str
) -> sql.Composed:
    """Return a SELECT of up to `limit` rows within the bounds, in key order, for use with `copy_rows`.

    The SELECT contains the publication's row filter.
    """
    key = sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.key)
    rows, where = select_table(conn, schema), _where(conn, schema, bounds, publication)
    return sql.SQL("{}{} ORDER BY {} LIMIT {}").format(rows, where, key, sql.Literal(limit))


def block_range_query(
    conn: psycopg.Connection, schema: TableSchema, span: BlockRange, publication: str
) -> sql.Composed:
    """Return a SELECT of the rows in a block range, with the publication's row filter, for use with `copy_rows`."""
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.sent)
    first, end = (span.first, 0), (span.end, 0)
    if span.lines is not None:
        first, end = (span.first, span.lines[0]), (span.first, span.lines[1])
    rows = sql.SQL("SELECT {} FROM ONLY {} WHERE ctid >= {}::tid AND ctid < {}::tid").format(
        columns, sql.Identifier(*span.leaf.name), sql.Literal(str(first)), sql.Literal(str(end))
    )
    return _all([rows, *row_filter(conn, schema, publication)])


def table_query(conn: psycopg.Connection, schema: TableSchema, publication: str) -> sql.Composed:
    """Return a SELECT of all rows of a table, with the publication's row filter, for use with `copy_rows`."""
    filtered = row_filter(conn, schema, publication)
    where = sql.SQL(" WHERE {}").format(_all(filtered)) if filtered else sql.SQL("")
    return sql.SQL("{}{}").format(select_table(conn, schema), where)


def estimate_rows(conn: psycopg.Connection, oid: int) -> int:
    """Return the planner's estimate of the rows in a table and its partitions; 0 before the first ANALYZE."""
    with map_errors():
        row = conn.execute(_ESTIMATE, {"oid": oid}).fetchone()
    return int(row[0]) if row else 0


def _where(conn: psycopg.Connection, schema: TableSchema, bounds: KeyBounds, publication: str) -> sql.Composable:
    key = sql.SQL("({})").format(sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.key))
    parts: list[sql.Composable] = []
    types = key_types(conn, schema)
    start, over = (bounds.after, ">") if bounds.after is not None else (bounds.first, ">=")
    if start is not None:
        parts.append(sql.SQL("{} " + over + " {}").format(key, _row(start, types)))  # type: ignore[arg-type]
    if bounds.last is not None:
        parts.append(sql.SQL("{} <= {}").format(key, _row(bounds.last, types)))
    if bounds.keys is not None:
        listed = sql.SQL(", ").join(_row(listed_key, types) for listed_key in bounds.keys)
        parts.append(sql.SQL("{} IN ({})").format(key, listed))
    if bounds.where is not None:
        parts.append(sql.SQL("({})").format(sql.SQL(bounds.where)))  # type: ignore[arg-type]
    parts += row_filter(conn, schema, publication)
    return sql.SQL(" WHERE {}").format(_all(parts)) if parts else sql.SQL("")


def row_filter(conn: psycopg.Connection, schema: TableSchema, publication: str) -> list[sql.Composable]:
    """Return the publication's row filter for the table as a list of one condition; an empty list without a filter."""
    row = conn.execute(_FILTER, [publication, schema.schema, schema.name]).fetchone()
    return [sql.SQL("({})").format(sql.SQL(row[0]))] if row is not None and row[0] is not None else []


def _all(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL(" AND ").join(parts)


def key_types(conn: psycopg.Connection, schema: TableSchema) -> list[str]:
    """Return the SQL names of the types of the key columns, without type modifier; of a domain, those of its base type.

    A stored value need not satisfy the constraints of its domain.
    """
    oids = [column.base_type_oid or column.type_oid for column in schema.key]
    names: dict[int, str] = dict(conn.execute(_TYPE_NAMES, [oids]).fetchall())
    return [names[oid] for oid in oids]


def typed_literal(text: str, type_name: str) -> sql.Composed:
    """Return a literal of a type. type_name: as format_type prints it, which quotes names where necessary.

    In a comparison with a column, a literal without a type can get another type: for a regclass that of an OID, for a
    composite type that of an anonymous record.
    """
    return sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(type_name))  # type: ignore[arg-type]


def _row(key: Sequence[str], types: Sequence[str]) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(", ").join(map(typed_literal, key, types)))
