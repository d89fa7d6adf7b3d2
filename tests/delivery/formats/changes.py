"""Changes of one table for tests of formats, from rows as they are in the log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from cdc.config.deliveries import DebeziumSettings, DeliverySettings, EventFormat
from cdc.delivery.formats import new_format
from cdc.delivery.formats.contract import EncodedEvents, Format
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.formats.table_changes import TableChanges, table_changes
from cdc.log_row import LOG_SCHEMA
from cdc.table import Column, ReplicaIdentity, TableSchema

TOPIC = "shop.shop.orders"
NAMES = SourceNames(pipeline="shop", database="shopdb", version="1.0", log_id="LOG")
COMMITTED_AT = 1_559_033_904_863_123
"""Commit time of all rows in microseconds."""


def column(name: str, oid: int = 25, type_name: str = "text", **fields: Any) -> Column:
    """A column; its id is set by `schema_with`."""
    return Column(id=0, name=name, type_oid=oid, type_name=type_name, **fields)


def schema_with(*columns: Column, **fields: Any) -> TableSchema:
    """A table shop.orders with these columns, numbered from 1."""
    return TableSchema(
        **{
            "relation": 16384,
            "oid": 16384,
            "schema": "shop",
            "name": "orders",
            "replica_identity": ReplicaIdentity.DEFAULT,
            "columns": tuple(replace(one, id=number) for number, one in enumerate(columns, start=1)),
            **fields,
        }
    )


ID = column("id", 23, "integer", key=0, not_null=True)


def log_row(op: str, ordinal: int = 0, **fields: Any) -> dict[str, Any]:
    """A row of the log; images are mappings of column id to text."""
    blank: dict[str, Any] = dict.fromkeys(LOG_SCHEMA.names)
    images = {name: list(fields.pop(name).items()) for name in ("before", "after") if fields.get(name) is not None}
    return {
        **blank,
        "position": 24_023_128,
        "ordinal": ordinal,
        "xid": 555,
        "committed_at": COMMITTED_AT,
        "relation": 16384,
        "topic": "shop.orders",
        "op": op,
        "partial": False,
        **images,
        **fields,
    }


def log_rows(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table of the log."""
    return pa.Table.from_pylist(rows, LOG_SCHEMA).combine_chunks()


def changes_of(schema: TableSchema, *rows: dict[str, Any]) -> TableChanges:
    """Changes of one table."""
    return table_changes(schema, TOPIC, log_rows(list(rows)))


def format_named(name: str, **debezium: Any) -> Format:
    """A format with options of Debezium."""
    settings = DeliverySettings(
        name="out", format=EventFormat(name), **debezium_options(name, **{"schemas": False, **debezium})
    )
    return new_format(settings, NAMES)


def debezium_options(name: str, **debezium: Any) -> dict[str, Any]:
    """Those of the options of Debezium that the format has."""
    if name not in {"debezium", "flat"}:
        return {}
    used = {key: value for key, value in debezium.items() if name != "flat" or key != "transaction"}
    return {"debezium": DebeziumSettings(**used)}


def values_of(events: EncodedEvents) -> list[Any]:
    """Parsed values of events; None for a tombstone."""
    return [None if text is None else json.loads(text) for text in events.values.to_pylist()]


def keys_of(events: EncodedEvents) -> list[Any]:
    """Parsed keys of events; None for an event without key."""
    return [None if text is None else json.loads(text) for text in events.keys.to_pylist()]


def one_value(schema: TableSchema, text: str | None, settings: Mapping[str, Any] = {}) -> EncodedEvents:
    """The event of one insert whose second column has this text, in the format `debezium` with schemas."""
    row = log_row("c", key=["1"], after={1: "1", 2: text})
    return format_named("debezium", schemas=True, **settings).encode(changes_of(schema, row))
