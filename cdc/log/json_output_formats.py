"""Log rows as JSON messages in three formats: cdc's own, Debezium's, or flat rows.

Integers become numbers and booleans become booleans. Every other value keeps the text that Postgres sent, so a numeric,
a float or a timestamp is never rounded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from cdc.log_row import ROW_OPERATIONS, Operation
from cdc.logical_message import LogicalMessage
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.table import Column, TableSchema, split_topic

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""Text that Debezium writes in place of an unchanged TOAST value; only the format `debezium` uses it."""
_INTEGERS: Final = frozenset({20, 21, 23, 26})
"""Type OIDs of int8, int2, int4 and oid."""
_BOOLEAN: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Message = dict[str, Any]
Row = Mapping[str, Any]
"""One row of LOG_SCHEMA as `RecordBatch.to_pylist` returns it; a row image is a list of (column id, text)."""
Formatter = Callable[[Row, Row | None, "SchemaInForce"], Iterator[Message]]
"""Function that formats one row: (row, next row or None, current schemas) → messages."""


class MessageFormat(StrEnum):
    """Format of a printed change."""

    #: The log row with column names; unchanged TOAST columns are listed by name.
    CDC = "cdc"
    #: Debezium's key, headers and envelope; a tombstone follows each delete.
    DEBEZIUM = "debezium"
    #: Only the row, with `__op`, `__deleted`, `__lsn`, `__source_ts_ms` as ExtractNewRecordState adds them.
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """Values for Debezium's `source` block that are the same in every message."""

    pipeline: str
    database: str
    version: str


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


def messages(
    rows: Iterable[Row], tables: SchemaInForce, form: MessageFormat, source: SourceBlock
) -> Iterator[tuple[Row, Message]]:
    """Yield (row, message) pairs in the given order; a row can have no message, one, or two.

    The rows must be sorted by position and ordinal, so that the two rows of a key change are adjacent.
    """
    formatters: dict[MessageFormat, Formatter] = {
        MessageFormat.CDC: _cdc,
        MessageFormat.DEBEZIUM: _Debezium(source),
        MessageFormat.FLAT: _flat,
    }
    formatter = formatters[form]
    for row, following in _with_next(rows):
        tables.follow(row)
        for message in formatter(row, following, tables):
            yield row, message


def filter_messages(found: Iterable[tuple[Row, Message]], operations: frozenset[str]) -> Iterator[Message]:
    """Yield the messages of the rows with one of the operations; an empty set of operations selects all rows."""
    return (message for row, message in found if not operations or row["op"] in operations)


def _with_next(rows: Iterable[Row]) -> Iterator[tuple[Row, Row | None]]:
    waiting: Row | None = None
    for row in rows:
        if waiting is not None:
            yield waiting, row
        waiting = row
    if waiting is not None:
        yield waiting, None


