"""Arrow schema and operation codes of log rows; reader, log and sinks share them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa


class Operation(StrEnum):
    """Operation code of a log row, as in Debezium; `s` and `g` are additions of cdc."""

    #: A row was inserted.
    CREATE = "c"
    #: A row was updated; if `old_key` is set, the update changed the key from `old_key` to `key`.
    UPDATE = "u"
    #: A row was deleted, or an update changed its key; then an UPDATE row with the new key follows.
    DELETE = "d"
    #: A row was read by a snapshot, a backfill or a resync.
    READ = "r"
    #: The table was truncated: all older rows of the relation are deleted.
    TRUNCATE = "t"
    #: A logical message.
    MESSAGE = "m"
    #: A version of the relation's schema; the payload is the result of TableSchema.to_json.
    SCHEMA = "s"
    #: A full copy of the relation is complete: rows older than the position in the payload are deleted.
    GENERATION = "g"


ROW_OPERATIONS: Final = frozenset({Operation.CREATE, Operation.UPDATE, Operation.DELETE, Operation.READ})
"""Operations of log rows with a row image; log rows with another operation are control rows."""

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
        # of a message: its prefix, kind and LSN; see LogicalMessage
        pa.field("key", _TEXTS),
        pa.field("old_key", _TEXTS),
        pa.field("before", _IMAGE),
        pa.field("after", _IMAGE),
        pa.field("partial", pa.bool_(), nullable=False),
        pa.field("payload", pa.binary()),
        pa.field("address", pa.string()),
    ]
)
"""Arrow schema of a log row, without the partition column `segment`.

A row image maps column ids to the text that Postgres sent. A column id that is missing in the map is an unsent column;
a null value is SQL NULL. `position` is the integer of a `Position`; `committed_at` is in microseconds UTC.
"""

_ABSENT: Final = {field.name: pa.nulls(1, field.type) for field in LOG_SCHEMA}
"""One null per column."""

HEARTBEAT_PREFIX: Final = "cdc.heartbeat"
"""Prefix of logical messages that advance the durable position; the log gets no row for them."""
DDL_PREFIX: Final = "cdc.ddl"
"""Prefix of transactional messages from the event trigger at the source; they become `s` rows, not `m` rows."""
WATERMARK_PREFIX: Final = "cdc.watermark"
"""Prefix of transactional messages that close a watermark window; the log gets no row for them."""
SIGNAL_PREFIX: Final = "cdc.signal"
"""Prefix of messages that are signals to the reader, in Debezium's format; the log gets no row for them."""
OWN_PREFIXES: Final = frozenset({HEARTBEAT_PREFIX, DDL_PREFIX, WATERMARK_PREFIX, SIGNAL_PREFIX})
"""Prefixes of the logical messages that cdc itself uses; applications use other prefixes."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Columns that place a row in the log: position, xid and commit time of its transaction, and the row's ordinal."""

    position: int
    ordinal: int
    xid: int
    committed_at: int
    """Commit time of the transaction in microseconds UTC."""


def generation_payload(began: int) -> bytes:
    """Return the payload of a `g` row: the position at which the full copy began."""
    return str(int(began)).encode()


def control_row(
    order: RowOrder, operation: Operation, relation: int, topic: str, payload: bytes | None = None
) -> pa.RecordBatch:
    """Return one row of LOG_SCHEMA without a row image: an `s`, `g` or `t` row of a relation."""
    row: dict[str, Any] = {
        "position": order.position,
        "ordinal": order.ordinal,
        "xid": order.xid,
        "committed_at": order.committed_at,
        "relation": relation,
        "topic": topic,
        "op": operation.value,
        "partial": False,
        "payload": payload,
    }
    # twice as fast as RecordBatch.from_pylist; a first copy makes two such rows for each table
    columns = [
        pa.array([row[field.name]], field.type) if field.name in row else _ABSENT[field.name] for field in LOG_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)
