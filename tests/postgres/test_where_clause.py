"""Predicates: what only says which rows is taken, what cannot be planned, writes, waits or varies is refused unrun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest

from cdc.errors import ConfigError, SourceUnreachable
from cdc.postgres.connection import connect
from cdc.postgres.publication import ensure_publication
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import match_tables, read_schema
from cdc.postgres.where_clause import bounded_read, check_predicate
from cdc.table import TableSchema
from tests.fixtures.postgres import rows_of, run_sql

TABLE: tuple[LiteralString, ...] = (
    "CREATE TABLE t (k int PRIMARY KEY, at timestamptz)",
    "CREATE SEQUENCE s",
    "CREATE VIEW drawn AS SELECT nextval('s') AS n",
    "CREATE FUNCTION undeclared(int) RETURNS bool LANGUAGE sql RETURN $1 > 0",
    "CREATE FUNCTION reads(int) RETURNS bool STABLE LANGUAGE sql AS 'SELECT count(*) > $1 FROM t'",
    "CREATE FUNCTION endless() RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT pg_sleep(600) IS NULL'",
    "CREATE OPERATOR ~> (FUNCTION = undeclared, RIGHTARG = int)",
)


@pytest.fixture(name="dsn")
def _dsn(any_database: str) -> str:
    run_sql(any_database, *TABLE)
    return any_database


@pytest.fixture(name="conn")
def _conn(dsn: str) -> Iterator[psycopg.Connection]:
    with connect(dsn) as conn:
        yield conn


@pytest.fixture(name="schema")
def _schema(conn: psycopg.Connection) -> TableSchema:
    ((oid, name),) = match_tables(conn, ["public.t"])
    ensure_publication(conn, "pub", [name])
    schema = read_schema(conn, oid, publication="pub")
    assert schema is not None
    return schema


ENDED = """
    SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'cdc'
"""
STATEMENTS = "true THEN true END; COMMIT; CREATE TABLE got_out (); SELECT CASE WHEN true"
UNFIT = [
    "no_such > 1",
    "k >",
    "1 = 1) OR (1 = 1",
    "true --",
    "k = 'x'",
    "true THEN true END OR CASE WHEN true",
    STATEMENTS,
]
VOLATILE = {
    "setval('s', 7) > 0": "setval",
    "k = 1 AND nextval('s') > 0": "nextval",
    "false AND setval ('s', 7) > 0": "setval",
    "CASE WHEN k < 0 THEN setval('s', 7) > 0 END": "setval",
    "k IN (SELECT setval('s', 7))": "setval",
    "k IN (SELECT n FROM drawn)": None,
    "pg_sleep(600) IS NULL": "pg_sleep",
    "pg_advisory_lock(7) IS NULL": "pg_advisory_lock",
    "random() < 0.1": "random",
    "at > clock_timestamp() - interval '1 day'": "clock_timestamp",
    "undeclared(k)": "undeclared",
    "~> k": None,
    "k IN (SELECT k FROM t FOR UPDATE)": None,
}
FIT = [
    "k > 5 AND at < now()",
    "reads(k)",
    "at::text LIKE '2026-%'",
    "k IN (WITH one AS MATERIALIZED (SELECT 1) SELECT * FROM one)",
    "'setval(7); --' <> at::text",
]


@pytest.mark.parametrize("where", UNFIT)
def test_what_cannot_be_planned_is_refused(conn: psycopg.Connection, schema: TableSchema, where: str) -> None:
    with pytest.raises(ConfigError, match="predicate"):
        check_predicate(conn, schema, where)
    assert conn.execute("SELECT to_regclass('got_out')").fetchone() == (None,)


@pytest.mark.parametrize("where", VOLATILE)
def test_what_may_write_wait_or_vary_is_refused_and_not_run(
    conn: psycopg.Connection, schema: TableSchema, where: str
) -> None:
    conn.execute("INSERT INTO t VALUES (1, now())")
    said = (
        "it contains a volatile expression"
        if VOLATILE[where] is None
        else f"calls volatile functions: {VOLATILE[where]}$"
    )
    with pytest.raises(ConfigError, match=said):
        check_predicate(conn, schema, where)
    assert conn.execute("SELECT last_value, is_called FROM s").fetchone() == (1, False)


@pytest.mark.parametrize("where", FIT)
def test_what_only_says_which_rows_is_taken(conn: psycopg.Connection, schema: TableSchema, where: str) -> None:
    check_predicate(conn, schema, where)


def test_asking_ends_whatever_is_computed_beforehand(conn: psycopg.Connection, schema: TableSchema) -> None:
    with pytest.raises(ConfigError, match="planning took too long"):
        check_predicate(conn, schema, "endless()", within=0.2)


def test_a_table_that_is_locked_and_a_connection_that_broke_are_no_fault_of_the_predicate(
    dsn: str, conn: psycopg.Connection, schema: TableSchema
) -> None:
    with connect(dsn) as other, other.transaction():
        other.execute("LOCK TABLE t")
        with pytest.raises(SourceUnreachable, match=r"'public\.t' is locked"):
            check_predicate(conn, schema, "k > 5", within=0.2)
    rows_of(dsn, ENDED)
    with pytest.raises(SourceUnreachable):
        check_predicate(conn, schema, "k > 5")


def test_reading_by_a_predicate_ends_in_time(conn: psycopg.Connection, schema: TableSchema) -> None:
    with (
        pytest.raises(ConfigError, match="took longer than"),
        conn.transaction(),
        bounded_read(conn, schema, "k > 5", within=0.1),
        map_errors(),
    ):
        conn.execute("SELECT pg_sleep(600)")
