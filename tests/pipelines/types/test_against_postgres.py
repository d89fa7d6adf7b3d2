"""Round trip of values of every base type and of arrays of them; Postgres compares the results with the originals.

A type refuses values only for the reasons that pipelines/types/README.md lists.
"""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from psycopg import sql

from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_table
from cdc.postgres.tables import match_tables, read_schema
from cdc.table import Column, TableSchema
from pipelines.types.families import TEXT, TypePolicy, family_of, widening
from pipelines.types.postgres_text import to_postgres_text
from pipelines.types.typed_rows import text_columns
from tests.fixtures.postgres import run_sql
from tests.postgres.samples import SAMPLES

MORE = {
    "bool": ("t", "f"),
    "numeric(12,4)": ("0", "-99999999.9999", "NaN", "0.0001"),
    "numeric(38,38)": ("0." + "0" * 37 + "1",),
    "numeric(20,10)": ("0.0000000001",),
    "date": ("9999-12-31", "0001-01-01", "1582-10-10", "infinity", "10000-01-01", "4713-01-01 BC"),
    "timestamp": ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "2024-02-29 1:2:3.5", "infinity"),
    "timestamptz": ("2024-03-31 02:30:00 Europe/Berlin", "0044-03-15 12:00:00+00 BC"),
}
KINDS: dict[str, tuple[str, ...]] = {
    kind: (*values, *MORE.get(kind, ()))
    for kind, values in {**MORE, **SAMPLES}.items()
    if kind not in {"xml", "json", "jsonb", "regclass"} and all(len(value) < 1000 for value in values)
} | {"json": ('{"a": [1,2]}', "null"), "numeric": ("1.50", "NaN", "-Infinity", "1e-50")}
WIDER = [
    ("int2", "int4"),
    ("int4", "int8"),
    ("int2", "numeric(7,2)"),
    ("int4", "numeric(10)"),
    ("int8", "numeric(19)"),
    ("float4", "float8"),
    ("numeric(12,4)", "numeric(20,6)"),
    ("int8", "text"),
    ("oid", "text"),
    ("numeric(12,4)", "text"),
    ("numeric(20,10)", "varchar"),
    ("date", "text"),
]
REFUSED = re.compile(r"infinity|BC|NaN|(?:\b|[{\"])\d{5,}-\d\d-\d\d")


Read = tuple[TableSchema, dict[str, pa.Array]]
"""A table and the texts of its columns, in the order of `id`."""


def read(conn: Any, name: str) -> Read:
    ((oid, _),) = match_tables(conn, [f"public.{name}"])
    schema = read_schema(conn, oid)
    assert schema is not None
    decoder = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    found = [rows for chunk in copy_table(conn, schema) if (rows := decoder.feed(chunk)) is not None]
    table = pa.Table.from_batches(found).combine_chunks()
    return schema, dict(zip((c.name for c in schema.sent), text_columns(table, schema), strict=True))


def accepted(column: Column, texts: pa.Array) -> list[pa.Array | None]:
    """Every text as a column of one value, None for one that is refused."""
    found: list[pa.Array | None] = []
    for place in range(len(texts)):
        try:
            found.append(family_of(column, TypePolicy.EXACT).convert(texts.slice(place, 1)))
        except pa.ArrowInvalid:
            found.append(None)
    return found


def back(value: Any, kind: str, column: Column) -> tuple[Any, sql.Composable]:
    """The value as a parameter, and an expression that makes it the column's type again."""
    of_text = family_of(column, TypePolicy.EXACT).arrow in {pa.string(), pa.list_(pa.field("element", pa.string()))}
    through = "::text[]" if of_text and isinstance(value, list) else ""
    brackets = "[]" if column.name == "a" else ""
    return value, sql.SQL(f"(%s{through}::{kind}{brackets})")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dsn(postgres) -> str:
    """A database with a table for every kind: its values, and arrays of two of each."""
    run_sql(postgres.dsn(), "DROP DATABASE IF EXISTS types_oracle", "CREATE DATABASE types_oracle")
    with connect(postgres.dsn("types_oracle"), autocommit=False) as conn:
        for number, (kind, values) in enumerate(KINDS.items()):
            conn.execute(f"CREATE TABLE t{number} (id serial PRIMARY KEY, v {kind}, a {kind}[])")
            insert = f"INSERT INTO t{number} (v, a) VALUES (%s::{kind}, ARRAY[%s::{kind}, NULL])"
            with conn.cursor() as cursor:
                cursor.executemany(insert, [(value, value) for value in values])
            conn.execute(f"INSERT INTO t{number} (a) VALUES ('{{}}'), (NULL)")
    return postgres.dsn("types_oracle")


