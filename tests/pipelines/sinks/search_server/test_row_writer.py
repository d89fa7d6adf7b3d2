"""Documents of folded rows: their JSON, and partial images completed from the right base."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from cdc.targets.search_server.document_values import parse_document
from cdc.targets.search_server.index_mapping import document_columns
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search_server.document_lines import TableIndex, document_lines
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, batch, column, folded, gone, part, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import Index, merge, opened, rows

DETAIL = column(4, "100% json", "jsonb", oid=3802)
WIDER = replace(ORDERS, columns=(ID, ITEM, PRICE, DETAIL))


def table() -> TableIndex:
    shape = DocumentShapes().of(WIDER)
    return TableIndex("orders.r1.1", shape, document_columns(shape.columns, {}), 0)


def sources_of(images: pa.Table) -> list[str]:
    return [line.content.decode().splitlines()[1] for line in document_lines(images, table(), {})]


def test_a_row_becomes_a_document_and_a_delete_a_mark():
    images = folded(
        [replace(put(1, 'a "b" %s', 10), after={1: "1", 2: 'a "b" %s', 3: "1.50", 4: '{"k": [1]}'}), gone(2, 11)]
    )
    sources = sources_of(images)

    assert json.loads(sources[1]) == {"_position": 11, "_deleted": True}
    assert json.loads(sources[0]) == {
        "id": 1, "item": 'a "b" %s', "price": 1.5, "100%25%20json": {"k": [1]}, "_position": 10
    }  # fmt: skip
    assert parse_document(sources[0])["price"] == "1.50"


def test_unusual_json_is_next_to_its_null():
    image = replace(put(1, "a", 10), after={1: "1", 2: "a", 3: "1.00", 4: "1e5000"})
    (source,) = sources_of(folded([image]))
    document = json.loads(source)

    assert document["100%25%20json"] is None
    assert document["_raw"] == {"100%25%20json": {"_text": "1e5000"}}


@pytest.mark.parametrize("value", ['{"a": 1.50}', "1e5000", None])
def test_an_unsent_json_value_is_kept_exactly(opensearch, value):
    find = search_sink(opensearch)
    whole = replace(put(1, "a", 10), after={1: "1", 2: "a", 3: "1.00", 4: value})
    sink = opened(find)
    merge(sink, batch([whole], 0, 20, WIDER), batch([part(1, 30, {3: "2.50"}), put(2, "b", 31)], 20, 40, WIDER))

    assert rows(find)["1"] == {"id": "1", "item": "a", "price": "2.50", "100% json": value}
    assert Index(find).all()["1"]["price"] == 2.5
