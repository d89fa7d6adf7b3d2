"""Log rows as messages for people and for the API."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from cdc.log.json_output_formats import (
    Message,
    Row,
    SchemaInForce,
    json_value,
    messages,
)
from cdc.position import Position
from cdc.table import Column, TableSchema
from tests.log.rows import message_row, schema_of
from tests.log.rows import row as log_row

SCHEMA = schema_of(16384, "name", "note")
COMMITTED = datetime(2026, 1, 31, 12, 0, 0, 5_000, tzinfo=UTC)


def row(position: int, ordinal: int = 0, **fields: Any) -> dict[str, Any]:
    return log_row(position, ordinal, committed_at=COMMITTED, **fields)


def created(**fields: Any) -> dict[str, Any]:
    return row(256, 0, key=["1"], after=[(1, "1"), (2, "Ann"), (3, None)], **fields)


def shown(rows: Iterable[Row], schema: TableSchema = SCHEMA) -> list[Message]:
    return [message for _, message in messages(rows, SchemaInForce({schema.relation: schema}))]


def test_integers_and_booleans_are_json_and_all_else_is_text() -> None:
    def column(oid: int, kind: str) -> Column:
        return Column(id=1, name="x", type_oid=oid, type_name=kind)

    assert json_value("9223372036854775807", column(20, "bigint")) == 2**63 - 1
    assert json_value("f", column(16, "boolean")) is False
    assert json_value("1.10", column(1700, "numeric")) == "1.10"
    assert json_value(None, column(20, "bigint")) is None
    assert json_value("7", None) == "7"


def test_cdc_lists_unchanged_columns_and_invents_no_value_for_them() -> None:
    (message,) = shown([row(256, op="u", key=["1"], after=[(1, "1"), (2, "Bo")], partial=True)])
    assert message["after"] == {"id": 1, "name": "Bo"}
    assert message["unchanged"] == ["note"]
    assert message["position"] == "0/100"
    assert message["committed_at"] == "2026-01-31T12:00:00.005000Z"


def test_control_rows_are_shown() -> None:
    newer = schema_of(16384, "title", "note")
    rows = [
        row(256, 0, op="s", key=None, after=None, payload=newer.to_json()),
        row(256, 1, op="g", key=None, after=None, payload=b"255"),
    ]
    schema, generation = shown(rows)
    assert [column["name"] for column in schema["schema"]["columns"]] == ["id", "title", "note"]
    assert generation["older_than"] == str(Position(255))


def message(flag: str = "t", **fields: Any) -> dict[str, Any]:
    """A message at LSN 0/FA, in or before the transaction at 0/100."""
    return message_row(256, 2, committed_at=COMMITTED, xid=77, **({"key": ["orders.é", flag, "0/FA"]} | fields))


OLD: dict[str, Any] = {"key": None, "payload": b"\xff"}
"""What the row of a message has that was logged before format 3."""


def test_cdc_shows_prefix_kind_lsn_and_content_of_a_message() -> None:
    found, old = shown([message("f"), message(**OLD)])
    assert {name: found[name] for name in ("op", "topic", "xid", "position")} == {
        "op": "m", "topic": None, "xid": 77, "position": "0/100"
    }  # fmt: skip
    names = ("prefix", "transactional", "lsn", "payload")
    assert [found[name] for name in names] == ["orders.é", False, "0/FA", "aGVsbG8="]
    assert [old[name] for name in names] == [None, None, None, "/w=="]
    assert "key" not in found


def test_names_follow_the_schema_rows_that_pass() -> None:
    newer = schema_of(16384, "title")
    rows = [created(), row(300, op="s", key=None, after=None, payload=newer.to_json()), created()]
    before, _, after = shown(rows)
    assert list(before["after"]) == ["id", "name", "note"]
    assert list(after["after"]) == ["id", "title", "column_3"]
