"""Queries over a key range of a table at the source: its rows, their number and digest, and the next range's start.

Postgres computes the digest, so that it does not have to send the rows. It hashes the columns of each row as text with
SHA-256, takes two parts of each hash, and adds up each part over all rows. So the order of rows and the collation do
not matter. The text of a value is the output of its type's output function under the pinned settings, as in COPY and in
the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import psycopg
from psycopg import sql

from cdc.postgres.chunk_queries import row_filter
from cdc.postgres.copy_in_snapshot import copy_rows, from_clause, select_table
from cdc.postgres.sql_ascii import is_sql_ascii
from cdc.postgres.sqlstate import map_errors
from cdc.table import TableSchema

# built-in collations ('b', since version 17) order by code point; to_jsonb: databases have a provider since 15
_COLLATION: Final = """
    SELECT co.collprovider = 'b' OR co.collname IN ('C', 'POSIX') OR co.collname = 'default' AND CASE
        coalesce(to_jsonb(d) ->> 'datlocprovider', 'c')
        WHEN 'b' THEN true WHEN 'c' THEN d.datcollate IN ('C', 'POSIX') ELSE false END
    FROM pg_attribute a JOIN pg_collation co ON co.oid = a.attcollation, pg_database d
    WHERE a.attrelid = %s AND a.attname = %s AND d.datname = current_database()
"""
_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of rows by the values of one key column, in the sort order of the column's type."""

    column: str
    first: str | None = None
    """Lower bound, included, as Postgres prints it; None for no bound."""
    ended: str | None = None
    """Upper bound, not included, as Postgres prints it; None for no bound."""


class DigestForm(Enum):
    """Text form of a column in a digest, as an SQL template."""

    #: The text that the server prints; a cast to text differs for booleans, network addresses and padded characters.
    PRINTED = "concat({column})"
    #: The bits of a double precision value as a number; every NaN has the same number.
    BITS_64 = (
        "CASE WHEN {column} = 'NaN' THEN '9221120237041090560'"
        " ELSE ('x' || encode(float8send({column}), 'hex'))::bit(64)::bigint::text END"
    )
    #: The bits of a real value as a number; every NaN has the same number.
    BITS_32 = (
        "CASE WHEN {column} = 'NaN' THEN '2143289344'"
        " ELSE ('x' || encode(float4send({column}), 'hex'))::bit(32)::integer::text END"
    )


@dataclass(frozen=True, slots=True)
class DigestColumn:
    """One column of a digest, with its text form."""

    name: str
    form: DigestForm = DigestForm.PRINTED


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest of a set of rows: their number, and two sums modulo 2**64 over the rows.

    The first sum adds the first 64 bits of the SHA-256 of each row, the second sum the next 64 bits. The order of the
    rows does not matter.
    """

    rows: int
    first: int
    second: int


def range_query(
    conn: psycopg.Connection, schema: TableSchema, publication: str, within: KeyRange | None
) -> sql.Composed:
    """Return a SELECT of the rows in a key range, with the publication's row filter, for use with `copy_rows`.

    If `within` is None, the SELECT covers the whole table.
    """
    with map_errors():
        return select_table(conn, schema) + _where(conn, schema, publication, within)


def range_rows(
    conn: psycopg.Connection, schema: TableSchema, publication: str, within: KeyRange | None
) -> Iterator[memoryview]:
    """Yield the rows of `range_query` in COPY's text format, as `copy_rows` does."""
    yield from copy_rows(conn, range_query(conn, schema, publication, within), schema)


def count_rows(conn: psycopg.Connection, schema: TableSchema, publication: str, within: KeyRange | None = None) -> int:
    """Return how many rows of a key range the publication sends; if `within` is None, how many rows of the table."""
    with map_errors():
        query = sql.SQL("SELECT count(*) FROM {}{}").format(
            from_clause(conn, schema), _where(conn, schema, publication, within)
        )
        row = conn.execute(query).fetchone()
    return int(row[0]) if row else 0


def can_digest(conn: psycopg.Connection) -> bool:
    """Return True if Postgres can compute digests; False for SQL_ASCII, because its text has no conversion to UTF-8."""
    return not is_sql_ascii(conn)


