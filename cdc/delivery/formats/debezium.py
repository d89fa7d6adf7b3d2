"""Format `debezium`: key and value as Debezium's Postgres connector 3.6 writes them with Kafka's JSON converter.

Differences that come from the log: `lsn` is that of the commit record, because the log has no LSN per change; so
`sequence` begins with null, and `xmin` is null. `total_order` and `data_collection_order` count the events that the
delivery has of a transaction. A row of a copy has `snapshot` = `true`. `ts_ms`, `ts_us` and `ts_ns` of the envelope are
the time of encoding.
"""

from __future__ import annotations

import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DebeziumSettings, DeliverySettings
from cdc.delivery.formats.connect_schema import MESSAGE_KEY, SchemaPair, envelope_schema, message_schema, scalar
from cdc.delivery.formats.contract import EncodedEvents, Headers, LogicalMessages
from cdc.delivery.formats.debezium_rows import NO_SCHEMA, DebeziumTable, JsonPieces, schema_frame
from cdc.delivery.formats.event_rows import (
    JsonRows,
    MessageColumns,
    Refusals,
    SourceNames,
    assemble,
    message_columns,
)
from cdc.delivery.formats.table_changes import TableChanges, TransactionNumbers
from cdc.json_arrays import concatenated, or_null, quote, quoted
from cdc.log_row import Operation
from cdc.table import TableSchema

NEW_KEY: Final = "__debezium.newkey"
"""Header of the delete of a key change: the new key."""
OLD_KEY: Final = "__debezium.oldkey"
"""Header of the create of a key change: the old key."""
CONNECTOR: Final = "postgresql"
Clock = Callable[[], int]
"""Nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class _Table:
    """What is the same in all events of one table under one version of its schema."""

    rows: DebeziumTable
    frame: tuple[str, str]
    """Texts before and after the payload."""


class DebeziumFormat:
    """Encoding as Debezium's envelope."""

    def __init__(self, settings: DeliverySettings, names: SourceNames, clock: Clock = time.time_ns) -> None:
        self._settings: DebeziumSettings = settings.debezium
        self._names = names
        self._clock = clock
        self._tables: dict[tuple[int, str], _Table] = {}
        self._message_frames = self._frames_of_messages()

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table; both rows of a key change must be in the same call."""
        rows = JsonRows(changes.rows)
        table = self._table(changes.schema, changes.topic)
        refusals = Refusals(changes.schema.topic)
        has_new_key = has_old_key(rows)
        keys = table.rows.keys(changes, changes.key, refusals)
        start, end = table.frame
        value = concatenated(
            [
                f'{start}{{"before":',
                *table.rows.before(changes, ~has_new_key, refusals),
                ',"after":',
                *table.rows.after(changes, refusals),
                ',"source":',
                *source_block(rows, self._names, changes.schema),
                ',"transaction":',
                *self._transaction(rows, changes.numbers),
                ',"op":"',
                operations(rows, has_new_key),
                f'"{self._times()}}}{end}',
            ]
        )
        is_delete = rows.is_operation(Operation.DELETE)
        headers = key_change_headers(rows, keys, has_new_key, self._old_keys(table, changes, has_new_key, refusals))
        tombstones = is_delete & keys.is_valid().to_numpy(zero_copy_only=False) if self._settings.tombstones else None
        return assemble((keys, value), rows.is_change(), refusals.found, headers=headers, tombstones=tombstones)

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages."""
        rows = JsonRows(messages.rows)
        columns = message_columns(rows)
        prefixes = or_null(quoted(columns.prefixes))
        (key_start, key_end), (start, end) = self._message_frames
        keys = concatenated([f'{key_start}{{"prefix":', prefixes, f"}}{key_end}"])
        value = concatenated(
            [
                f'{start}{{"op":"m","ts_ms":{self._clock() // 1_000_000},"source":',
                *source_block(rows, self._names, None, columns),
                ',"transaction":',
                *self._transaction(rows, messages.numbers),
                ',"message":{"prefix":',
                prefixes,
                ',"content":',
                self._contents(columns.contents),
                f"}}}}{end}",
            ]
        )
        return assemble((keys, value), np.ones(rows.count, dtype=bool), {})

    def schemas(self, schema: TableSchema, topic: str) -> SchemaPair:
        """Return the schemas of keys and values of a table's events."""
        table = self._table(schema, topic).rows
        return table.key_schema, envelope_schema(topic, table.row_schema)

    def message_schemas(self) -> SchemaPair:
        """Return the schemas of keys and values of logical messages."""
        return MESSAGE_KEY, message_schema(scalar("bytes" if self._settings.bytes == "bytes" else "string"))

    def _table(self, schema: TableSchema, topic: str) -> _Table:
        place = (schema.relation, topic)
        found = self._tables.get(place)
        if found is None or found.rows.schema != schema:
            rows = DebeziumTable(schema, topic, self._settings)
            frame = schema_frame(envelope_schema(topic, rows.row_schema)) if self._settings.schemas else NO_SCHEMA
            found = self._tables[place] = _Table(rows, frame)
        return found

    def _old_keys(
        self, table: _Table, changes: TableChanges, has_new_key: np.ndarray, refusals: Refusals
    ) -> pa.StringArray | None:
        return table.rows.keys(changes, changes.old_key, refusals) if has_new_key.any() else None

    def _transaction(self, rows: JsonRows, numbers: TransactionNumbers | None) -> JsonPieces:
        if not self._settings.transaction or numbers is None:
            return ["null"]
        block = concatenated(
            [
                '{"id":"',
                rows.xids(),
                ":",
                rows.lsns(),
                '","total_order":',
                numbers.total.cast(pa.string()),
                ',"data_collection_order":',
                numbers.in_table.cast(pa.string()),
                "}",
            ]
        )
        return [or_null(block)]

    def _times(self) -> str:
        nanos = self._clock()
        return f',"ts_ms":{nanos // 1_000_000},"ts_us":{nanos // 1000},"ts_ns":{nanos}'

    def _contents(self, contents: pa.BinaryArray) -> pa.StringArray:
        mode = self._settings.bytes
        encode = urlsafe_b64encode if mode == "base64-url-safe" else b64encode
        return pa.array(
            [f'"{content.hex() if mode == "hex" else encode(content).decode()}"' for content in contents.to_pylist()],
            pa.string(),
        )

    def _frames_of_messages(self) -> tuple[tuple[str, str], tuple[str, str]]:
        if not self._settings.schemas:
            return NO_SCHEMA, NO_SCHEMA
        key, value = self.message_schemas()
        return schema_frame(key), schema_frame(value)


