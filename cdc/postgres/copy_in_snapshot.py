"""Reading of table rows with COPY in a snapshot; the values have the same text form as in the stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import psycopg
from psycopg import generators, pq, sql

from cdc.errors import CdcError, SnapshotInvalidated, UndecodableWal, UnknownRelation, UnreadableRow
from cdc.errors import complete_remedy as remedy_of
from cdc.postgres import copy_data_receiver
from cdc.postgres.replication import error_from_result, quote_identifier
from cdc.postgres.sql_ascii import disable_encoding_conversion, is_sql_ascii
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName
from cdc.table import TableSchema

CHUNK: Final = 1 << 20
"""Approximate number of bytes of one piece of COPY output."""
LOCKED_AT_ONCE: Final = 100
"""Number of tables that one statement locks."""
BYTEA: Final = 17
"""OID of the type bytea."""
MOST_BYTES: Final = 1 << 29
"""Minimum size in bytes of a bytea whose text form is too long for Postgres (MaxAllocSize, 1 GiB - 1)."""
_USABLE: Final = {pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS}
_KIND: Final = "SELECT relkind FROM pg_class WHERE oid = %s AND relkind IN ('r', 'p')"


_REWRITTEN: Final = """
    WITH wanted AS (SELECT unnest(%s::oid[]) AS oid),
    stored AS (SELECT oid FROM wanted UNION SELECT relid FROM wanted, pg_partition_tree(wanted.oid))
    SELECT c.oid::regclass::text FROM pg_class c JOIN stored USING (oid)
    WHERE c.relfilenode IS DISTINCT FROM coalesce(pg_relation_filenode(c.oid), 0)
"""
"""Query for tables that were rewritten or truncated after the snapshot.

`relfilenode` is read in the snapshot, and `pg_relation_filenode` returns the current value.
"""
_RENAMED: Final = """
    SELECT wanted.name FROM unnest(%s::oid[], %s::text[]) AS wanted (oid, name)
    WHERE to_regclass(wanted.name) IS DISTINCT FROM wanted.oid
