"""Chunks: whatever the key's type and order, each row is read once, and a snapshot says what it sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import psycopg
import pytest

from cdc.errors import SnapshotInvalidated
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.chunk_queries import KeyBounds, estimate_rows, key_range_query, snapshot_transaction, stored_tables
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_rows, lock_tables
from cdc.postgres.publication import ensure_publication, published_schema
from cdc.postgres.tables import TableName, match_tables, read_schema
from cdc.postgres.visibility import Visibility
from cdc.table import TableSchema
from tests.fixtures.postgres import reader_of, run_sql

KEYS = {
    "bigint": "SELECT i * 1000003 - 5000000000 FROM generate_series(1, 60) i",
    "numeric": "SELECT i / 7.0 FROM generate_series(-20, 20) i UNION SELECT 'NaN' UNION SELECT 'Infinity'",
    "uuid": "SELECT md5(i::text)::uuid FROM generate_series(1, 60) i",
    "date": "SELECT date '2026-01-01' + i FROM generate_series(1, 40) i UNION VALUES ('infinity'::date), ('-infinity')",
    "timestamptz": "SELECT timestamptz '2026-10-25 00:00Z' + i * interval '10 min' FROM generate_series(1, 40) i",
    "float8": "SELECT 0.1 * i FROM generate_series(-20, 20) i UNION SELECT 'NaN' UNION SELECT '-Infinity'",
    "char(5)": "SELECT chr(96 + i) || ' ' || i FROM generate_series(1, 26) i",
    'text COLLATE "C"': "SELECT chr(60 + i) || E'\\\\ '' ' || i FROM generate_series(1, 60) i",
    "text": "SELECT CASE i % 3 WHEN 0 THEN 'a' WHEN 1 THEN 'Ä' ELSE 'B' END || i FROM generate_series(1, 60) i",
    "bytea": "SELECT decode(md5(i::text), 'hex') FROM generate_series(1, 60) i",
    "inet": "SELECT ('10.0.0.' || i)::inet FROM generate_series(1, 60) i",
    "int4range": "SELECT int4range(i, i + 5) FROM generate_series(1, 40) i",
    "mood": "SELECT unnest(enum_range(NULL::mood))",
    "positive": "SELECT i FROM generate_series(1, 40) i",
}


def read(conn: psycopg.Connection, schema: TableSchema, bounds: KeyBounds, limit: int) -> list[Any]:
    decoder = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    with snapshot_transaction(conn, schema):
        chunks = list(copy_rows(conn, key_range_query(conn, schema, bounds, limit, "pub")))
    batches = [batch for chunk in chunks if (batch := decoder.feed(chunk)) is not None]
    return [row for batch in batches for row in batch.to_pylist()]


def walk(conn: psycopg.Connection, schema: TableSchema, limit: int, bounds: KeyBounds | None = None) -> list[Any]:
    bounds, found = bounds or KeyBounds(), list[Any]()
    while chunk := read(conn, schema, bounds, limit):
        found += chunk
        bounds = KeyBounds(tuple(chunk[-1]["key"]), None, bounds.last, bounds.where)
    return found


def schema_of(conn: psycopg.Connection) -> TableSchema:
    ((oid, name),) = match_tables(conn, ["public.t"])
    ensure_publication(conn, "pub", [name])
    schema = read_schema(conn, oid, publication="pub")
    assert schema is not None
    return schema


def test_chunk_after_chunk_reads_every_row_once_under_any_key(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE TYPE mood AS ENUM ('low', 'Über', 'high')",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    )
    with connect(any_database) as conn:
        for kind, keys in KEYS.items():
            conn.execute("DROP TABLE IF EXISTS t")
            conn.execute(f"CREATE TABLE t (k {kind} PRIMARY KEY, v int)".encode())
            conn.execute(f"INSERT INTO t SELECT k, 1 FROM ({keys}) s (k)".encode())
            found = walk(conn, schema_of(conn), 7)
            expected = [key for (key,) in conn.execute("SELECT format('%s', t.k) FROM t ORDER BY t.k")]
            assert [row["key"][0].strip() for row in found] == [key.strip() for key in expected], kind


def test_a_composite_key_is_compared_as_a_row_and_bounds_are_included(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (v text, b date, a numeric, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT 'v', date '2026-01-01' + i % 5, i / 5 FROM generate_series(0, 49) i",
    )
    with connect(database) as conn:
        schema = schema_of(conn)
        assert len(walk(conn, schema, 4)) == 50
        within = KeyBounds(None, ("3", "2026-01-02"), ("4", "2026-01-01"))
        assert [row["key"] for row in read(conn, schema, within, 100)] == [
            *(["3", f"2026-01-0{day}"] for day in (2, 3, 4, 5)),
            ["4", "2026-01-01"],
        ]


def test_partitions_are_read_as_their_root_and_children_by_inheritance_not_at_all(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (k int PRIMARY KEY, v int) PARTITION BY RANGE (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (99)",
        "INSERT INTO t SELECT i, i FROM generate_series(0, 40) i",
    )
    with connect(database) as conn:
        assert Counter(row["key"][0] for row in walk(conn, schema_of(conn), 6)) == Counter(map(str, range(41)))


def test_a_row_filter_of_the_publication_applies_to_chunks(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (k int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i % 2 FROM generate_series(1, 20) i",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (k > 10)",
    )
    with connect(database) as conn:
        assert [row["key"] for row in walk(conn, schema_of(conn), 3, KeyBounds(where="v = 1"))] == [
            [str(k)] for k in (11, 13, 15, 17, 19)
        ]


def test_a_truncate_between_snapshot_and_read_voids_the_chunk(database: str) -> None:
    run_sql(database, "CREATE TABLE t (k int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    with connect(database) as conn, connect(database) as other:
        schema = schema_of(conn)
        with conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            conn.execute("SELECT pg_current_snapshot()")
            other.execute("TRUNCATE t")
            with pytest.raises(SnapshotInvalidated):
                lock_tables(conn, [(schema.oid, TableName("public", "t"))])


def test_a_snapshot_sees_ended_transactions_and_no_running_ones(database: str) -> None:
    run_sql(database, "CREATE TABLE t (k int PRIMARY KEY)")

    def xid(conn: psycopg.Connection) -> int:
        row = conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        return int(row[0])

    with connect(database) as conn, connect(database, autocommit=False) as open_one:
        schema = schema_of(conn)
        running, ended = xid(open_one), xid(conn)
        with connect(database, autocommit=False) as later, snapshot_transaction(conn, schema) as visibility:
            after = xid(later)
            xids = np.array([running, ended, after], np.int64)
            assert visibility.sees(xids).tolist() == [False, True, False]


def test_xids_of_the_stream_are_compared_across_a_wraparound() -> None:
    visibility = Visibility.parse(f"{(7 << 32) - 3}:{(7 << 32) + 5}:{(7 << 32) - 2},{(7 << 32) + 1}")
    xids = np.array([2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1, 0, 1, 4, 5, 9], np.int64)
    assert visibility.sees(xids).tolist() == [True, True, False, True, True, False, True, False, False]


def test_an_estimate_is_the_planners_over_all_partitions(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (k int PRIMARY KEY) PARTITION BY RANGE (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (1000)",
        "INSERT INTO t SELECT i FROM generate_series(0, 499) i",
        "ANALYZE t",
    )
    with connect(database) as conn:
        assert 500 <= estimate_rows(conn, schema_of(conn).oid) <= 1000


def test_a_partitioned_table_is_read_through_its_root_by_a_role_that_may_not_read_its_partitions(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE r (id int, k int, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)",
        "INSERT INTO r VALUES (1, 1), (2, 1)",
        "CREATE PUBLICATION pub FOR TABLE r WITH (publish_via_partition_root = true)",
    )
    with reader_of(database, "GRANT SELECT ON r TO {role}") as dsn, connect(dsn) as conn:
        ((oid, _),) = match_tables(conn, ["public.r"])
        schema = published_schema(conn, oid, "pub")
        assert schema is not None
        assert stored_tables(conn, oid) is None
        with snapshot_transaction(conn, schema):
            lines = copy_rows(conn, key_range_query(conn, schema, KeyBounds(), 10, "pub"), schema)
            assert b"".join(map(bytes, lines)) == b"1\t1\n2\t1\n"
        run_sql(database, "GRANT SELECT ON r1 TO PUBLIC")
        assert [str(leaf.name) for leaf in stored_tables(conn, oid) or ()] == ["public.r1"]
