"""Every value of every type of Postgres comes back from a document with the text that Postgres printed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_table
from cdc.postgres.tables import match_tables, read_schema
from cdc.targets.search_server.document_values import (
    ValueKind,
    ValueType,
    normal_json,
    parse_document,
    to_json,
    to_text,
    value_type,
)
from pipelines.types.typed_rows import text_columns
from tests.contracts.folded import column
from tests.fixtures.postgres import open_session, run_sql
from tests.postgres.samples import SAMPLES

MORE = {
    "bool": ("t", "f"),
    "numeric": ("1.50", "NaN", "-Infinity", "1e-50", "1e500", "0"),
    "timestamp": ("0001-01-01 00:00:00", "2024-02-29 1:2:3.5", "infinity", "0044-03-15 12:00:00 BC"),
    "timestamptz": ("2024-03-31 02:30:00 Europe/Berlin", "-infinity", "10000-01-01 00:00:00+00"),
    "jsonb": (
        '{"a": [1.50, {"b": null}], "": "é\\u0001\\u007f"}',
        '{"_value": 1}',
        '{"_text": 1}',
        "[1]",
        "null",
        "1e400",
    ),
}
KINDS = {kind: values for kind, values in (SAMPLES | MORE).items() if kind not in {"xml", "regclass"}}


@pytest.fixture(scope="module")
def dsn(postgres) -> str:
    run_sql(postgres.dsn(), "DROP DATABASE IF EXISTS documents", "CREATE DATABASE documents")
    with connect(postgres.dsn("documents"), autocommit=False) as conn:
        for number, (kind, values) in enumerate(KINDS.items()):
            conn.execute(f"CREATE TABLE t{number} (id serial PRIMARY KEY, v {kind}, a {kind}[])")
            insert = f"INSERT INTO t{number} (v, a) VALUES (%s::{kind}, ARRAY[%s::{kind}, NULL])"
            with conn.cursor() as cursor:
                cursor.executemany(insert, [(value, value) for value in values])
            conn.execute(f"INSERT INTO t{number} (a) VALUES ('{{}}'), (NULL)")
            if kind != "box":  # semicolons are between the elements of its arrays
                conn.execute(f"INSERT INTO t{number} (a) VALUES ('[0:1]={{NULL,NULL}}'), ('{{{{NULL}}}}')")
    return postgres.dsn("documents")


def texts_of(conn: Any, table: str) -> list[tuple[Any, pa.Array]]:
    ((oid, _),) = match_tables(conn, [f"public.{table}"])
    schema = read_schema(conn, oid)
    assert schema is not None
    decoder = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    found = [rows for chunk in copy_table(conn, schema) if (rows := decoder.feed(chunk)) is not None]
    rows = pa.Table.from_batches(found).combine_chunks()
    return list(zip(schema.sent, text_columns(rows, schema), strict=True))


@pytest.mark.parametrize("number", range(len(KINDS)), ids=list(KINDS))
def test_a_value_comes_back_as_postgres_printed_it(dsn, number):
    for of_type, texts in texts_of(open_session(dsn), f"t{number}"):
        kind = value_type(of_type)
        documents = [parse_document(f'{{"v": {text}}}'.encode()) for text in to_json(texts, kind)]
        is_json = kind.kind is ValueKind.JSON
        sent = [normal_json(text) if is_json and text is not None else text for text in texts.to_pylist()]

        returned = [to_text(document["v"], kind) for document in documents]
        if is_json:
            returned = [None if text is None else normal_json(text) for text in returned]
        assert returned == sent


@pytest.mark.parametrize(
    ("type_name", "oid", "text", "stored"),
    [
        ("bigint", 20, "9223372036854775807", "9223372036854775807"),
        ("numeric", 1700, "1.50", "1.50"),
        ("numeric", 1700, "NaN", '"NaN"'),
        ("boolean", 16, "t", "true"),
        ("timestamp with time zone", 1184, "2026-01-31 12:00:00.5+00", '"2026-01-31T12:00:00.5Z"'),
        ("timestamp with time zone", 1184, "infinity", '"infinity"'),
        ("timestamp without time zone", 1114, "2026-01-31 12:00:00", '"2026-01-31T12:00:00"'),
        ("date", 1082, "2026-01-31", '"2026-01-31"'),
        ("bytea", 17, "\\x6162", '"YWI="'),
        ("text", 25, 'a "b"', '"a \\"b\\""'),
        ("integer[]", 1007, "{1,NULL,3}", "[1,null,3]"),
        ("integer[]", 1007, "{{1},{2}}", '"{{1},{2}}"'),
        ("text[]", 1009, '{a,"b,c",NULL,"NULL"}', '["a","b,c",null,"NULL"]'),
        ("jsonb", 3802, '{"a": 1.50}', '{"a": 1.50}'),
        ("jsonb", 3802, "[1]", '{"_value": [1]}'),
    ],
)
def test_a_document_shows_a_value_as_applications_expect_it(type_name, oid, text, stored):
    kind = value_type(column(1, "v", type_name, oid=oid))

    assert to_json(pa.array([text, None]), kind) == [stored, "null"]


def test_one_unusual_value_does_not_change_the_others():
    moments = pa.array(["2026-01-31 12:00:00+00", "infinity"])

    assert to_json(moments, ValueType(ValueKind.MOMENT)) == ['"2026-01-31T12:00:00Z"', '"infinity"']


def test_a_point_is_a_geo_point_only_if_the_definition_says_so():
    place = column(1, "place", "point", oid=600)

    assert value_type(place).kind is ValueKind.EXACT
    assert value_type(place, "geo_point").kind is ValueKind.POINT
    assert to_json(pa.array(["(1.5,-2)"]), ValueType(ValueKind.POINT)) == ['"POINT (1.5 -2)"']
    assert to_text("POINT (1.5 -2)", ValueType(ValueKind.POINT)) == "(1.5,-2)"
