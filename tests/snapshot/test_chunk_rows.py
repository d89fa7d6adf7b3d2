"""Rows of one chunk, read from a real server: values, sizes and the limit of memory."""

from __future__ import annotations

import pytest
from psycopg import sql

from cdc.log_row import LOG_SCHEMA
from cdc.postgres.connection import connect
from cdc.postgres.sql_ascii import unchanged
from cdc.postgres.tables import read_schemas
from cdc.snapshot.chunk_rows import ChunkRows, ChunkTooLarge, read_rows
from tests.fixtures.postgres import run_sql

QUERY = sql.SQL("SELECT id, v FROM t ORDER BY id")


def test_a_chunk_has_the_rows_of_its_query_and_none_above_its_limit(database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, NULL)")
    with connect(database) as conn:
        (oid,) = conn.execute("SELECT 't'::regclass::oid::bigint").fetchone() or (0,)
        schema = read_schemas(conn, [oid])[oid]
        rows = read_rows(conn, QUERY, schema, unchanged, None)
        with pytest.raises(ChunkTooLarge):
            read_rows(conn, QUERY, schema, unchanged, rows.nbytes - 1)

    assert rows.table["after"].to_pylist() == [[(1, "1"), (2, "a")], [(1, "2"), (2, None)]]
    assert (rows.count, rows.text_bytes, rows.last_key) == (2, len(b"1\ta\n2\t\\N\n"), ("2",))


def test_a_chunk_without_rows_has_no_last_key() -> None:
    assert ChunkRows(LOG_SCHEMA.empty_table(), 0, 0).last_key is None