@pytest.fixture(scope="module")
def tables(dsn) -> dict[str, Read]:
    """Every kind's table."""
    with connect(dsn) as conn:
        return {kind: read(conn, f"t{number}") for number, kind in enumerate(KINDS)}


def test_a_value_comes_back_unchanged_or_is_refused_for_a_documented_reason(dsn, tables):
    with connect(dsn) as conn:
        for (number, kind), name in product(enumerate(KINDS), ("v", "a")):
            schema, texts = tables[kind]
            column = schema.column(name)
            assert column is not None
            sent, questions, given = [], [], []
            for id_, values in enumerate(accepted(column, texts[name]), 1):
                text = texts[name][id_ - 1].as_py()
                if values is None:
                    assert REFUSED.search(text), f"{kind} refuses {text[:80]!r}"
                    continue
                value, expression = back(values[0].as_py(), kind, column)
                question = sql.SQL("(SELECT {}::text IS NOT DISTINCT FROM {}::text FROM {} WHERE id = %s)")
                questions.append(question.format(sql.Identifier(name), expression, sql.Identifier(f"t{number}")))
                given += [value, id_]
                sent.append(text)
            found = conn.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(questions)), given).fetchone()
            assert [text for text, same in zip(sent, found or (), strict=True) if same is not True] == [], kind


def test_a_column_that_becomes_text_reads_as_postgres_prints_it(tables):
    for (kind, (schema, texts)), name in product(tables.items(), ("v", "a")):
        column = schema.column(name)
        assert column is not None
        for sent, values in zip(texts[name].to_pylist(), accepted(column, texts[name]), strict=True):
            assert values is None or to_postgres_text(values).to_pylist() == [sent], kind


def test_a_column_that_becomes_wider_has_the_values_that_postgres_casts_to(dsn, tables):
    with connect(dsn) as conn:
        for number, (kind, wider) in enumerate(WIDER):
            name = f"wider{number}"
            conn.execute(f"CREATE TABLE {name} AS SELECT id, v FROM t{list(KINDS).index(kind)}")
            conn.execute(f"ALTER TABLE {name} ALTER v TYPE {wider}")
            expect_cast(tables[kind], read(conn, name))


def expect_cast(narrow: Read, wide: Read) -> None:
    """The values of one table, widened, are those of the other, in which Postgres cast them."""
    (one, other) = (schema.column("v") for schema, _ in (narrow, wide))
    assert one is not None
    assert other is not None
    convert = widening(*(family_of(of, TypePolicy.EXACT).arrow for of in (one, other)), recast=True)
    assert convert is not None
    values = zip(accepted(one, narrow[1]["v"]), accepted(other, wide[1]["v"]), strict=True)
    for before, after_cast in values:
        # as text, for which NaN is NaN and -0 is not 0
        assert before is None or (after_cast is not None and str(convert(before)) == str(after_cast)), (one, other)


def test_arrays_of_other_forms_are_refused_and_stay_whole_as_text(dsn):
    run_sql(
        dsn,
        "CREATE TYPE mood AS ENUM ('so so', 'fine')",
        "CREATE DOMAIN many AS text[]",
        "CREATE DOMAIN prices AS numeric(6,2)[]",
        "CREATE DOMAIN few AS prices",
        "CREATE TABLE odd (id serial PRIMARY KEY, a int[], b box[], m mood[], d many, p few, k int2vector)",
        "INSERT INTO odd (a) VALUES ('{{1,2},{3,4}}'), ('[0:1]={1,2}'), ('{{{1}}}')",
        "INSERT INTO odd (b, m, d, p, k) "
        "VALUES ('{(1,2),(3,4);(5,6),(7,8)}', '{fine,so so,NULL}', '{a,NULL}', '{1.5,NULL}', '1 2')",
    )
    with connect(dsn) as conn:
        schema, texts = read(conn, "odd")
    columns = {column.name: column for column in schema.columns}

    assert accepted(columns["a"], texts["a"])[:3] == [None, None, None]
    assert family_of(columns["a"], TypePolicy.TEXT) is TEXT
    assert family_of(columns["b"], TypePolicy.EXACT) is family_of(columns["k"], TypePolicy.EXACT) is TEXT
    last = {name: accepted(columns[name], texts[name])[-1] for name in ("m", "d", "p")}
    assert {name: values and values.to_pylist() for name, values in last.items()} == {
        "m": [["fine", "so so", None]],
        "d": [["a", None]],
        "p": [[Decimal("1.50"), None]],
    }
