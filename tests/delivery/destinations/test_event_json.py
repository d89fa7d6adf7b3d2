"""An event as a line of JSON, and the array of its headers."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.destinations.contract import Event
from cdc.delivery.destinations.event_json import header_list, line_encoder
from tests.delivery.formats.changes import ID, changes_of, column, format_named, log_row, schema_with

OUTBOX: Final = {"outbox": {"table": "shop.outbox"}}
"""Settings of a delivery with content that no format has made."""


def line(event: Event, **fields: Any) -> bytes:
    return line_encoder(DeliverySettings.model_validate({"name": "copy", **fields}))(event)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, None),
        (b'{"a": 1}', {"a": 1}),
        (b"{not json}", "{not json}"),
        (b'{"a":\n1}', '{"a":\n1}'),
        (b"text", "text"),
        (b"\xff", {"base64": "/w=="}),
        (b"", ""),
    ],
)
def test_a_value_is_json_text_or_base64(content: bytes | None, expected: Any):
    found = line(Event("LOG/0/1/0", 1, 0, "t", None, content, (("cdc.id", b"x"),)), **OUTBOX)

    assert json.loads(found) == {
        "id": "LOG/0/1/0", "topic": "t", "key": None, "value": expected, "headers": {"cdc.id": "x"}
    }  # fmt: skip


@given(st.binary(max_size=30), st.binary(max_size=30), st.text(max_size=10))
def test_every_event_is_one_line_of_json(value: bytes, key: bytes, topic: str):
    found = line(Event("LOG/0/1/0", 1, 0, topic, key, value, (("h", value),)), **OUTBOX)

    assert found.endswith(b"\n")
    assert found.count(b"\n") == 1
    assert json.loads(found)["topic"] == topic


@pytest.mark.parametrize(
    ("fields", "is_parsed"),
    [
        ({}, False),
        (OUTBOX, True),
        ({"messages": [{"prefix": "*", "topic": "t", "key": "id"}]}, True),
        ({"encoding": "avro", "schema_registry": {"url": "http://localhost"}}, True),
    ],
)
def test_content_is_parsed_only_if_it_may_be_no_json(fields: dict[str, Any], is_parsed: bool):
    broken = b'{"a": }'  # no format makes it, so it shows whether it was parsed
    found = line(Event("LOG/0/1/0", 1, 0, "t", broken, broken), **fields)

    assert (broken not in found) is is_parsed


@pytest.mark.parametrize("name", ["cdc", "debezium", "flat", "cloudevents"])
def test_the_objects_of_every_format_are_one_line_of_json(name: str):
    schema = schema_with(ID, column('a\n"b'), column("c", 114, "json"), column("d", 17, "bytea"))
    row = {1: "1", 2: '\n\u2028\x01"\\', 3: '{\n"x": [1]}', 4: "\\x0aff"}
    rows = log_row("c", key=["1"], after=row), log_row("d", 1, key=["1"])
    events = format_named(name, schemas=True).encode(changes_of(schema, *rows))
    pairs = zip(events.keys.to_pylist(), events.values.to_pylist(), strict=True)
    for key, value in pairs:
        content = None if value is None else value.encode()
        found = line(Event("LOG/0/1/0", 1, 0, "t", key.encode(), content))
        parsed = json.loads(found)

        assert found.count(b"\n") == 1
        assert parsed["key"] == json.loads(key)
        assert parsed["value"] == (None if value is None else json.loads(value))


def test_headers_are_texts_or_base64():
    headers = (("a", b"x"), ("b", b"\xff"), ("a", "\u00e9".encode()), ("empty", b""))

    assert json.loads(header_list(headers)) == [["a", "x"], ["b", "/w==", "base64"], ["a", "\u00e9"], ["empty", ""]]
    assert header_list(()) == "[]"
