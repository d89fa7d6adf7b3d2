"""Log rows as JSON messages for people and for the API, control rows among them.

Integers become numbers and booleans become booleans. Every other value keeps the text that Postgres sent, so a numeric,
a float or a timestamp is never rounded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any, Final

from cdc.log_row import Operation
from cdc.logical_message import LogicalMessage
from cdc.position import Position
from cdc.table import Column, TableSchema

_INTEGERS: Final = frozenset({20, 21, 23, 26})
"""Type OIDs of int8, int2, int4 and oid."""
_BOOLEAN: Final = 16

Message = dict[str, Any]
Row = Mapping[str, Any]
"""One row of LOG_SCHEMA as `RecordBatch.to_pylist` returns it; a row image is a list of (column id, text)."""


@dataclass(slots=True)
class SchemaInForce:
    """The current schema of each relation. Every `s` row that is passed to `follow` updates the schemas."""

    schemas: dict[int, TableSchema] = field(default_factory=dict)

    def follow(self, row: Row) -> None:
        """Update the schema of the relation if the row is an `s` row; ignore all other rows."""
        if row["op"] == Operation.SCHEMA.value:
            self.schemas[row["relation"]] = TableSchema.from_json(row["payload"])

    def named(self, row: Row, image: Iterable[tuple[int, str | None]]) -> dict[str, Any]:
        """Return the values of a row image: column name → JSON value.

        A column that the current schema does not have, such as a dropped one, gets the name `column_ID`.
        """
        columns = {c.id: c for c in self._columns(row)}
        return {
            columns[number].name if number in columns else f"column_{number}": json_value(text, columns.get(number))
            for number, text in image
        }

    def key(self, row: Row, parts: Iterable[str | None] | None) -> dict[str, Any] | None:
        """Return the key of a row: column name → JSON value; None if `parts` is None.

        `parts` are the values of the key columns. If their number differs from the number of key columns in the current
        schema, the names in the result are `0`, `1`, ….
        """
        if parts is None:
            return None
        schema = self.schemas.get(row["relation"])
        columns = schema.key if schema else ()
        values = list(parts)
        if len(columns) != len(values):
            return {str(index): value for index, value in enumerate(values)}
        return {c.name: json_value(value, c) for c, value in zip(columns, values, strict=True)}

    def names(self, row: Row) -> list[str]:
        """Return the names of the columns of the row's table, except generated columns, in the order of the table."""
        return [c.name for c in self._columns(row) if not c.generated]

    def _columns(self, row: Row) -> tuple[Column, ...]:
        schema = self.schemas.get(row["relation"])
        return schema.columns if schema else ()


def json_value(text: str | None, column: Column | None) -> Any:
    """Return a value as JSON: a number for an integer type, true or false for a boolean, otherwise the text."""
    if text is None or column is None:
        return text
    oid = column.value_type[0]
    if oid in _INTEGERS:
        return int(text)
    return text == "t" if oid == _BOOLEAN else text


def messages(rows: Iterable[Row], tables: SchemaInForce) -> Iterator[tuple[Row, Message]]:
    """Yield (row, message) pairs in the given order, which must be that of the log."""
    for row in rows:
        tables.follow(row)
        yield row, _message(row, tables)


def _message(row: Row, tables: SchemaInForce) -> Message:
    message: Message = {
        "position": str(Position(row["position"])),
        "ordinal": row["ordinal"],
        "op": row["op"],
        "topic": row["topic"],
        "xid": row["xid"],
        "committed_at": row["committed_at"].astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    if row["op"] == Operation.MESSAGE.value:
        return message | _logical_message(LogicalMessage.from_row(row))
    for name in ("key", "old_key"):
        if row[name] is not None:
            message[name] = tables.key(row, row[name])
    for name in ("before", "after"):
        if row[name] is not None:
            message[name] = tables.named(row, row[name])
    if row["partial"]:
        message["unchanged"] = [name for name in tables.names(row) if name not in message.get("after", {})]
    if row["op"] == Operation.SCHEMA.value:
        message["schema"] = json.loads(row["payload"])
    elif row["op"] == Operation.GENERATION.value:
        message["older_than"] = str(Position(int(row["payload"])))
    return message


def _logical_message(message: LogicalMessage) -> Message:
    """Return the fields of a logical message; all but `payload` are null if its log row is of format 1 or 2."""
    return {
        "prefix": message.prefix,
        "transactional": message.transactional,
        "lsn": None if message.lsn is None else str(message.lsn),
        "payload": base64.b64encode(message.content).decode(),
    }
