"""COPY of whole tables inside an exported snapshot, as the text that the stream would send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg import generators, pq, sql

from cdc.errors import CdcError, SnapshotInvalidated, UndecodableWal, UnknownRelation, UnreadableRow
from cdc.postgres import libpq
from cdc.postgres.connection import disable_encoding_conversion, is_sql_ascii
from cdc.postgres.quoting import identifier
from cdc.postgres.replication import error_from_result
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import TableName
from cdc.remedy import complete_remedy as remedy_of
from cdc.table import TableSchema

CHUNK: Final = 1 << 20
"""Bytes of one chunk, about."""
BYTEA: Final = 17
"""OID of the type."""
MOST_BYTES: Final = 1 << 29
"""From this length on a bytea in text form is more than the server allocates (MaxAllocSize, 1 GiB - 1)."""
_USABLE: Final = {pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS}
_KIND: Final = "SELECT relkind FROM pg_class WHERE oid = %s AND relkind IN ('r', 'p')"


_REWRITTEN: Final = """
    WITH wanted AS (SELECT unnest(%s::oid[]) AS oid),
    stored AS (SELECT oid FROM wanted UNION SELECT relid FROM wanted, pg_partition_tree(wanted.oid))
    SELECT c.oid::regclass::text FROM pg_class c JOIN stored USING (oid)
    WHERE c.relfilenode IS DISTINCT FROM coalesce(pg_relation_filenode(c.oid), 0)
"""
"""`relfilenode` is read under the snapshot, `pg_relation_filenode` tells of now."""


def begin_snapshot(conn: psycopg.Connection, snapshot: str) -> None:
    """Begin a read-only transaction that sees what the exported snapshot sees; nothing may have been run in it.

    The caller ends it, and holds the tables that it will read; raises SourceError if the snapshot's connection
    went on or is gone.
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
    """Keep tables from being truncated or rewritten until the transaction of begin_snapshot ends.

    Raises SnapshotInvalidated when one of them was before the lock was held: it would read as empty. Readers and
    writers of rows are not blocked (ACCESS SHARE, the lock that pg_dump takes).
    """
    with map_errors():
        for _, name in tables:
            conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.Identifier(*name)))
        found = conn.execute(_REWRITTEN, [[oid for oid, _ in tables]]).fetchall()
    if found:
        raise SnapshotInvalidated(
            f"truncated or rewritten under the snapshot: {', '.join(sorted(name for (name,) in found))}"
        )


def copy_table(conn: psycopg.Connection, schema: TableSchema) -> Iterator[memoryview]:
    """The rows of one table in COPY's text format, sent columns in their order; chunks as those of copy_rows.

    Of a table with children by inheritance only its own rows, of a partitioned one those of all
    partitions: as pgoutput sends them. Text of an SQL_ASCII database comes as it is stored (see
    `cdc.pgoutput.text_repair`). Leaving early cancels the statement. Raises PreflightFailed
    without the right to read, UnknownRelation if the table is gone.
    """
    with map_errors():
        query = select_table(conn, schema)
    yield from copy_rows(conn, query, schema)


def select_table(conn: psycopg.Connection, schema: TableSchema) -> sql.Composed:
    """SELECT of the sent columns, in their order, of what pgoutput sends as the table's; raises UnknownRelation."""
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.sent)
    return sql.SQL("SELECT {} FROM {}").format(columns, from_clause(conn, schema))


def from_clause(conn: psycopg.Connection, schema: TableSchema) -> sql.Composed:
    """What stands behind FROM for the rows that pgoutput sends as the table's; raises UnknownRelation."""
    row = conn.execute(_KIND, [schema.oid]).fetchone()
    if row is None:
        raise UnknownRelation(f"no table {schema.topic!r} with oid {schema.oid} to copy")
    only = sql.SQL("") if row[0] == "p" else sql.SQL("ONLY ")
    return sql.SQL("{}{}").format(only, sql.Identifier(schema.schema, schema.name))


def copy_rows(conn: psycopg.Connection, query: sql.Composed, schema: TableSchema | None = None) -> Iterator[memoryview]:
    """The rows of a query in COPY's text format, in chunks of whole lines; each lasts until the next is asked for.

    Leaving early cancels the statement. Raises UnreadableRow, which names the table of schema, if the server cannot
    send a row.
    """
    statement = sql.SQL("COPY ({}) TO STDOUT").format(query).as_string(conn)
    with map_errors():
        if is_sql_ascii(conn):
            disable_encoding_conversion(conn)
        conn.pgconn.send_query(statement.encode())
        answer = conn.wait(generators.execute(conn.pgconn))[-1]
    if answer.status != pq.ExecStatus.COPY_OUT:
        raise _of_table(error_from_result(answer), schema)
    status, drain = libpq.PENDING, libpq.LineDrain(conn.pgconn)
    try:
        for status in _statuses(drain):
            if drain.nbytes >= CHUNK or (status < libpq.PENDING and drain.nbytes):
                yield drain.take()
    finally:
        if status >= libpq.PENDING:
            conn.cancel_safe()
            for _ in _statuses(drain):
                drain.take()
        failures = _finish(conn)
        if (
            is_sql_ascii(conn) and conn.info.transaction_status in _USABLE
        ):  # a failed transaction takes the SET back itself
            with map_errors():
                conn.execute("SET client_encoding TO UTF8")
    if failures:
        raise _of_table(failures[0], schema)


def _of_table(failure: CdcError, schema: TableSchema | None) -> CdcError:
    """What the server cannot decode is a row here, and not WAL; SQL that finds it where its size is the cause."""
    if not isinstance(failure, UndecodableWal):
        return failure
    if schema is None:
        return UnreadableRow(failure.message)
    large = [column.name for column in schema.sent if column.type_oid == BYTEA]
    found = "" if not large else f" (find it: {_larger(schema, large)})"
    remedy = (
        f"correct, shorten or delete the row{found}, or leave its column out of the publication, then run "
        "'cdc tables resync TABLE'; without the table: 'cdc tables remove TABLE'"
    )
    return UnreadableRow(
        f"the server cannot send a row of {schema.topic!r}: {failure.message}",
        remedy=remedy_of(remedy, topic=schema.topic),
    )


def _larger(schema: TableSchema, columns: Sequence[str]) -> str:
    """The statement that finds values whose text is too long for the server; their length is known without reading."""
    keys = ", ".join(identifier(column.name) for column in schema.key) or "ctid"
    longer = " OR ".join(f"octet_length({identifier(name)}) >= {MOST_BYTES}" for name in columns)
    return f"SELECT {keys} FROM {identifier(schema.schema)}.{identifier(schema.name)} WHERE {longer}"


def _statuses(drain: libpq.LineDrain) -> Iterator[int]:
    """What each gathering says, until the copy ended."""
    status = libpq.PENDING
    while status >= libpq.PENDING:
        with map_errors():
            status = drain.gather(CHUNK)
        yield status


def _finish(conn: psycopg.Connection) -> list[CdcError]:
    """Read the results after the last row, so that the connection is free again; gives what went wrong."""
    failures: list[CdcError] = []
    while (answer := conn.pgconn.get_result()) is not None:
        if answer.status == pq.ExecStatus.FATAL_ERROR:
            failures.append(error_from_result(answer))
    return failures
