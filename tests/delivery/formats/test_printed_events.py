"""Messages that commands print: events of a delivery, in the order of the log."""

from __future__ import annotations

from typing import Any

from cdc.delivery.formats.printed_events import MessageFormat, PrintedEvents
from cdc.table import TableSchema
from tests.delivery.formats.changes import ID, column, log_row, log_rows, schema_with

SCHEMA = schema_with(ID, column("note"))
OTHER = schema_with(ID, column("price", 1700, "numeric"), relation=2, oid=2, name="items")


def _printed(form: MessageFormat, *rows: dict[str, Any], operations: str = "") -> list[Any]:
    printed = PrintedEvents({16384: SCHEMA, 2: OTHER}, form, pipeline="shop", database="db")
    return list(printed.messages(log_rows(list(rows)), frozenset(operations)))


def _item(op: str, ordinal: int, **fields: Any) -> dict[str, Any]:
    return log_row(op, ordinal, relation=2, topic="shop.items", **fields)


ROWS = (
    log_row("c", 0, key=["1"], after={1: "1", 2: "a"}),
    _item("c", 1, key=["5"], after={1: "5", 2: "1.5"}),
    log_row("d", 2, key=["1"], before={1: "1"}),
    log_row("u", 3, key=["2"], old_key=["1"], after={1: "2", 2: "a"}),
    log_row("m", 4, relation=None, topic=None, payload=b"x", key=["p", "t", "0/A"]),
    log_row("g", 5, payload=b"1"),
    _item("u", 6, key=["5"], after={1: "5", 2: "2"}),
)


def test_events_of_several_tables_are_in_the_order_of_the_log() -> None:
    found = _printed(MessageFormat.DEBEZIUM, *ROWS)
    assert [message["value"] and message["value"]["op"] for message in found] == ["c", "c", "d", None, "c", "m", "u"]
    assert [message["topic"] for message in found[:2]] == ["shop.shop.orders", "shop.shop.items"]
    assert found[2]["headers"] == {"__debezium.newkey": {"id": 2}}
    assert found[4]["headers"] == {"__debezium.oldkey": {"id": 1}}
    assert found[1]["value"]["after"] == {"id": 5, "price": {"scale": 1, "value": "Dw=="}}


def test_an_operation_filter_keeps_the_header_of_a_key_change() -> None:
    kept = _printed(MessageFormat.DEBEZIUM, *ROWS, operations="d")
    assert [message["headers"] for message in kept] == [{"__debezium.newkey": {"id": 2}}] * 2


def test_flat_rows_have_neither_tombstones_nor_messages() -> None:
    found = _printed(MessageFormat.FLAT, *ROWS)
    assert [message["__op"] for message in found] == ["c", "c", "d", "c", "u"]


def _message(flag: str = "t", **fields: Any) -> dict[str, Any]:
    key = ["orders.é", flag, "0/FA"]
    return log_row("m", 2, **{"relation": None, "topic": None, "key": key, "payload": b"hello"} | fields)


def test_a_message_has_no_row_but_its_own_topic_key_and_lsn() -> None:
    (found,) = _printed(MessageFormat.DEBEZIUM, _message())
    assert (found["topic"], found["key"], found["headers"]) == ("shop.message", {"prefix": "orders.é"}, {})
    value = found["value"]
    assert (value["op"], value["message"]) == ("m", {"prefix": "orders.é", "content": "aGVsbG8="})
    assert [value["source"][name] for name in ("lsn", "txId", "schema", "table")] == [250, 555, "", ""]


def test_a_message_outside_transactions_names_no_transaction() -> None:
    (found,) = _printed(MessageFormat.DEBEZIUM, _message("f"))
    assert found["value"]["transaction"] is None
    assert (found["value"]["source"]["txId"], found["value"]["source"]["lsn"]) == (None, 250)


def test_a_message_of_an_older_log_has_the_lsn_of_its_position_and_no_prefix() -> None:
    (found,) = _printed(MessageFormat.DEBEZIUM, _message(key=None, payload=b"\xff"))
    assert (found["key"], found["value"]["message"]) == ({"prefix": None}, {"prefix": None, "content": "/w=="})
    assert found["value"]["source"]["lsn"] == 24_023_128


def test_a_change_that_cannot_be_encoded_is_shown_with_its_reason() -> None:
    found = _printed(MessageFormat.FLAT, log_row("t", 0), _item("c", 1, key=["5"], after={1: "5", 2: "NaN"}))
    assert [sorted(message) for message in found] == [["error", "topic"]] * 2
    assert "price" in found[1]["error"]


def test_a_schema_row_changes_the_names_of_later_rows() -> None:
    newer = schema_with(ID, column("title"))
    rows = ROWS[0], log_row("s", 1, payload=newer.to_json()), log_row("c", 2, key=["3"], after={1: "3", 2: "b"})
    first, second = _printed(MessageFormat.DEBEZIUM, *rows)
    assert (list(first["value"]["after"]), list(second["value"]["after"])) == (["id", "note"], ["id", "title"])
    assert TableSchema.from_json(newer.to_json()) == newer


def test_cdc_has_control_rows() -> None:
    assert [message["op"] for message in _printed(MessageFormat.CDC, *ROWS)] == ["c", "c", "d", "u", "m", "g", "u"]


def test_columns_without_a_schema_have_numbers() -> None:
    (found,) = _printed(MessageFormat.FLAT, log_row("c", relation=9, key=["1"], after={1: "1", 7: None}))
    assert {name: value for name, value in found.items() if not name.startswith("__")} == {
        "column_1": "1", "column_7": None,
    }  # fmt: skip
