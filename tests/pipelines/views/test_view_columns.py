"""Columns of a view: what Spark computed passes through the log, and becomes the same typed rows in a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.errors import ValueNotRepresentable, ViewColumnRefused, ViewKeyNull
from cdc.log_row import LOG_SCHEMA
from cdc.table import ReplicaIdentity, TableSchema, TableState
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import typed_keys, typed_rows
from pipelines.views.view_columns import result_fields, result_rows, view_images, view_keys, view_schema
from tests.fixtures.postgres import rows_of

RELATION = (2 << 32) | 77
TOPIC = "shop.order_documents"
SELECT = """
SELECT CAST(id AS tinyint) AS tiny, CAST(id AS smallint) AS small, CAST(id AS int) AS whole, id AS big,
  CAST(id / 3D AS float) AS half, id / 3D AS twice, CAST(id / 1000D AS decimal(38,38)) AS price,
  CAST(id AS decimal(38,0)) AS amount, CAST(id AS string) AS words, CAST('ab' AS char(4)) AS padded,
  CAST('ab' AS varchar(4)) AS varied, id = 0 AS yes, CAST(CAST(id AS string) AS binary) AS raw,
  date_add(DATE'2024-02-29', CAST(id AS int)) AS day,
  TIMESTAMP'2024-03-31 00:59:59.5' + make_dt_interval(0, CAST(id AS int)) AS seen,
  TIMESTAMP_NTZ'9999-12-31 23:59:59.999999' AS plain, IF(id = 1, NULL, 0.5D) AS maybe, NULL AS nothing,
  named_struct('name', concat('n', id), 'id', id, 'price', CAST(id AS decimal(5,2))) AS customer,
  array(named_struct('sku', 'a', 'quantity', id), NULL) AS items, map('b', 1.50, 'aa', NULL, 'a', 2) AS by_name,
  map(TIMESTAMP'2024-01-01 00:00:00', array(X'00ff', NULL)) AS by_time,
  array(double('NaN'), -0D, 1e20D, 1.5e-7D, NULL) AS numbers,
  named_struct('d', DATE'2024-01-02', 't', TIMESTAMP_NTZ'2024-01-02 03:04:05.6', 'x', NULL) AS times
