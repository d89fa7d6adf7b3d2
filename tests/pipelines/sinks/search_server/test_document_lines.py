"""Document lines: whatever a row contains, its two lines are JSON with the id and the values of the row."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdc.targets.search_server.index_mapping import document_columns
from cdc.targets.search_server.index_names import document_key
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.row_documents import ROWS_AT_ONCE
from pipelines.sinks.search_server.bulk_writer import Line
from pipelines.sinks.search_server.document_lines import TableIndex, document_lines
from tests.contracts.folded import ITEM, ORDERS, Row, column, folded, gone, part, put

TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from('"\\\n\r\t\x00\x07\x1f\x7f')), max_size=8)
CODES = st.one_of(TEXTS, st.sampled_from(["", "sha256:1", "x" * 513]))
SHAPE = DocumentShapes().of(ORDERS)
TABLE = TableIndex("shop.orders.r16384.1", SHAPE, document_columns(SHAPE.columns, {}), 0)
TIMES = replace(
    ORDERS,
    columns=(
        column(1, "id", "bigint", oid=20, key=0),
        column(2, "on", "date", oid=1082),
        column(3, "at", "timestamp", oid=1114),
        column(4, "moment", "timestamp with time zone", oid=1184),
        column(5, "is_paid", "boolean", oid=16),
        column(6, "ratio", "double precision", oid=701),
    ),
)
USUAL = ["2026-01-31", "2026-01-31 12:00:00.5", "2026-01-31 12:00:00.5+00", "t", "1.50"]
AS_JSON = ['"2026-01-31"', '"2026-01-31T12:00:00.5"', '"2026-01-31T12:00:00.5Z"', "true", "1.50"]
UNUSUAL = ["infinity", "infinity", "0044-03-15 12:00:00+00 BC", None, "NaN"]


def parsed(line: Line) -> tuple[dict[str, Any], dict[str, Any]]:
    action, source, rest = line.content.split(b"\n")
    assert rest == b""
    return json.loads(action)["index"], json.loads(source)


@example([('"\\\n\r\t\x7f', '"\\\n\r\t\x7f'), ("\x00", "\x00")])
@example([('"\\\n\r\t\x7f', '"\\\n\r\t\x7f')])
@given(st.lists(st.tuples(CODES, st.none() | TEXTS), min_size=1, max_size=5))
def test_a_line_has_the_id_and_the_texts_of_its_row(values: list[tuple[str, str | None]]) -> None:
    rows = [Row((code,), 10 + number, {1: "1", 2: item, 3: None}) for number, (code, item) in enumerate(values)]
    lines = [parsed(line) for line in document_lines(folded(rows), TABLE, {})]

    assert [action["_id"] for action, _ in lines] == [document_key(row.key) for row in rows]
    assert [(action["version"], source["_position"]) for action, source in lines] == [
        (row.position, row.position) for row in rows
    ]
    assert {action["version_type"] for action, _ in lines} == {"external_gte"}
    assert [source["item"] for _, source in lines] == [item for _, item in values]


def test_a_key_of_two_columns_is_one_id() -> None:
    rows = [Row(('a"', "b"), 1, {1: "1", 2: "x"}), Row(("a", "c"), 2, {1: "2", 2: "x"})]

    ids = [parsed(line)[0]["_id"] for line in document_lines(folded(rows), TABLE, {})]

    assert ids == [document_key(row.key) for row in rows]


def test_a_deleted_row_becomes_a_document_without_columns() -> None:
    _, (action, deleted) = map(parsed, document_lines(folded([put(1, "x", 10), gone(2, 11)]), TABLE, {}))

    assert (action["_id"], deleted) == ("2", {"_position": 11, "_deleted": True})


@pytest.mark.parametrize("others", [[], [UNUSUAL]])
def test_a_usual_value_becomes_the_same_json_next_to_an_unusual_one(others: list[list[str | None]]) -> None:
    shape = DocumentShapes().of(TIMES)
    table = TableIndex("i", shape, document_columns(shape.columns, {}), 0)
    texts: list[list[str | None]] = [["1", *USUAL], *(["2", *other] for other in others)]
    rows = [Row((row[0] or "",), 10, dict(enumerate(row, 1)), number) for number, row in enumerate(texts)]

    source = next(iter(document_lines(folded(rows), table, {}))).content.split(b"\n")[1].decode()

    names = [column.name for column in TIMES.columns]
    expected = [f'"{name}":{text}' for name, text in zip(names, ["1", *AS_JSON], strict=True)]
    assert source == f'{{{",".join(expected)},"_position":10}}'


def test_a_partial_image_gets_its_completed_document_or_is_left_out() -> None:
    rows = folded([put(1, "a", 10), part(2, 11, {2: "b"}), part(3, 12, {2: "c"}), gone(4, 13)])

    lines = list(document_lines(rows, TABLE, {1: '{"item":"whole"}', 2: None}))

    assert [line.number for line in lines] == [0, 1, 3]
    assert parsed(lines[1]) == ({"_id": "2", "version": 11, "version_type": "external_gte"}, {"item": "whole"})


def test_rows_that_are_built_in_several_steps_keep_their_numbers() -> None:
    count = ROWS_AT_ONCE + 3
    lines = list(document_lines(folded([put(number, ITEM.name, number) for number in range(count)]), TABLE, {}))

    assert [line.number for line in lines] == list(range(count))
    assert [parsed(line)[0]["_id"] for line in lines[-3:]] == [str(number) for number in range(count - 3, count)]
