"""Slots, exported snapshots and COPY inside them."""

from __future__ import annotations

import pytest

from cdc.errors import CdcError, PreflightFailed, SourceError
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import begin_snapshot, copy_table
from cdc.postgres.publication import ensure_publication
from cdc.postgres.slot import create_slot, drop_slot, slot_status
from cdc.postgres.tables import TableName, match_tables, read_schema
from cdc.table import TableSchema
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until


def schema_of(dsn: str, name: str = "public.t") -> TableSchema:
    with connect(dsn) as conn:
        ((oid, _),) = match_tables(conn, [name])
        schema = read_schema(conn, oid)
    assert schema is not None
    return schema


def test_a_snapshot_contains_only_the_rows_from_before_the_slot(any_database: str) -> None:
    run_sql(any_database, "CREATE TABLE t (id int, v text)", "INSERT INTO t VALUES (1, NULL), (2, E'a\\tb')")
    schema, rows = schema_of(any_database), b"1\t\\N\n2\ta\\tb\n"
    for autocommit in (True, False):
        slot = f"{any_database.rpartition('/')[2]}_{autocommit:d}"
        with create_slot(any_database, slot) as snapshot, connect(any_database, autocommit=autocommit) as conn:
            run_sql(any_database, "INSERT INTO t VALUES (3, 'late')")
            begin_snapshot(conn, snapshot.name)
            copied = b"".join(copy_table(conn, schema))
            status = slot_status(conn, slot)

        assert copied == rows
        assert status is not None
        assert status.confirmed_flush == snapshot.consistent_point
        assert status.plugin == "pgoutput"
        rows += b"3\tlate\n"


EXPORTING = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'cdc slot'"


def test_a_snapshot_ends_with_its_block_and_leaves_the_connection_usable(database: str) -> None:
    with create_slot(database, database.rpartition("/")[2], temporary=True) as snapshot:
        pass
    with connect(database) as conn:
        until(lambda: conn.execute(EXPORTING).fetchone() is None, "the end of the session that exported the snapshot")
        with pytest.raises(CdcError):
            begin_snapshot(conn, snapshot.name)
        assert conn.execute("SELECT 1").fetchone() == (1,)
        assert slot_status(conn, database.rpartition("/")[2]) is None


def test_a_name_that_is_taken_is_refused_and_dropping_twice_is_no_error(database: str) -> None:
    slot = database.rpartition("/")[2]
    with create_slot(database, slot), pytest.raises(SourceError, match="already exists"), create_slot(database, slot):
        pass
    with connect(database) as conn:
        drop_slot(conn, slot)
        drop_slot(conn, slot)
        assert slot_status(conn, slot) is None


def test_a_copy_leaves_out_computed_columns_and_children(either_database: str) -> None:
    run_sql(
        either_database,
        "CREATE TABLE t (id int, g int GENERATED ALWAYS AS (id * 2) STORED, v text)",
        "CREATE TABLE child () INHERITS (t)",
        "INSERT INTO t (id, v) VALUES (1, 'own')",
        "INSERT INTO child (id, v) VALUES (2, 'child')",
    )
    with connect(either_database) as conn:
        assert b"".join(copy_table(conn, schema_of(either_database))) == b"1\town\n"


def test_a_copy_that_is_left_early_frees_the_connection(database: str) -> None:
    run_sql(database, "CREATE TABLE t AS SELECT i, repeat('x', 1000) FROM generate_series(1, 10000) i")
    with connect(database) as conn:
        chunks = copy_table(conn, schema_of(database))
        assert bytes(next(chunks)).endswith(b"\n")
        chunks.close()  # type: ignore[attr-defined]
        assert conn.execute("SELECT 1").fetchone() == (1,)
        assert sum(bytes(chunk).count(b"\n") for chunk in copy_table(conn, schema_of(database))) == 10000


def test_a_copy_without_the_right_to_read_is_refused(database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int)", "DROP ROLE IF EXISTS reader_only", "CREATE ROLE reader_only")
    schema = schema_of(database)
    with connect(database) as conn:
        conn.execute("SET ROLE reader_only")
        with pytest.raises(PreflightFailed, match="permission denied for table"):
            list(copy_table(conn, schema))
        assert conn.execute("SELECT 1").fetchone() == (1,)
    run_sql(database, "DROP ROLE reader_only")


def test_a_publication_is_made_and_completed_but_never_cut(any_database: str) -> None:
    run_sql(any_database, "CREATE TABLE a (id int)", 'CREATE TABLE "B ""x""" (id int)', "CREATE TABLE c (id int)")
    a, b, c = TableName("public", "a"), TableName("public", 'B "x"'), TableName("public", "c")
    with connect(any_database) as conn:
        for tables in ([a], [a, b], [b], [c]):
            ensure_publication(conn, 'p "q', tables)

    published = rows_of(any_database, "SELECT tablename FROM pg_publication_tables ORDER BY 1")
    assert sorted(name for (name,) in published) == ['B "x"', "a", "c"]
    assert rows_of(any_database, "SELECT pubviaroot FROM pg_publication") == [(True,)]
