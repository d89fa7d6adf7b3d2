"""Keys and predicates of a backfill: the server decides which are valid, and refuses predicates with side effects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest

from cdc.errors import ConfigError, SourceUnreachable
from cdc.postgres.backfill_selection import bounded_read, check_keys, check_predicate, missing_keys
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.publication import ensure_publication
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import match_tables, read_schema
from cdc.table import TableSchema
from tests.fixtures.postgres import fresh_database, rows_of, run_sql

TYPES: dict[LiteralString, tuple[LiteralString, list[str], dict[str, str]]] = {
    # type: the one row's key, keys that are the same to the server, others as they are written and as they are told
    "int": ("7", ["007", " 7 ", "+7"], {"08": "8", "-9": "-9"}),
    "numeric(10,2)": ("1.5", ["1.5", "1.50", "1.500"], {"2.5": "2.50", "1.504": "1.504", "NaN": "NaN"}),
    "numeric": ("1.50", ["1.5", "1.500"], {"1e3": "1000", "2.50": "2.50", "Inf": "Infinity"}),
    "float8": ("0.1", ["0.10", "1e-1"], {"1e2": "100", "nan": "NaN", "inf": "Infinity"}),
    "boolean": ("true", ["t", "yes", "1"], {"no": "f"}),
    "char(3)": ("'a'", ["a", "a ", "a  "], {"b": "b  ", "abcd": "abcd"}),
    "varchar(3)": ("'abc'", ["abc"], {"abcd": "abcd", "a,b": "a,b", "": ""}),
    "text": ("'a'", ["a"], {"A": "A", 'q"\\': 'q"\\', "\n": "\n"}),
    "date": ("'2026-02-03'", ["20260203", "Feb 3 2026"], {"Infinity": "infinity", "Feb 4 2026": "2026-02-04"}),
    "timestamptz": (
        "'2026-02-03 04:05+02'",
        ["2026-02-03 02:05Z"],
        {"2026-02-03 04:06:07.80+02": "2026-02-03 02:06:07.8+00"},
    ),
    "timestamp(0)": ("'2026-02-03'", ["2026-02-03 00:00"], {"2026-02-03 00:00:00.4": "2026-02-03 00:00:00.4"}),
    "bit(3)": ("B'101'", ["101"], {"111": "111", "1": "1"}),
    "bytea": (r"'\x00ff'", [r"\x00FF", r"\000\377"], {r"\x0A": r"\x0a"}),
    "uuid": (
        "'00000000-0000-0000-0000-00000000000a'",
        ["{0000000000000000000000000000000A}"],
        {"0000000000000000000000000000000B": "00000000-0000-0000-0000-00000000000b"},
    ),
    "int4range": ("'[1,5]'", ["[1,6)", "(0,5]"], {"[1,7]": "[1,8)", "[2,2)": "empty"}),
    "mood": ("'happy'", ["happy"], {"sad": "sad"}),
    "positive": ("7", ["07"], {"08": "8"}),
}
DEFINED: tuple[LiteralString, ...] = (
    "CREATE TYPE mood AS ENUM ('happy', 'sad')",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
)
TABLE: tuple[LiteralString, ...] = (
    "CREATE TABLE t (k int PRIMARY KEY, at timestamptz)",
    "CREATE SEQUENCE s",
    "CREATE VIEW drawn AS SELECT nextval('s') AS n",
    "CREATE FUNCTION undeclared(int) RETURNS bool LANGUAGE sql RETURN $1 > 0",
    "CREATE FUNCTION reads(int) RETURNS bool STABLE LANGUAGE sql AS 'SELECT count(*) > $1 FROM t'",
    "CREATE FUNCTION endless() RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT pg_sleep(600) IS NULL'",
    "CREATE OPERATOR ~> (FUNCTION = undeclared, RIGHTARG = int)",
)
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


def schema_of(conn: psycopg.Connection[Any]) -> TableSchema:
    ((oid, name),) = match_tables(conn, ["public.t"])
    ensure_publication(conn, "pub", [name])
    schema = read_schema(conn, oid, publication="pub")
    assert schema is not None
    return schema


def absent_of(dsn: str, *keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    with connect(dsn) as conn:
        check_keys(conn, schema_of(conn), keys)
        return missing_keys(conn, schema_of(conn), keys, "pub")


def test_the_server_compares_keys_and_prints_the_missing_ones(database: str) -> None:
    run_sql(database, *DEFINED)
    for kind, (value, same, others) in TYPES.items():
        run_sql(
            database,
            "DROP TABLE IF EXISTS t",
            "CREATE TABLE t (k " + kind + " PRIMARY KEY, n int)",
            "INSERT INTO t VALUES (" + value + ")",
        )
        found = absent_of(database, *((text,) for text in (*same, *others)))
        assert found == [(told,) for told in others.values()], kind


def test_a_key_is_found_in_the_columns_own_collation(postgres_15: EmbeddedPostgres) -> None:
    for dsn in fresh_database(postgres_15):
        run_sql(
            dsn,
            "CREATE COLLATION folded (provider = icu, locale = 'de-u-ks-level1', deterministic = false)",
            "CREATE TABLE t (k text COLLATE folded PRIMARY KEY)",
            "INSERT INTO t VALUES ('Straße')",
        )
        assert absent_of(dsn, ("STRASSE",), ("Gasse",), ("straße",)) == [("Gasse",)]


def test_composite_keys_are_compared_as_a_whole_and_returned_once(database: str) -> None:
    run_sql(
        database,
        'CREATE TABLE t (v int, "a%s" int, "_asked" varchar(9), PRIMARY KEY ("_asked", "a%s"))',
        "INSERT INTO t SELECT i, i, 'k' || i FROM generate_series(1, 9) i",
    )
    keys = [("k1", "1"), ("k1", "2"), ("k2", "02"), ("k1", "02"), ("zz", "5")]
    assert absent_of(database, *keys) == [("k1", "2"), ("zz", "5")]


def test_a_row_that_the_publication_does_not_send_counts_as_none(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (k int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 20) i",
        "CREATE PUBLICATION pub FOR TABLE t WHERE (k % 2 = 0)",
    )
    assert absent_of(database, *((str(k),) for k in range(3, 7))) == [("3",), ("5",)]


def test_of_a_partitioned_table_every_partition_is_looked_at(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (k int PRIMARY KEY) PARTITION BY RANGE (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (99)",
        "INSERT INTO t VALUES (5), (50)",
    )
    assert absent_of(database, ("5",), ("50",), ("6",), ("60",)) == [("6",), ("60",)]


REFUSED: tuple[tuple[LiteralString, str, str], ...] = (
    ("int", "abc", "invalid input syntax for type integer"),
    ("int", "", "invalid input syntax"),
    ("int", "99999999999", "out of range"),
    ("text", "a\0b", "nul"),
    ("text", "\udcff", "surrogates"),
    ("mood", "angry", "invalid input value for enum mood"),
    ("positive", "-1", "violates check constraint"),
    ("regclass", "no_such", "does not exist"),
)
"""Type of a column, a key that it does not take, and what is said of it."""


def test_a_key_that_its_column_does_not_take_is_named_among_many(database: str) -> None:
    run_sql(database, *DEFINED)
    with connect(database) as conn:
        for kind, text, says in REFUSED:
            conn.execute("DROP TABLE IF EXISTS t")
            conn.execute("CREATE TABLE t (k " + kind + ", n int, PRIMARY KEY (n, k))")
            good = {"text": "x", "mood": "sad", "regclass": "pg_class"}.get(kind, "7")
            keys = [(str(n), text if n == 71 else good) for n in range(100)]
            with pytest.raises(ConfigError, match=r"invalid key '71,.* of table 'public\.t'") as found:
                check_keys(conn, schema_of(conn), keys)
            assert says in found.value.message
            assert rows_of(database, "SELECT count(*) FROM t") == [(0,)]


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


def test_a_predicate_that_cannot_be_planned_is_refused(conn: psycopg.Connection, schema: TableSchema) -> None:
    for where in UNFIT:
        with pytest.raises(ConfigError, match="condition"):
            check_predicate(conn, schema, where)
        assert conn.execute("SELECT to_regclass('got_out')").fetchone() == (None,)


def test_a_volatile_predicate_is_refused_without_running_it(conn: psycopg.Connection, schema: TableSchema) -> None:
    conn.execute("INSERT INTO t VALUES (1, now())")
    for where, functions in VOLATILE.items():
        said = (
            "it contains a volatile expression"
            if functions is None
            else f"calls the volatile functions {functions}, so"
        )
        with pytest.raises(ConfigError, match=said):
            check_predicate(conn, schema, where)
        assert conn.execute("SELECT last_value, is_called FROM s").fetchone() == (1, False), where


def test_a_predicate_without_side_effects_is_accepted(conn: psycopg.Connection, schema: TableSchema) -> None:
    for where in FIT:
        check_predicate(conn, schema, where)


def test_asking_ends_whatever_is_computed_beforehand(conn: psycopg.Connection, schema: TableSchema) -> None:
    with pytest.raises(ConfigError, match="planning the condition took too long"):
        check_predicate(conn, schema, "endless()", within=0.2)


def test_a_table_that_is_locked_and_a_connection_that_broke_are_no_fault_of_the_predicate(
    dsn: str, conn: psycopg.Connection, schema: TableSchema
) -> None:
    with connect(dsn) as other, other.transaction():
        other.execute("LOCK TABLE t")
        with pytest.raises(SourceUnreachable, match=r"'public\.t' cannot be read: another session"):
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
