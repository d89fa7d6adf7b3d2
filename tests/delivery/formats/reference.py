"""Formats row by row and value by value, as plainly as possible; the vectorised formats must return the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from cdc.config.deliveries import DebeziumSettings
from cdc.delivery.formats.debezium_types import column_encoding
from cdc.position import Position
from cdc.table import Column, TableSchema

Row = Mapping[str, Any]


class NotEncodable(Exception):
    """The row has a value that the format cannot represent."""


def cdc_value(column: Column, text: str | None) -> Any:
    """A value in the format `cdc`."""
    if text is None:
        return None
    if column.type_oid in {21, 23, 26}:
        return int(text)
    return text == "t" if column.type_oid == 16 else text


def cdc_event(schema: TableSchema, row: Row) -> dict[str, Any]:
    """An event of the format `cdc`."""
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=row["committed_at"])

    def named(image: Mapping[int, str | None] | None) -> dict[str, Any] | None:
        columns = [column for column in schema.sent if image is not None and column.id in image]
        return None if image is None else {one.name: cdc_value(one, image[one.id]) for one in columns}

    def key(parts: Sequence[str] | None) -> dict[str, Any] | None:
        if parts is None:
            return None
        return {one.name: cdc_value(one, text) for one, text in zip(schema.key, parts, strict=True)}

    after = row["after"]
    return {
        "position": str(Position(row["position"])),
        "ordinal": row["ordinal"],
        "op": row["op"],
        "topic": schema.topic,
        "xid": row["xid"],
        "committed_at": f"{time:%Y-%m-%dT%H:%M:%S.%f}Z",
        "key": key(row["key"]),
        "old_key": key(row["old_key"]),
        "before": named(row["before"]),
        "after": named(after),
        "unchanged": [] if after is None else [one.name for one in schema.sent if one.id not in after],
    }


def debezium_value(column: Column, text: str | None, settings: DebeziumSettings) -> Any:
    """A value in the format `debezium`; raises NotEncodable."""
    if text is None:
        return None
    value = column_encoding(column, settings).convert(pa.array([text], pa.string()))[0].as_py()
    if value is None:
        raise NotEncodable(column.name)
    return json.loads(value)


def debezium_images(schema: TableSchema, row: Row, settings: DebeziumSettings) -> tuple[Any, Any]:
    """The images `before` and `after` of an event of the format `debezium`; raises NotEncodable."""
    before, after = row["before"], row["after"]
    if row["op"] == "d" and before is None and row["key"] is not None:
        before = {column.id: text for column, text in zip(schema.key, row["key"], strict=True)}
    old, new = {}, {}
    for column in schema.sent:
        encoding = column_encoding(column, settings)
        if before is not None and column.id in before:
            old[column.name] = debezium_value(column, before[column.id], settings)
        else:
            old[column.name] = json.loads(encoding.fallback) if column.not_null else None
        if after is not None and column.id in after:
            new[column.name] = debezium_value(column, after[column.id], settings)
        elif after is not None and before is not None and column.id in before:
            new[column.name] = debezium_value(column, before[column.id], settings)
        elif after is not None:
            if encoding.unavailable is None:
                raise NotEncodable(column.name)
            new[column.name] = json.loads(encoding.unavailable)
    return (
        None if before is None or row["old_key"] is not None else old,
        None if after is None else new,
    )
