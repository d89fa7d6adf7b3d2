"""Events of a decoder: decoded rows, relations to define, DDL messages, watermarks and signals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc.log_row import DDL_PREFIX, SIGNAL_PREFIX, WATERMARK_PREFIX
from cdc.pgoutput.messages import Relation
from cdc.position import Position

EVENT_PREFIXES: Final = frozenset({DDL_PREFIX, SIGNAL_PREFIX, WATERMARK_PREFIX})
"""Prefixes of logical messages that can have an event."""
OwnMessages = Callable[[str, bytes], bool]
"""Function of the prefix, one of EVENT_PREFIXES, and the content of a message: False if the message has no event.

Every role that can connect can write such a message. An event ends a batch of rows, so messages of others would slow
the reader.
"""


def every_message(_prefix: str, _content: bytes) -> bool:
    """Return True: each message with a prefix of cdc has an event."""
    return True


@dataclass(frozen=True, slots=True)
class RelationSeen:
    """Event: the next row or truncate needs a relation that is not defined yet; contains its latest Relation message.

    The consumer must call `define` or `ignore` for the OID before it takes the next event. The decoder then decodes the
    row or truncate. If the consumer has called neither, the decoder raises UnknownRelation.
    """

    relation: Relation
    position: Position
    """Position of the open transaction."""
    xid: int


@dataclass(frozen=True, slots=True)
class DdlSeen:
    """Event: a DDL message of the event trigger at the source arrived; the consumer may call `announce`."""

    content: bytes
    """Content, which `cdc.postgres.ddl_messages` validates and parses."""


@dataclass(frozen=True, slots=True)
class WatermarkSeen:
    """Event: a watermark arrived in a transaction; the consumer may now insert rows and call `leave_room` for them."""

    content: bytes
    """Content, which identifies the watermark; every role can write such a message, so validate it."""
    position: Position
    ordinal: int
    """Ordinal of the transaction's next row."""
    xid: int
    committed_at: int
    """Commit time of the transaction in microseconds UTC."""


@dataclass(frozen=True, slots=True)
class SignalSeen:
    """Event: a signal message arrived, inside or outside a transaction.

    The decoder yields a signal before the DecodedRows that completes its transaction. So a consumer that stores the
    signal at once stores it before the transaction is committed to the log.
    """

    content: bytes
    """Content of the signal; every role can write such a message, so validate it."""
    position: Position
    """Position of the message; it is the same when the server sends the message again."""
    ordinal: int
    """Ordinal of the transaction's next row, which orders signals of one transaction; 0 outside a transaction."""


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Event: log rows in WAL order, with the number of rows that belong to committed transactions."""

    rows: pa.RecordBatch
    """Rows with LOG_SCHEMA; may be empty."""
    complete: int
    """Number of leading rows that belong to committed transactions; the other rows belong to the open transaction.

    If `last` is set, all rows of earlier DecodedRows belong to committed transactions as well."""
    last: Position | None
    """Position of the last commit among these rows, including commits of empty transactions; None without a commit."""
    committed_at: int
    """Time of the last commit in microseconds UTC since 1970; 0 without a commit."""
    transactions: int
    """Number of commits among these rows, including those of empty transactions."""
    copied: bool = False
    """True if the rows come from a copy instead of the stream."""

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes, without reserved but unused memory."""
        return int(self.rows.nbytes if self.copied else self.rows.get_total_buffer_size())


@dataclass(slots=True)
class OpenTransaction:
    """A transaction between Begin and Commit."""

    position: Position
    xid: int
    committed_at: int
    dropped: bool
    """True if the log already contains the transaction, so that its rows are skipped."""
    ordinal: int = 0
    """Ordinal of the next row of the transaction."""
