"""The mapping of an index: field types by the types of Postgres, and what a definition may change."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.document_values import ValueKind, ValueType
from cdc.targets.search_server.index_mapping import (
    DocumentColumn,
    document_columns,
    field_types,
    index_body,
    visible,
)
from tests.contracts.folded import column
from tests.fixtures.search_sinks import search_sink

COLUMNS = (
    column(1, "id", "bigint", oid=20, key=0),
    column(2, "name"),
    column(3, "price", "numeric", oid=1700),
    column(4, "at", "timestamp with time zone", oid=1184),
    column(5, "detail", "jsonb", oid=3802),
    column(6, "tags", "text[]", oid=1009),
    column(7, "kind", "shop.mood", oid=99_999),
    column(8, "is_new", "boolean", oid=16),
    column(9, "photo", "bytea", oid=17),
    column(10, "place", "point", oid=600),
    column(11, "Odd name", "uuid", oid=2950),
)


@pytest.mark.parametrize(("engine", "json"), [("opensearch", "flat_object"), ("elasticsearch", "flattened")])
def test_a_field_has_the_type_that_fits_its_column(engine, json):
    fields = field_types(document_columns(COLUMNS, {}), {}, engine)

    assert {name: field["type"] for name, field in fields.items()} == {
        "id": "long",
        "name": "text",
        "price": "double",
        "at": "date",
        "detail": json,
        "tags": "text",
        "kind": "keyword",
        "is_new": "boolean",
        "photo": "binary",
        "place": "keyword",
        "Odd%20name": "keyword",
    }


def test_a_definition_sets_a_type_or_a_whole_field_mapping():
    overrides: dict[str, Any] = {
        "name": {"analyzer": "english"},
        "price": "keyword",
        "place": "geo_point",
        "unknown": "long",
    }
    columns = document_columns(COLUMNS, overrides)
    fields = field_types(columns, overrides, "opensearch")

    assert fields["name"]["analyzer"] == "english"
    assert fields["name"]["fields"]["keyword"]["type"] == "keyword"
    assert (fields["price"], fields["place"]) == ({"type": "keyword"}, {"type": "geo_point"})
    assert columns[9].type.kind is ValueKind.POINT


def test_a_real_server_takes_the_mapping_with_everything_that_a_definition_adds(opensearch):
    overrides: dict[str, Any] = {"place": "geo_point", "name": {"analyzer": "words"}}
    columns = document_columns(COLUMNS, overrides)
    analyzer = {"type": "custom", "tokenizer": "standard", "filter": ["lowercase"]}
    settings = {"number_of_replicas": 0, "analysis": {"analyzer": {"words": analyzer}}}
    mappings = {"dynamic_templates": [{"x": {"match": "x_*", "mapping": {"type": "keyword"}}}]}
    body = index_body(field_types(columns, overrides, "opensearch"), {"sink": "find"}, settings, mappings)
    with SearchClient(search_sink(opensearch).access, "opensearch") as client:
        client.ask("PUT", f"/{opensearch.prefix}a", body)
        found = client.ask("GET", f"/{opensearch.prefix}a/_mapping").body[f"{opensearch.prefix}a"]["mappings"]

    assert found["_meta"] == {"cdc": {"sink": "find"}}
    assert found["properties"]["place"] == {"type": "geo_point"}
    assert found["dynamic"] == "false"


def test_a_column_comes_back_from_its_description():
    array = DocumentColumn(6, "tags", ValueType(ValueKind.WORDS, is_array=True))

    assert DocumentColumn.from_json(array.to_json()) == array


def test_rows_at_the_floor_are_visible():
    assert visible(7)["bool"]["filter"] == [{"range": {"_position": {"gte": 7}}}]
