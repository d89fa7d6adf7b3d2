"""Listed keys: what the server takes for one, and which of them no row has, in the text that the stream would show."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
import pytest

from cdc.errors import ConfigError
from cdc.postgres.connection import connect
from cdc.postgres.embedded import EmbeddedPostgres
from cdc.postgres.keys import check_keys, missing_keys
from cdc.postgres.publication import ensure_publication
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


def test_a_key_is_found_as_the_server_compares_it_and_else_told_as_the_server_prints_it(database: str) -> None:
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


def test_composite_keys_are_looked_for_as_a_whole_and_told_once(database: str) -> None:
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


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("int", "abc", "invalid input syntax for type integer"),
        ("int", "", "invalid input syntax"),
        ("int", "99999999999", "out of range"),
        ("text", "a\0b", "nul"),
        ("text", "\udcff", "surrogates"),
        ("mood", "angry", "invalid input value for enum mood"),
        ("positive", "-1", "violates check constraint"),
        ("regclass", "no_such", "does not exist"),
    ],
)
def test_a_key_that_its_column_does_not_take_is_named_among_many(
    database: str, kind: LiteralString, text: str, says: str
) -> None:
    run_sql(database, *DEFINED, "CREATE TABLE t (k " + kind + ", n int, PRIMARY KEY (n, k))")
    good = {"text": "x", "mood": "sad", "regclass": "pg_class"}.get(kind, "7")
    keys = [(str(n), text if n == 71 else good) for n in range(100)]
    with (
        connect(database) as conn,
        pytest.raises(ConfigError, match=r"invalid key '71,.* of 'public\.t'") as told,
    ):
        check_keys(conn, schema_of(conn), keys)
    assert says in told.value.message
    assert rows_of(database, "SELECT count(*) FROM t") == [(0,)]