def _cdc(row: Row, _following: Row | None, tables: SchemaInForce) -> Iterator[Message]:
    message: Message = {
        "position": str(Position(row["position"])),
        "ordinal": row["ordinal"],
        "op": row["op"],
        "topic": row["topic"],
        "xid": row["xid"],
        "committed_at": row["committed_at"].astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    if row["op"] == Operation.MESSAGE.value:
        yield message | _logical_message(LogicalMessage.from_row(row))
        return
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
    yield message


def _logical_message(message: LogicalMessage) -> Message:
    """Return the fields of a logical message; all but `payload` are null if its log row is of format 1 or 2."""
    return {
        "prefix": message.prefix,
        "transactional": message.transactional,
        "lsn": None if message.lsn is None else str(message.lsn),
        "payload": base64.b64encode(message.content).decode(),
    }


def _flat(row: Row, _following: Row | None, tables: SchemaInForce) -> Iterator[Message]:
    if row["op"] not in ROW_OPERATIONS:
        return
    deleted = row["op"] == Operation.DELETE.value
    image = row["before"] if deleted else row["after"]
    values = tables.named(row, image) if image is not None else tables.key(row, row["key"]) or {}
    yield {
        **values,
        "__op": row["op"],
        "__deleted": "true" if deleted else "false",
        "__lsn": int(Position(row["position"]).lsn),
        "__source_ts_ms": _micros(row) // 1000,
    }


class _Debezium:
    """Formats keys, headers and values as Debezium's Postgres connector does.

    `source.lsn` is the LSN of the commit record, because the log has no LSN per change. For the same reason `xmin` and
    the first LSN in `sequence` are null. `ts_*` is the commit time, because this module has no clock. A logical message
    has its own LSN; a message that is not transactional has no `transaction`, and `source.txId` is null.
    """

    def __init__(self, source: SourceBlock) -> None:
        self._names = source
        self._position = -1
        self._orders: dict[str, int] = {}

    def __call__(self, row: Row, following: Row | None, tables: SchemaInForce) -> Iterator[Message]:
        if row["op"] in {Operation.SCHEMA.value, Operation.GENERATION.value}:
            return
        order = self._order(row)
        if row["op"] == Operation.MESSAGE.value:
            yield self._logical_message(row, order)
            return
        is_key_change = following is not None and _is_key_change(row, following)
        headers: Message = {}
        operation = row["op"]
        if is_key_change and following is not None:
            headers["__debezium.newkey"] = tables.key(following, following["key"])
        elif row["old_key"] is not None:
            # Debezium writes the second row of a key change as a create
            headers["__debezium.oldkey"] = tables.key(row, row["old_key"])
            operation = Operation.CREATE.value
        topic = f"{self._names.pipeline}.{row['topic']}"
        key = tables.key(row, row["key"])
        value = self._envelope(row, operation, order, tables)
        yield {"topic": topic, "key": key, "headers": headers, "value": value}
        if operation == Operation.DELETE.value:
            yield {"topic": topic, "key": key, "headers": headers, "value": None}

    def _logical_message(self, row: Row, order: int) -> Message:
        found = LogicalMessage.from_row(row)
        source = self._source(row, Position(row["position"]).lsn if found.lsn is None else found.lsn)
        if found.transactional is False:
            source["txId"] = None
        value: Message = {
            "source": source,
            **({} if found.transactional is False else {"transaction": _transaction(row, order)}),
            "op": row["op"],
            **_times(row),
            "message": {"prefix": found.prefix, "content": base64.b64encode(found.content).decode()},
        }
        return {
            "topic": f"{self._names.pipeline}.message",
            "key": {"prefix": found.prefix},
            "headers": {},
            "value": value,
        }

    def _envelope(self, row: Row, operation: str, order: int, tables: SchemaInForce) -> Message:
        return {
            "before": None if operation == Operation.CREATE.value else self._image(row, "before", None, tables),
            "after": self._image(row, "after", UNAVAILABLE, tables),
            "source": self._source(row, Position(row["position"]).lsn),
            "transaction": _transaction(row, order),
            "op": operation,
            **_times(row),
        }

    def _image(self, row: Row, side: str, absent: str | None, tables: SchemaInForce) -> Message | None:
        if row[side] is None:
            return None
        values = tables.named(row, row[side])
        return {**dict.fromkeys(tables.names(row), absent), **values}

    def _source(self, row: Row, lsn: Lsn) -> Message:
        schema, table = split_topic(row["topic"] or "")
        return {
            "version": self._names.version,
            "connector": "postgresql",
            "name": self._names.pipeline,
            **_times(row),
            "snapshot": "true" if row["op"] == Operation.READ.value else "false",
            "db": self._names.database,
            "sequence": json.dumps([None, str(int(lsn))]),
            "schema": schema,
            "table": table,
            "txId": row["xid"],
            "lsn": int(lsn),
            "xmin": None,
        }

    def _order(self, row: Row) -> int:
        """Return the number of the row among the rows of its transaction and table, from 1.

        The method counts only rows for which it was called.
        """
        if row["position"] != self._position:
            self._position = row["position"]
            self._orders = {}
        topic = row["topic"] or ""
        self._orders[topic] = self._orders.get(topic, 0) + 1
        return self._orders[topic]


def _transaction(row: Row, order: int) -> Message:
    return {
        "id": f"{row['xid']}:{int(Position(row['position']).lsn)}",
        "total_order": row["ordinal"] + 1,
        "data_collection_order": order,
    }


def _times(row: Row) -> Message:
    micros = _micros(row)
    return {"ts_ms": micros // 1000, "ts_us": micros, "ts_ns": micros * 1000}


def _is_key_change(row: Row, following: Row) -> bool:
    """Return True if the two rows are one key change: a `d` row of the old key, then a `u` row with `old_key`."""
    return bool(
        row["op"] == Operation.DELETE.value
        and following["old_key"] is not None
        and following["position"] == row["position"]
        and following["ordinal"] == row["ordinal"] + 1
        and following["relation"] == row["relation"]
        and following["old_key"] == row["key"]
    )


def _micros(row: Row) -> int:
    """Return the commit time of the row in microseconds since 1970 UTC."""
    delta = row["committed_at"] - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + int(delta.microseconds)
