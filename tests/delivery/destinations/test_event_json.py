"""An event as a line of JSON, and the array of its headers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.destinations.contract import Event
from cdc.delivery.destinations.event_json import header_list, line_of


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
    line = line_of(Event("LOG/0/1/0", 1, 0, "t", None, content, (("cdc.id", b"x"),)))

    assert json.loads(line) == {
        "id": "LOG/0/1/0", "topic": "t", "key": None, "value": expected, "headers": {"cdc.id": "x"}
    }  # fmt: skip


@given(st.binary(max_size=30), st.binary(max_size=30), st.text(max_size=10))
def test_every_event_is_one_line_of_json(value: bytes, key: bytes, topic: str):
    line = line_of(Event("LOG/0/1/0", 1, 0, topic, key, value, (("h", value),)))

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line)["topic"] == topic


def test_headers_are_texts_or_base64():
    headers = (("a", b"x"), ("b", b"\xff"), ("a", "\u00e9".encode()), ("empty", b""))

    assert json.loads(header_list(headers)) == [["a", "x"], ["b", "/w==", "base64"], ["a", "\u00e9"], ["empty", ""]]
    assert header_list(()) == "[]"