def has_old_key(rows: JsonRows) -> np.ndarray:
    """Return for each row whether it is the second row of a key change, which Debezium sends as a create."""
    return rows.array("old_key").is_valid().to_numpy(zero_copy_only=False)


def operations(rows: JsonRows, has_new_key: np.ndarray) -> pa.StringArray:
    """Return the operations as Debezium names them."""
    found = rows.array("op")
    return pc.if_else(pa.array(has_new_key), Operation.CREATE.value, found) if has_new_key.any() else found


def key_change_headers(
    rows: JsonRows, keys: pa.StringArray, has_new_key: np.ndarray, old_keys: pa.StringArray | None
) -> dict[int, Headers]:
    """Return the headers of the events of key changes; old_keys: None if there is no key change."""
    if old_keys is None:
        return {}
    ordinals = rows.array("ordinal").to_numpy()
    positions = rows.array("position").to_numpy()
    is_delete = rows.is_operation(Operation.DELETE)
    headers: dict[int, Headers] = {}
    for index in np.flatnonzero(has_new_key).tolist():
        old_key = old_keys[index].as_py() or ""
        headers[index] = ((OLD_KEY, old_key.encode()),)
        deleted = index - 1
        if (
            index
            and is_delete[deleted]
            and positions[deleted] == positions[index]
            and ordinals[deleted] == ordinals[index] - 1
            and keys[deleted].as_py() == old_key
        ):
            headers[deleted] = ((NEW_KEY, (keys[index].as_py() or "").encode()),)
    return headers


def source_block(
    rows: JsonRows, names: SourceNames, schema: TableSchema | None, message: MessageColumns | None = None
) -> JsonPieces:
    """Return the block `source`. schema: None for logical messages, whose columns are `message`."""
    micros = rows.micros()
    lsns = rows.lsns() if message is None else message.lsns
    xids = rows.xids()
    if message is not None:
        # a message outside of transactions has no transaction id
        xids = or_null(pc.if_else(pc.equal(message.transactional, "false"), None, xids))
    is_read = rows.is_operation(Operation.READ)
    snapshot: pa.Array | str = '"true"' if is_read.all() else '"false"'
    if is_read.any() and not is_read.all():
        snapshot = pc.if_else(pa.array(is_read), '"true"', '"false"')
    return [
        f'{{"version":{quote(names.version)},"connector":"{CONNECTOR}","name":{quote(names.pipeline)},"ts_ms":',
        rows.millis(),
        ',"snapshot":',
        snapshot,
        f',"db":{quote(names.database)},"sequence":"[null,\\"',
        lsns,
        '\\"]","ts_us":',
        micros,
        ',"ts_ns":',
        micros,
        f'000,"schema":{quote(schema.schema if schema else "")},"table":{quote(schema.name if schema else "")},"txId":',
        xids,
        ',"lsn":',
        lsns,
        ',"xmin":null,"origin":null,"origin_lsn":null}',
    ]
