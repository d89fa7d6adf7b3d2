"""Format `flat`: rows with the fields that ExtractNewRecordState adds."""

from __future__ import annotations

import json

from cdc.delivery.formats.contract import TOMBSTONE
from cdc.delivery.formats.debezium import NEW_KEY, OLD_KEY
from cdc.errors import EventNotEncodable
from tests.delivery.formats.changes import ID, changes_of, column, format_named, log_row, schema_with, values_of

SCHEMA = schema_with(ID, column("price", 1700, "numeric", typmod=(5 << 16 | 2) + 4), column("note", not_null=True))
ROW = {1: "1", 2: "1.10", 3: "x"}


def test_a_row_has_the_added_fields_at_its_end() -> None:
    events = format_named("flat").encode(changes_of(SCHEMA, log_row("c", key=["1"], after=ROW)))
    assert events.values[0].as_py() == (
        '{"id":1,"price":"bg==","note":"x","__deleted":"false","__op":"c","__lsn":24023128,'
        '"__source_ts_ms":1559033904863}'
    )
    assert events.keys.to_pylist() == ['{"id":1}']


def test_a_delete_is_a_row_and_a_tombstone() -> None:
    row = log_row("d", key=["1"], before={1: "1"})
    events = format_named("flat").encode(changes_of(SCHEMA, row))
    expected = {"id": 1, "price": None, "note": "", "__deleted": "true", "__op": "d"}
    assert values_of(events)[0] == {**expected, "__lsn": 24023128, "__source_ts_ms": 1559033904863}
    assert values_of(events)[1] is None
    assert events.suffixes == ["", TOMBSTONE]
    assert format_named("flat", tombstones=False).encode(changes_of(SCHEMA, row)).suffixes is None


def test_a_key_change_has_the_headers_of_debezium() -> None:
    events = format_named("flat", tombstones=False).encode(
        changes_of(
            SCHEMA,
            log_row("d", 0, key=["1"], before={1: "1"}),
            log_row("u", 1, key=["2"], old_key=["1"], after={**ROW, 1: "2"}),
        )
    )
    assert events.headers == [((NEW_KEY, b'{"id":2}'),), ((OLD_KEY, b'{"id":1}'),)]
    assert [value["__op"] for value in values_of(events)] == ["d", "c"]


def test_a_truncate_is_refused() -> None:
    events = format_named("flat").encode(changes_of(SCHEMA, log_row("t", 0), log_row("c", 1, key=["1"], after=ROW)))
    assert events.source.tolist() == [1]
    assert isinstance(events.refused[0], EventNotEncodable)


def test_the_schema_names_the_added_fields() -> None:
    events = format_named("flat", schemas=True).encode(changes_of(SCHEMA, log_row("c", key=["1"], after=ROW)))
    schema = json.loads(events.values[0].as_py())["schema"]
    assert (schema["name"], schema["optional"]) == ("shop.shop.orders.Value", False)
    assert schema["fields"][3:] == [
        {"type": "string", "optional": True, "field": "__deleted"},
        {"type": "string", "optional": True, "field": "__op"},
        {"type": "int64", "optional": True, "field": "__lsn"},
        {"type": "int64", "optional": True, "field": "__source_ts_ms"},
    ]
