"""A document becomes a row with the names and texts of the source."""

from __future__ import annotations

from dataclasses import replace

from cdc.position import Position
from cdc.targets.published_record import TableRecord, TargetState
from cdc.targets.search_server.document_rows import ShownTable
from cdc.targets.search_server.index_mapping import META, document_columns
from tests.contracts.folded import ID, ITEM, ORDERS, column

WIDER = replace(ORDERS, columns=(ID, ITEM, column(4, "note", missing="none"), column(5, "j", "jsonb", oid=3802)))


def shown() -> ShownTable:
    record = TableRecord(
        relation=ORDERS.relation, topic=ORDERS.topic, target="orders.r1.1", position=20, version=None,
        state=TargetState.STREAMING.value, schema=WIDER.to_json().decode(),
    )  # fmt: skip
    columns = [one.to_json() for one in document_columns(WIDER.columns, {})]
    return ShownTable.of(
        record, {"_meta": {META: {"columns": columns, "key": [1], "rules": ""}}, "properties": {"id": {"type": "long"}}}
    )


def test_a_row_has_texts_a_missing_column_its_default_and_unusual_json_its_text():
    source = {"id": 1, "item": None, "j": None, "_position": 7, "_raw": {"j": {"_text": "[1e400]"}}}
    row = shown().row({"_source": source, "_score": 1.5})

    assert row.source == {"id": "1", "item": None, "note": "none", "j": "[1e400]"}
    assert (row.topic, row.key, row.position, row.score) == ("shop.orders", ("1",), Position(7), 1.5)


def test_only_texts_are_searched_for_words():
    assert shown().searched == ["item", "note"]
