"""Format `flat`: only the row, as Debezium's transformation ExtractNewRecordState writes it.

The transformation has `delete.tombstone.handling.mode` = `rewrite-with-tombstone`, or `rewrite` if
`debezium.tombstones` is off, and `add.fields` = `op,lsn,source.ts_ms`. Values are those of the format `debezium`.
ExtractNewRecordState drops truncates; here they are refused, because no change may be lost without notice.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.formats.connect_schema import ConnectSchema, SchemaPair, optional
from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.debezium import Clock, DebeziumFormat, has_old_key, key_change_headers, operations
from cdc.delivery.formats.debezium_rows import NO_SCHEMA, DebeziumTable, schema_frame
from cdc.delivery.formats.event_rows import JsonRows, Refusals, SourceNames, assemble
from cdc.delivery.formats.table_changes import TableChanges
from cdc.json_arrays import concatenated
from cdc.log_row import Operation
from cdc.table import TableSchema

ADDED: Final = (
    ("__deleted", optional("string")),
    ("__op", optional("string")),
    ("__lsn", optional("int64")),
    ("__source_ts_ms", optional("int64")),
)
"""Fields that are added to each row: (name, schema) pairs."""
_FIRST_NUMBER: Final = 10_001
"""Number of the first added field in Protobuf; columns have lower ones."""


class FlatFormat:
    """Encoding as rows; logical messages are encoded as in the format `debezium`."""

    def __init__(self, settings: DeliverySettings, names: SourceNames, clock: Clock = time.time_ns) -> None:
        self._settings = settings.debezium
        self._messages = DebeziumFormat(settings, names, clock)
        self._tables: dict[tuple[int, str], tuple[DebeziumTable, tuple[str, str]]] = {}

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table; both rows of a key change must be in the same call."""
        rows = JsonRows(changes.rows)
        table, (start, end) = self._table(changes.schema, changes.topic)
        refusals = Refusals(changes.schema.topic)
        refusals.add_changes(rows.is_operation(Operation.TRUNCATE), "the format 'flat' has no event for a truncate")
        has_new_key = has_old_key(rows)
        is_delete = rows.is_operation(Operation.DELETE)
        keys = table.keys(changes, changes.key, refusals)
        row = table.rows(changes, refusals)
        value = concatenated(
            [
                start,
                *row,
                f'{"," if changes.columns else ""}"__deleted":"',
                pc.if_else(pa.array(is_delete), "true", "false"),
                '","__op":"',
                operations(rows, has_new_key),
                '","__lsn":',
                rows.lsns(),
                ',"__source_ts_ms":',
                rows.millis(),
                f"}}{end}",
            ]
        )
        old_keys = table.keys(changes, changes.old_key, refusals) if has_new_key.any() else None
        headers = key_change_headers(rows, keys, has_new_key, old_keys)
        tombstones = is_delete & keys.is_valid().to_numpy(zero_copy_only=False) if self._settings.tombstones else None
        return assemble((keys, value), rows.is_change(), refusals.found, headers=headers, tombstones=tombstones)

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages."""
        return self._messages.encode_messages(messages)

    def schemas(self, schema: TableSchema, topic: str) -> SchemaPair:
        """Return the schemas of keys and values of a table's events."""
        table, _ = self._table(schema, topic)
        return table.key_schema, flat_schema(table.row_schema)

    def message_schemas(self) -> SchemaPair:
        """Return the schemas of keys and values of logical messages."""
        return self._messages.message_schemas()

    def _table(self, schema: TableSchema, topic: str) -> tuple[DebeziumTable, tuple[str, str]]:
        place = (schema.relation, topic)
        found = self._tables.get(place)
        if found is None or found[0].schema != schema:
            table = DebeziumTable(schema, topic, self._settings)
            frame = schema_frame(flat_schema(table.row_schema)) if self._settings.schemas else NO_SCHEMA
            found = self._tables[place] = (table, frame)
        return found


def flat_schema(row: ConnectSchema) -> ConnectSchema:
    """Return the schema of a row with the added fields."""
    added = ((name, replace(one, number=_FIRST_NUMBER + place)) for place, (name, one) in enumerate(ADDED))
    return replace(row, fields=(*row.fields, *added))
