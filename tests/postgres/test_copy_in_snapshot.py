"""Copies under a snapshot: a table that was rewritten after it is an error, and so is a lost connection."""

from __future__ import annotations

import pytest
from psycopg import sql

from cdc.errors import SnapshotInvalidated, SourceError
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import begin_snapshot, copy_rows, copy_table, lock_tables
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import match_tables, read_schema
from tests.fixtures.postgres import run_sql

TABLES = (
    "CREATE TABLE plain (id int PRIMARY KEY)",
    "INSERT INTO plain SELECT generate_series(1, 3)",
    "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    "INSERT INTO parted SELECT generate_series(1, 3)",
)
ENDLESS = sql.SQL("SELECT repeat('x', 10000) FROM generate_series(1, 300000)").format()


SWAP = "ALTER TABLE plain RENAME TO aside; ALTER TABLE parted RENAME TO plain; ALTER TABLE aside RENAME TO parted"


@pytest.mark.parametrize(
    "rewrite",
    [
        "TRUNCATE plain",
        "TRUNCATE parted_1",
        "ALTER TABLE plain ALTER id TYPE bigint",
        "ALTER TABLE plain RENAME TO renamed",
        "DROP TABLE plain",
        SWAP,
    ],
)
def test_a_table_that_was_rewritten_or_renamed_under_a_snapshot_voids_it(database: str, rewrite: str):
    run_sql(database, *TABLES)
    with create_slot(database, "s", temporary=True) as exported, connect(database, autocommit=False) as reading:
        begin_snapshot(reading, exported.name)
        with connect(database) as conn:
            conn.execute(rewrite.encode())
        with pytest.raises(SnapshotInvalidated, match="after the snapshot was taken"):
            lock_tables(reading, match_tables(reading, ["public.*"]))


def test_a_locked_table_is_read_under_the_snapshot(database: str):
    run_sql(database, *TABLES)
    with create_slot(database, "s", temporary=True) as exported, connect(database, autocommit=False) as reading:
        begin_snapshot(reading, exported.name)
        run_sql(database, "INSERT INTO plain VALUES (4)", "INSERT INTO parted VALUES (4)")
        tables = match_tables(reading, ["public.*"])
        lock_tables(reading, tables)
        for oid, _ in tables:
            schema = read_schema(reading, oid)
            assert schema is not None
            assert b"".join(copy_table(reading, schema)).split() == [b"1", b"2", b"3"]


def test_a_copy_waits_for_a_server_that_takes_its_time(database: str):
    slow = sql.SQL("SELECT i, pg_sleep(0.3)::text FROM generate_series(1, 3) i").format()
    with connect(database) as conn:
        assert b"".join(copy_rows(conn, slow)) == b"1\t\n2\t\n3\t\n"


def test_a_copy_whose_server_process_is_ended_is_an_error_of_the_source(database: str):
    with connect(database) as conn, connect(database) as other:
        chunks = copy_rows(conn, ENDLESS)
        next(chunks)
        other.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
        with pytest.raises(SourceError):
            list(chunks)
        assert conn.closed
