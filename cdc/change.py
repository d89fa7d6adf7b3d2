"""Operation and the log row: the one Arrow schema that reader, log and sinks share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa


class Operation(StrEnum):
    """What a log row says; the letters are Debezium's, `s` and `g` are ours."""

    #: A row was inserted.
    CREATE = "c"
    #: A row was updated, or moved here from another key (then `old_key` is set).
    UPDATE = "u"
    #: A row was deleted, or moved away from this key.
    DELETE = "d"
    #: A row was read by a snapshot, a backfill or a resync.
    READ = "r"
    #: Every older row of the relation is gone.
    TRUNCATE = "t"
    #: A logical message.
    MESSAGE = "m"
    #: A version of the relation's schema; the payload is TableSchema.to_json.
    SCHEMA = "s"
    #: A full copy of the relation is complete: every row older than the payload's position is gone.
    GENERATION = "g"


ROW_OPERATIONS: Final = frozenset({Operation.CREATE, Operation.UPDATE, Operation.DELETE, Operation.READ})
"""Operations that carry a row image; the others are control rows."""

_TEXTS: Final = pa.list_(pa.field("element", pa.string()))
_IMAGE: Final = pa.map_(pa.int32(), pa.string())

LOG_SCHEMA: Final = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        # null only for a message, which belongs to no table
        pa.field("relation", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("op", pa.string(), nullable=False),
        pa.field("key", _TEXTS),
        pa.field("old_key", _TEXTS),
        pa.field("before", _IMAGE),
        pa.field("after", _IMAGE),
        pa.field("partial", pa.bool_(), nullable=False),
        pa.field("payload", pa.binary()),
        pa.field("address", pa.string()),
    ]
)
"""A log row without `segment`, which is the partition value of its file.

An image is column id → text as Postgres sent it. A column absent from the map was not sent; a null
value is SQL NULL. Units: positions as `Position`, `committed_at` in microseconds UTC.
"""

HEARTBEAT_PREFIX: Final = "cdc.heartbeat"
"""Logical messages with this prefix move the log's position and leave no row."""
DDL_PREFIX: Final = "cdc.ddl"
"""Transactional messages with this prefix come from the event trigger in the source and become `s` rows, not `m`."""
WATERMARK_PREFIX: Final = "cdc.watermark"
"""Transactional messages with this prefix mark the place of rows that were read beside the stream; they leave none."""
SIGNAL_PREFIX: Final = "cdc.signal"
"""Messages with this prefix ask the reader for something, in Debezium's words; they leave no row."""
OWN_PREFIXES: Final = frozenset({HEARTBEAT_PREFIX, DDL_PREFIX, WATERMARK_PREFIX, SIGNAL_PREFIX})
"""Of the messages that are no messages of an application."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Where a row stands: its transaction, and the order inside."""

    position: int
    ordinal: int
    xid: int
    committed_at: int
    """Microseconds UTC."""


def control_row(
    place: RowOrder, operation: Operation, relation: int, topic: str, payload: bytes | None = None
) -> pa.RecordBatch:
    """One row of LOG_SCHEMA that says something of a relation and carries no image: `s`, `g` or `t`."""
    row: dict[str, Any] = dict.fromkeys(LOG_SCHEMA.names) | {
        "position": place.position,
        "ordinal": place.ordinal,
        "xid": place.xid,
        "committed_at": place.committed_at,
        "relation": relation,
        "topic": topic,
        "op": operation.value,
        "partial": False,
        "payload": payload,
    }
    return pa.RecordBatch.from_pylist([row], LOG_SCHEMA)