FROM range(2)
"""
TYPES = [
    "smallint", "smallint", "integer", "bigint", "real", "double precision", "numeric", "numeric", "text", "text",
    "text", "boolean", "bytea", "date", "timestamp with time zone", "timestamp without time zone", "double precision",
    "text", "jsonb", "jsonb", "jsonb", "jsonb", "jsonb", "jsonb",
]  # fmt: skip
DOCUMENTS = [
    """jsonb_build_object('name', 'n1', 'id', 1, 'price', 1.00)""",
    """jsonb_build_array(jsonb_build_object('sku', 'a', 'quantity', 1), NULL)""",
    """jsonb_build_object('b', 1.50, 'aa', NULL, 'a', 2.00)""",
    """jsonb_build_object('2024-01-01T00:00:00+00:00', jsonb_build_array('\\x00ff'::bytea, NULL))""",
    """to_jsonb(ARRAY['NaN', '-0', '1e20', '1.5e-7', NULL]::float8[])""",
    """jsonb_build_object('d', '2024-01-02'::date, 't', '2024-01-02 03:04:05.6'::timestamp, 'x', NULL)""",
]
"""What Postgres has to print for the nested columns of the second row."""


def schema_of(rows: pa.Table, *key: str) -> TableSchema:
    return view_schema(RELATION, TOPIC, key or rows.column_names[:1], rows.schema)


def as_log_rows(rows: pa.Table, schema: TableSchema) -> pa.Table:
    numbers = pa.array(range(len(rows)), pa.int64())
    return pa.table({"after": view_images(rows, schema), "position": numbers, "ordinal": numbers})


def in_target(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """The rows as a typed target gets them from the log."""
    return typed_rows(as_log_rows(rows, schema), schema, TypePolicy.EXACT).select(range(len(schema.columns)))


@pytest.fixture(scope="module")
def result(spark: SparkSession) -> pa.Table:
    return result_rows(spark.sql(SELECT))


def test_every_type_of_spark_has_a_type_of_postgres(result: pa.Table) -> None:
    schema = schema_of(result, "big", "words")

    assert [column.type_name for column in schema.columns] == TYPES
    assert [column.id for column in schema.columns] == list(range(1, len(TYPES) + 1))
    assert [(column.name, column.key, column.not_null) for column in schema.key] == [
        ("big", 0, True),
        ("words", 1, True),
    ]
    assert (schema.relation, schema.oid, schema.topic, schema.state) == (RELATION, 77, TOPIC, TableState.LIVE)
    assert schema.replica_identity is ReplicaIdentity.FULL
    assert TableSchema.from_json(schema.to_json()) == schema


def test_a_table_is_known_before_its_rows(spark: SparkSession, result: pa.Table) -> None:
    fields = result_fields(TOPIC, spark.sql(SELECT).schema)

    assert view_schema(RELATION, TOPIC, ["big"], fields) == schema_of(result, "big")


def test_a_struct_that_an_outer_join_leaves_out_is_null(spark: SparkSession) -> None:
    customers = "SELECT id, named_struct('id', id, 'tags', array(named_struct('a', id))) AS customer FROM range(1)"
    rows = result_rows(spark.sql(f"SELECT id, customer FROM range(2) LEFT JOIN ({customers}) USING (id) ORDER BY id"))

    assert in_target(rows, schema_of(rows))["customer"].to_pylist() == ['{"id": 0, "tags": [{"a": 0}]}', None]


def test_a_target_gets_the_values_that_spark_computed(result: pa.Table) -> None:
    scalars = result.select([name for name, kind in zip(result.column_names, TYPES, strict=True) if kind != "jsonb"])
    target = in_target(scalars, schema_of(scalars))

    for before, after in zip(scalars.columns, target.columns, strict=True):
        wider = {pa.int8(): pa.int16(), pa.null(): pa.string()}.get(before.type, before.type)
        assert after.type == wider
        assert after.equals(before.cast(wider))


def test_nested_values_have_the_text_of_postgres(result: pa.Table, postgres: Any) -> None:
    nested = result.select([name for name, kind in zip(result.column_names, TYPES, strict=True) if kind == "jsonb"])
    target = in_target(nested, schema_of(nested))
    query: Any = f"SELECT {', '.join(f'({document})::text' for document in DOCUMENTS)}"

    assert [column[1].as_py() for column in target.columns] == list(rows_of(postgres.dsn(), query)[0])
    assert [column.null_count for column in target.columns] == [0] * len(DOCUMENTS)


def test_keys_are_texts_in_key_order(result: pa.Table) -> None:
    schema = schema_of(result, "seen", "small")
    keys = view_keys(result, schema)

    assert keys.type == LOG_SCHEMA.field("key").type
    assert keys.to_pylist() == [["2024-03-31 00:59:59.5+00", "0"], ["2024-03-31 01:59:59.5+00", "1"]]
    typed = typed_keys(keys, schema, TypePolicy.EXACT)
    assert [column.to_pylist() for column in typed.columns] == [result[name].to_pylist() for name in ("seen", "small")]


SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.decimal128(38, 10), st.decimals(-(10**17), 10**17, places=10)),
    (pa.string(), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)),
    (pa.bool_(), st.booleans()),
    (pa.binary(), st.binary(max_size=6)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", tz="UTC"), st.datetimes()),
]


@given(st.lists(st.tuples(*(st.none() | values for _, values in SCALARS)), max_size=30), st.integers(1, 7))
def test_random_rows_pass_through_the_log(values: list[tuple[Any, ...]], chunk: int) -> None:
    fields = pa.schema([(f"c{place}", kind) for place, (kind, _) in enumerate(SCALARS)])
    columns = [pa.array([row[place] for row in values], field.type) for place, field in enumerate(fields)]
    whole = pa.table(columns, schema=fields)
    rows = pa.Table.from_batches(whole.to_batches(chunk), fields)
    target = in_target(rows, schema_of(rows))

    assert target.equals(whole.cast(target.schema))


def test_rows_with_much_text_are_divided() -> None:
    rows = pa.table({"id": range(100), "items": [[{"a long name": n}] * n for n in range(100)]})
    whole, divided = view_images(rows, schema_of(rows)), view_images(rows, schema_of(rows), 10_000)

    assert (whole.num_chunks, divided.num_chunks > 5) == (1, True)
    assert divided.combine_chunks().equals(whole.combine_chunks())
    with pytest.raises(ValueNotRepresentable, match="a row with more than 1000 bytes"):
        view_images(rows, schema_of(rows), 1000)


def test_no_rows_have_no_images() -> None:
    rows = pa.table({"id": pa.array([], pa.int64()), "items": pa.array([], pa.list_(pa.map_(pa.string(), pa.int8())))})

    assert view_images(rows, schema_of(rows)).type == LOG_SCHEMA.field("after").type
    assert len(view_images(rows, schema_of(rows))) == len(view_keys(rows, schema_of(rows))) == 0


def test_a_column_keeps_its_id_while_it_keeps_its_name() -> None:
    def version(names: Sequence[str], *earlier: TableSchema) -> TableSchema:
        return view_schema(RELATION, TOPIC, ["id"], pa.schema([(name, pa.int64()) for name in names]), earlier)

    first = version(["id", "a", "b"])
    second = version(["a", "id"], first)
    third = version(["id", "c", "b"], first, second)

    assert [[column.id for column in one.columns] for one in (first, second, third)] == [[1, 2, 3], [2, 1], [1, 4, 5]]


@pytest.mark.parametrize(
    ("expression", "place", "kind"),
    [
        ("INTERVAL '1' DAY", "v", "interval"),
        ("INTERVAL '1' MONTH", "v", "interval month"),
        ("make_interval(1)", "v", "interval"),
        ("parse_json('{}')", "v", "variant"),
        ("TIME'12:00:00'", "v", "time"),
        ("array(named_struct('at', TIME'12:00:00'))", "v.at", "time"),
        ("map(1, named_struct('v', array(parse_json('{}'))))", "v.v", "variant"),
        ("map(named_struct('a', 1), 2)", "v", "map with keys of type struct<a: int32 not null>"),
        ("named_struct('a', 1, 'a', 2)", "v", "struct<a:int,a:int>"),
        ("array()", "v", "array<void>"),
    ],
)
def test_a_type_without_a_type_of_postgres_is_refused(
    spark: SparkSession, expression: str, place: str, kind: str
) -> None:
    with pytest.raises(ViewColumnRefused, match=r"shop\.order_documents") as refused:
        view_schema(
            RELATION, TOPIC, ["id"], result_fields(TOPIC, spark.sql(f"SELECT 1 AS id, {expression} AS v").schema)
        )

    assert str(refused.value).startswith(f"column {place!r} of view {TOPIC!r} has the type {kind!r}")


@pytest.mark.parametrize(
    ("names", "message"),
    [(["id", "v", "v"], "'v' and 'v'"), (["id", "V", "v"], "'V' and 'v'"), (["v"], "no column 'id'")],
)
def test_an_ambiguous_name_and_a_missing_key_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ViewColumnRefused, match=message):
        view_schema(RELATION, TOPIC, ["id"], pa.schema([(name, pa.int64()) for name in names]))


@pytest.mark.parametrize("expression", ["char(0)", "array(char(0))", "DATE'-5000-01-01'", "map(char(0), 1)"])
def test_a_value_that_postgres_does_not_have_is_refused_without_its_content(
    spark: SparkSession, expression: str
) -> None:
    rows = spark.sql(f"SELECT 1 AS id, {expression} AS v").toArrow()
    with pytest.raises(ValueNotRepresentable, match=r"column 'v' of view 'shop\.order_documents': a value cannot"):
        view_images(rows, schema_of(rows))


def test_text_that_is_no_utf_8_is_refused() -> None:
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    rows = pa.table({"id": [1], "v": broken})
    with pytest.raises(ValueNotRepresentable, match="column 'v'"):
        view_images(rows, schema_of(rows))


def test_null_in_a_key_is_refused() -> None:
    rows = pa.table({"id": [1, 2], "day": ["a", None]})
    with pytest.raises(ViewKeyNull, match="key column 'day' is NULL"):
        view_keys(rows, schema_of(rows, "id", "day"))