"""
"""Query for names that no longer name the table that they named in the snapshot; `to_regclass` uses current names."""


def begin_snapshot(conn: psycopg.Connection, snapshot: str) -> None:
    """Begin a read-only transaction that uses the exported snapshot.

    The caller must lock the tables that it will read, and must end the transaction. Raises SourceError if the
    transaction that exported the snapshot has ended.
    """
    with map_errors():
        if conn.autocommit:
            conn.execute("BEGIN")
        try:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
        except psycopg.Error:
            conn.execute("ROLLBACK")
            raise


def lock_tables(conn: psycopg.Connection, tables: Sequence[tuple[int, TableName]]) -> None:
    """Lock tables against truncation and rewrites until the transaction of `begin_snapshot` ends.

    Raises SnapshotInvalidated if a table was truncated or rewritten between the snapshot and the lock: in the snapshot
    such a table is empty. Raises it also if a table was dropped or renamed: queries use current names, so they would
    read another table. The lock (ACCESS SHARE, as in pg_dump) does not block readers and writers of rows.
    """
    names_of = [f"{quote_identifier(name.schema)}.{quote_identifier(name.name)}" for _, name in tables]
    with map_errors():
        for start in range(0, len(tables), LOCKED_AT_ONCE):
            names = sql.SQL(", ").join(sql.Identifier(*name) for _, name in tables[start : start + LOCKED_AT_ONCE])
            try:
                conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as exc:
                raise SnapshotInvalidated("a table was dropped or renamed after the snapshot was taken") from exc
        oids = [oid for oid, _ in tables]
        rewritten = conn.execute(_REWRITTEN, [oids]).fetchall()
        renamed = conn.execute(_RENAMED, [oids, names_of]).fetchall()
    for what, found in (("truncated or rewritten", rewritten), ("dropped or renamed", renamed)):
        if found:
            tables_changed = ", ".join(sorted(name for (name,) in found))
            raise SnapshotInvalidated(f"tables were {what} after the snapshot was taken: {tables_changed}")


def partitioned_oids(conn: psycopg.Connection) -> frozenset[int]:
    """Return the OIDs of all partitioned tables, for `copy_table` of many tables in one snapshot."""
    with map_errors():
        return frozenset(oid for (oid,) in conn.execute("SELECT oid FROM pg_class WHERE relkind = 'p'"))


def copy_table(
    conn: psycopg.Connection, schema: TableSchema, partitioned: Collection[int] | None = None
) -> Iterator[memoryview]:
    """Yield the rows of one table in COPY's text format, with the columns `schema.sent` in that order.

    The rows come in the pieces that `copy_rows` yields. As in pgoutput, rows of inheritance children are left out, and
    rows of all partitions are included. Text of an SQL_ASCII database is not converted (see
    `cdc.postgres.sql_ascii`). Closing the iterator early cancels the statement.

    partitioned: result of `partitioned_oids`; without it, a query finds out whether this table is partitioned. Raises
    PreflightFailed if the privilege to read is missing, UnknownRelation if the table does not exist.
    """
    with map_errors():
        item = from_clause(conn, schema) if partitioned is None else _from_item(schema, schema.oid in partitioned)
    yield from copy_rows(conn, _select(schema, item), schema)


def select_table(conn: psycopg.Connection, schema: TableSchema) -> sql.Composed:
    """Return a SELECT of the columns `schema.sent`, in that order, from the rows that pgoutput sends for the table.

    Raises UnknownRelation if the table does not exist.
    """
    return _select(schema, from_clause(conn, schema))


def _select(schema: TableSchema, item: sql.Composed) -> sql.Composed:
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.sent)
    return sql.SQL("SELECT {} FROM {}").format(columns, item)


def from_clause(conn: psycopg.Connection, schema: TableSchema) -> sql.Composed:
    """Return the FROM item for the rows that pgoutput sends for the table.

    The item is `name` for a partitioned table, and `ONLY name` for an ordinary table. Raises UnknownRelation if the
    table does not exist.
    """
    row = conn.execute(_KIND, [schema.oid]).fetchone()
    if row is None:
        raise UnknownRelation(f"the source has no table {schema.topic!r} with oid {schema.oid}")
    return _from_item(schema, row[0] == "p")


def _from_item(schema: TableSchema, is_partitioned: bool) -> sql.Composed:  # noqa: FBT001 - private
    only = sql.SQL("") if is_partitioned else sql.SQL("ONLY ")
    return sql.SQL("{}{}").format(only, sql.Identifier(schema.schema, schema.name))


def copy_rows(conn: psycopg.Connection, query: sql.Composed, schema: TableSchema | None = None) -> Iterator[memoryview]:
    """Yield the rows of a query in COPY's text format, in pieces of whole lines.

    A piece is valid only until the next piece is read. Closing the iterator early cancels the statement. Raises
    UnreadableRow, which names the table, if Postgres cannot send a row.
    """
    statement = sql.SQL("COPY ({}) TO STDOUT").format(query).as_string(conn)
    with map_errors():
        if is_sql_ascii(conn):
            disable_encoding_conversion(conn)
        conn.pgconn.send_query(statement.encode())
        answer = conn.wait(generators.execute(conn.pgconn))[-1]
    if answer.status != pq.ExecStatus.COPY_OUT:
        raise _of_table(error_from_result(answer), schema)
    status, drain = copy_data_receiver.PENDING, copy_data_receiver.LineDrain(conn.pgconn)
    try:
        for status in _statuses(drain):
            if drain.nbytes >= CHUNK or (status < copy_data_receiver.PENDING and drain.nbytes):
                yield drain.take()
    finally:
        if status >= copy_data_receiver.PENDING:
            conn.cancel_safe()
            for _ in _statuses(drain):
                drain.take()
        failures = _finish(conn)
        if is_sql_ascii(conn) and conn.info.transaction_status in _USABLE:  # a failed transaction rolls the SET back
            with map_errors():
                conn.execute("SET client_encoding TO UTF8")
    if failures:
        raise _of_table(failures[0], schema)


def _of_table(failure: CdcError, schema: TableSchema | None) -> CdcError:
    """Return UnreadableRow in place of UndecodableWal; return any other error unchanged.

    If `schema` is not None, UnreadableRow names the table. If the table has bytea columns, UnreadableRow contains SQL
    that finds too large values.
    """
    if not isinstance(failure, UndecodableWal):
        return failure
    if schema is None:
        return UnreadableRow(failure.message)
    large = [column.name for column in schema.sent if column.type_oid == BYTEA]
    found = "" if not large else f" (find it: {_larger(schema, large)})"
    remedy = (
        f"correct, shorten or delete the row{found}, or remove the affected column from the publication, then run "
        "'cdc tables resync TABLE'; to stop capturing the table, run 'cdc tables remove TABLE'"
    )
    return UnreadableRow(
        f"the server cannot send a row of {schema.topic!r}: {failure.message}",
        remedy=remedy_of(remedy, topic=schema.topic),
    )


def _larger(schema: TableSchema, columns: Sequence[str]) -> str:
    """Return SQL that finds the rows with a value whose text is too long for Postgres, without reading the values."""
    keys = ", ".join(quote_identifier(column.name) for column in schema.key) or "ctid"
    longer = " OR ".join(f"octet_length({quote_identifier(name)}) >= {MOST_BYTES}" for name in columns)
    return f"SELECT {keys} FROM {quote_identifier(schema.schema)}.{quote_identifier(schema.name)} WHERE {longer}"


def _statuses(drain: copy_data_receiver.LineDrain) -> Iterator[int]:
    """Yield the status of each read until the COPY has ended."""
    status = copy_data_receiver.PENDING
    while status >= copy_data_receiver.PENDING:
        with map_errors():
            status = drain.gather(CHUNK)
        yield status


def _finish(conn: psycopg.Connection) -> list[CdcError]:
    """Read the results after the last row, so that the connection is usable again, and return the errors."""
    failures: list[CdcError] = []
    while (answer := conn.pgconn.get_result()) is not None:
        if answer.status == pq.ExecStatus.FATAL_ERROR:
            failures.append(error_from_result(answer))
    return failures
