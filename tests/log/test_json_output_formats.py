"""tail: the unit is one table's rows in each of the three formats."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from cdc.log.json_output_formats import (
    UNAVAILABLE,
    Message,
    MessageFormat,
    Row,
    SchemaInForce,
    SourceBlock,
    filter_messages,
    json_value,
    messages,
)
from cdc.position import Position
from cdc.table import Column, TableSchema
from tests.log.rows import message_row, schema_of
from tests.log.rows import row as log_row

PLACE = SourceBlock("shop", "db", "1.0")
SCHEMA = schema_of(16384, "name", "note")
COMMITTED = datetime(2026, 1, 31, 12, 0, 0, 5_000, tzinfo=UTC)


def row(position: int, ordinal: int = 0, **fields: Any) -> dict[str, Any]:
    return log_row(position, ordinal, committed_at=COMMITTED, **fields)


def created(**fields: Any) -> dict[str, Any]:
    return row(256, 0, key=["1"], after=[(1, "1"), (2, "Ann"), (3, None)], **fields)


def shown(rows: Iterable[Row], form: MessageFormat, schema: TableSchema = SCHEMA) -> list[Message]:
    return [message for _, message in messages(rows, SchemaInForce({schema.relation: schema}), form, PLACE)]


def test_integers_and_booleans_are_json_and_all_else_is_text() -> None:
    def column(oid: int, kind: str) -> Column:
        return Column(id=1, name="x", type_oid=oid, type_name=kind)

    assert json_value("9223372036854775807", column(20, "bigint")) == 2**63 - 1
    assert json_value("f", column(16, "boolean")) is False
    assert json_value("1.10", column(1700, "numeric")) == "1.10"
    assert json_value(None, column(20, "bigint")) is None
    assert json_value("7", None) == "7"


def test_cdc_lists_unchanged_columns_and_invents_no_value_for_them() -> None:
    (message,) = shown([row(256, op="u", key=["1"], after=[(1, "1"), (2, "Bo")], partial=True)], MessageFormat.CDC)
    assert message["after"] == {"id": 1, "name": "Bo"}
    assert message["unchanged"] == ["note"]
    assert message["position"] == "0/100"
    assert message["committed_at"] == "2026-01-31T12:00:00.005000Z"


def test_a_debezium_envelope_has_the_fields_that_its_readers_know() -> None:
    (message,) = shown([created(xid=77)], MessageFormat.DEBEZIUM)
    value = message["value"]
    assert (message["topic"], message["key"], message["headers"]) == ("shop.shop.orders", {"id": 1}, {})
    assert list(value) == ["before", "after", "source", "transaction", "op", "ts_ms", "ts_us", "ts_ns"]
    assert value["after"] == {"id": 1, "name": "Ann", "note": None}
    assert (value["op"], value["before"], value["ts_ms"]) == ("c", None, 1_769_860_800_005)
    source = value["source"]
    assert [source[name] for name in ("connector", "schema", "table", "db")] == ["postgresql", "shop", "orders", "db"]
    assert [source[name] for name in ("lsn", "txId", "snapshot")] == [256, 77, "false"]
    assert source["sequence"] == '[null, "256"]'
    assert value["transaction"] == {"id": "77:256", "total_order": 1, "data_collection_order": 1}


def test_only_debezium_has_a_place_holder_for_unchanged_toast() -> None:
    update = row(256, op="u", key=["1"], after=[(1, "1"), (2, None)], partial=True)
    assert shown([update], MessageFormat.DEBEZIUM)[0]["value"]["after"] == {"id": 1, "name": None, "note": UNAVAILABLE}
    assert "note" not in shown([update], MessageFormat.FLAT)[0]
    assert UNAVAILABLE not in str(shown([update], MessageFormat.CDC))


def test_a_debezium_delete_is_followed_by_its_tombstone() -> None:
    found = shown([row(256, op="d", key=["1"], before=[(1, "1")], after=None)], MessageFormat.DEBEZIUM)
    assert found[0]["value"]["before"] == {"id": 1, "name": None, "note": None}
    assert found[0]["value"]["after"] is None
    assert (found[1]["key"], found[1]["value"]) == ({"id": 1}, None)


def moved() -> list[dict[str, Any]]:
    after = [(1, "2"), (2, "Ann"), (3, None)]
    return [
        row(256, 4, op="d", key=["1"], before=[(1, "1")], after=None),
        row(256, 5, op="u", key=["2"], old_key=["1"], before=[(1, "1")], after=after),
    ]


def test_a_debezium_key_change_is_a_delete_a_tombstone_and_a_create_that_name_each_other() -> None:
    deleted, tombstone, inserted = shown(moved(), MessageFormat.DEBEZIUM)
    assert deleted["headers"] == {"__debezium.newkey": {"id": 2}}
    assert tombstone["value"] is None
    assert inserted["headers"] == {"__debezium.oldkey": {"id": 1}}
    assert (inserted["value"]["op"], inserted["value"]["before"]) == ("c", None)


def test_a_delete_before_another_rows_move_is_no_move() -> None:
    first, second = moved()
    found = shown([{**first, "key": ["9"]}, second], MessageFormat.DEBEZIUM)
    assert found[0]["headers"] == {}


def test_a_flat_row_carries_operation_deletion_lsn_and_time() -> None:
    found = shown([created(), row(2 << 52 | 300, op="d", key=["1"], before=[(1, "1")], after=None)], MessageFormat.FLAT)
    added = {"__op": "c", "__deleted": "false", "__lsn": 256, "__source_ts_ms": 1_769_860_800_005}
    assert found[0] == {"id": 1, "name": "Ann", "note": None, **added}
    assert found[1] == {"id": 1, "__op": "d", "__deleted": "true", "__lsn": 300, "__source_ts_ms": 1_769_860_800_005}


def test_control_rows_are_shown_by_cdc_alone() -> None:
    newer = schema_of(16384, "title", "note")
    rows = [
        row(256, 0, op="s", key=None, after=None, payload=newer.to_json()),
        row(256, 1, op="g", key=None, after=None, payload=b"255"),
    ]
    assert shown(rows, MessageFormat.DEBEZIUM) == shown(rows, MessageFormat.FLAT) == []
    schema, generation = shown(rows, MessageFormat.CDC)
    assert [column["name"] for column in schema["schema"]["columns"]] == ["id", "title", "note"]
    assert generation["older_than"] == str(Position(255))


def message(flag: str = "t", **fields: Any) -> dict[str, Any]:
    """A message at LSN 0/FA, in or before the transaction at 0/100."""
    return message_row(256, 2, committed_at=COMMITTED, xid=77, **({"key": ["orders.é", flag, "0/FA"]} | fields))


OLD: dict[str, Any] = {"key": None, "payload": b"\xff"}
"""What the row of a message has that was logged before format 3."""


def test_cdc_shows_prefix_kind_lsn_and_content_of_a_message() -> None:
    found, old = shown([message("f"), message(**OLD)], MessageFormat.CDC)
    assert {name: found[name] for name in ("op", "topic", "xid", "position")} == {
        "op": "m", "topic": None, "xid": 77, "position": "0/100"
    }  # fmt: skip
    names = ("prefix", "transactional", "lsn", "payload")
    assert [found[name] for name in names] == ["orders.é", False, "0/FA", "aGVsbG8="]
    assert [old[name] for name in names] == [None, None, None, "/w=="]
    assert "key" not in found


def test_a_debezium_message_event_has_no_row_but_its_own_topic_key_and_lsn() -> None:
    (found,) = shown([message()], MessageFormat.DEBEZIUM)
    assert (found["topic"], found["key"], found["headers"]) == ("shop.message", {"prefix": "orders.é"}, {})
    value = found["value"]
    assert list(value) == ["source", "transaction", "op", "ts_ms", "ts_us", "ts_ns", "message"]
    assert (value["op"], value["message"]) == ("m", {"prefix": "orders.é", "content": "aGVsbG8="})
    source = value["source"]
    assert [source[name] for name in ("lsn", "txId", "schema", "table")] == [250, 77, "", ""]
    assert value["transaction"] == {"id": "77:256", "total_order": 3, "data_collection_order": 1}


def test_a_debezium_message_outside_transactions_names_no_transaction() -> None:
    (found,) = shown([message("f")], MessageFormat.DEBEZIUM)
    assert "transaction" not in found["value"]
    assert (found["value"]["source"]["txId"], found["value"]["source"]["lsn"]) == (None, 250)


def test_a_debezium_message_of_an_older_log_has_the_lsn_of_its_position_and_no_prefix() -> None:
    (found,) = shown([message(**OLD)], MessageFormat.DEBEZIUM)
    assert (found["key"], found["value"]["message"]) == ({"prefix": None}, {"prefix": None, "content": "/w=="})
    assert (found["value"]["source"]["lsn"], found["value"]["transaction"]["id"]) == (256, "77:256")


def test_a_message_is_no_flat_row() -> None:
    assert shown([message(), message(**OLD)], MessageFormat.FLAT) == []


def test_names_follow_the_schema_rows_that_pass() -> None:
    newer = schema_of(16384, "title")
    rows = [created(), row(300, op="s", key=None, after=None, payload=newer.to_json()), created()]
    before, _, after = shown(rows, MessageFormat.CDC)
    assert list(before["after"]) == ["id", "name", "note"]
    assert list(after["after"]) == ["id", "title", "column_3"]


def test_an_operation_filter_keeps_the_header_of_a_key_change() -> None:
    found = messages(moved(), SchemaInForce({16384: SCHEMA}), MessageFormat.DEBEZIUM, PLACE)
    kept = list(filter_messages(found, frozenset("d")))
    assert [message["headers"] for message in kept] == [{"__debezium.newkey": {"id": 2}}] * 2
