"""COPY of whole tables inside an exported snapshot, as the text that the stream would send."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Final

import psycopg
from psycopg import generators, pq, sql

from cdc.errors import UnknownRelation
from cdc.postgres import libpq
from cdc.postgres.replication import failure_of
from cdc.postgres.sqlstate import mapped
from cdc.table import TableSchema

CHUNK: Final = 1 << 20
"""Bytes of one chunk, about."""
_KIND: Final = "SELECT relkind FROM pg_class WHERE oid = %s AND relkind IN ('r', 'p')"


def begin_snapshot(conn: psycopg.Connection, snapshot: str) -> None:
    """Begin a read-only transaction that sees what the exported snapshot sees; nothing may have been run in it.

    The caller ends it; raises SourceError if the snapshot's connection went on or is gone.
    """
    with mapped():
        if conn.autocommit:
            conn.execute("BEGIN")
        try:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
        except psycopg.Error:
            conn.execute("ROLLBACK")
            raise


def copy_table(conn: psycopg.Connection, schema: TableSchema) -> Iterator[bytes]:
    """The rows of one table in COPY's text format, sent columns in their order; chunks are whole lines.

    Of a table with children by inheritance only its own rows, of a partitioned one those of all
    partitions: as pgoutput sends them. Leaving early cancels the statement. Raises PreflightFailed
    without the right to read, UnknownRelation if the table is gone.
    """
    with mapped():
        statement = _statement(conn, schema)
        conn.pgconn.send_query(statement.encode())
        answer = conn.wait(generators.execute(conn.pgconn))[-1]
    if answer.status != pq.ExecStatus.COPY_OUT:
        raise failure_of(answer)
    finished = False
    try:
        for drained in _chunks(conn):
            if drained.status < libpq.PENDING:
                finished = True
            if len(drained.frames):
                yield drained.frames.buffer.tobytes()
    finally:
        if not finished:
            conn.cancel_safe()
            for _ in _chunks(conn):
                pass
        failures = _finish(conn)
    if failures:
        raise failures[0]


def _chunks(conn: psycopg.Connection) -> Iterator[libpq.Drained]:
    """Drains until the copy ended, waiting for input in between."""
    drain = libpq.CopyDrain(conn.pgconn)
    poll = select.poll()
    poll.register(conn.pgconn.socket, select.POLLIN)
    while True:
        drained = drain.take(CHUNK)
        yield drained
        if drained.status < libpq.PENDING:
            return
        if drained.status == libpq.PENDING:
            poll.poll()
            with mapped():
                conn.pgconn.consume_input()


def _finish(conn: psycopg.Connection) -> list[Exception]:
    """Read the results after the last row, so that the connection is free again; gives what went wrong."""
    failures: list[Exception] = []
    while (answer := conn.pgconn.get_result()) is not None:
        if answer.status == pq.ExecStatus.FATAL_ERROR:
            failures.append(failure_of(answer))
    return failures


def _statement(conn: psycopg.Connection, schema: TableSchema) -> str:
    row = conn.execute(_KIND, [schema.oid]).fetchone()
    if row is None:
        raise UnknownRelation(f"no table {schema.topic!r} with oid {schema.oid} to copy")
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.sent)
    only = sql.SQL("") if row[0] == "p" else sql.SQL("ONLY ")
    query = sql.SQL("COPY (SELECT {} FROM {}{}) TO STDOUT").format(
        columns, only, sql.Identifier(schema.schema, schema.name)
    )
    return query.as_string(conn)