def digest_rows(
    conn: psycopg.Connection,
    schema: TableSchema,
    publication: str,
    columns: Sequence[DigestColumn],
    within: KeyRange | None = None,
) -> Digest:
    """Return the digest of the rows in a key range, or in the whole table if `within` is None.

    Only rows that the publication sends are included. The hash input of a row contains the given columns in the given
    order. Each column adds the number of its characters, a colon and its text, such as `3:abc`; NULL adds a hyphen.
    """
    texts = [_text(column) for column in columns]
    names = [sql.Identifier(f"c{place}") for place in range(len(columns))]
    field = "CASE WHEN {0} IS NULL THEN '-' ELSE char_length({0}) || ':' || {0} END"
    fields = [sql.SQL(field).format(name) for name in names]
    with map_errors():
        query = sql.SQL(
            "SELECT count(*), coalesce(sum(('x' || left(d, 16))::bit(64)::bigint), 0),"
            " coalesce(sum(('x' || substr(d, 17, 16))::bit(64)::bigint), 0) FROM ("
            # without OFFSET the planner would inline the subquery and compute every text several times
            "SELECT encode(sha256(convert_to({}, 'UTF8')), 'hex') AS d FROM (SELECT {} FROM {}{} OFFSET 0) r OFFSET 0"
            ") h"
        ).format(
            sql.SQL(" || ").join(fields),
            sql.SQL(", ").join(sql.SQL("{} AS {}").format(*pair) for pair in zip(texts, names, strict=True)),
            from_clause(conn, schema),
            _where(conn, schema, publication, within),
        )
        row = conn.execute(query).fetchone()
    assert row is not None  # noqa: S101 - an aggregate has one row
    return Digest(int(row[0]), int(row[1]) & _WORD, int(row[2]) & _WORD)


def is_ordered_by_bytes(conn: psycopg.Connection, schema: TableSchema, column: str) -> bool:
    """Return True if the column's collation, and so its index, sorts text by bytes."""
    with map_errors():
        row = conn.execute(_COLLATION, [schema.oid, column]).fetchone()
    return row is not None and bool(row[0])


def next_range_start(conn: psycopg.Connection, schema: TableSchema, after: KeyRange, rows: int) -> str | None:
    """Return the key value at which the next range begins, after about `rows` rows; None if no more rows follow.

    The rows are counted from `after.first` on. All rows with the same key value are in one range. So if more than
    `rows` rows have the value `after.first`, the next range begins at the next greater value.
    """
    column = sql.Identifier(after.column)
    start = [sql.SQL("{} >= {}").format(column, sql.Literal(after.first))] if after.first is not None else []
    with map_errors():
        table = from_clause(conn, schema)
        found = conn.execute(_nth(column, table, start, rows)).fetchone()
        if found is not None and found[0] == after.first:  # more than `rows` rows have the same value
            start = [sql.SQL("{} > {}").format(column, sql.Literal(after.first))]
            found = conn.execute(_nth(column, table, start, 0)).fetchone()
    return None if found is None else str(found[0])


def _nth(column: sql.Identifier, table: sql.Composed, start: Sequence[sql.Composable], rows: int) -> sql.Composed:
    where = sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(start)) if start else sql.SQL("")
    return sql.SQL("SELECT concat({0}) FROM {1}{2} ORDER BY {0} OFFSET {3} LIMIT 1").format(
        column, table, where, sql.Literal(rows)
    )


def _text(column: DigestColumn) -> sql.Composed:
    name = sql.Identifier(column.name)
    made = sql.SQL(column.form.value).format(column=name)
    return sql.SQL("CASE WHEN {} IS NOT NULL THEN {} END").format(name, made)


def _where(conn: psycopg.Connection, schema: TableSchema, publication: str, within: KeyRange | None) -> sql.Composed:
    parts = row_filter(conn, schema, publication)
    if within is not None:
        column = sql.Identifier(within.column)
        bounds = ((">=", within.first), ("<", within.ended))
        parts += [
            sql.SQL("{} " + sign + " {}").format(column, sql.Literal(bound))  # type: ignore[arg-type]
            for sign, bound in bounds
            if bound is not None
        ]
    return sql.Composed([sql.SQL(" WHERE "), sql.SQL(" AND ").join(parts)]) if parts else sql.Composed([])
