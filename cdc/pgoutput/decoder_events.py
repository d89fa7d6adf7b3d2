"""Events of a decoder: decoded rows, relations to define, DDL messages, watermarks and signals."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cdc.pgoutput.messages import Relation
from cdc.position import Position


@dataclass(frozen=True, slots=True)
class RelationSeen:
    """The latest Relation message of an OID, before the first row or truncate that needs it.

    The consumer must call `define` or `ignore` for the OID before it resumes the iterator, which then decodes the same
    frame again. Otherwise the iterator raises UnknownRelation.
    """

    relation: Relation
    position: Position
    """Position of the open transaction."""


@dataclass(frozen=True, slots=True)
class DdlSeen:
    """A DDL message of the event trigger in the source; the consumer may call `announce`."""

    content: bytes
    """See `cdc.postgres.logical_messages`; every role can write such a message, so validate it."""


@dataclass(frozen=True, slots=True)
class WatermarkSeen:
    """A watermark inside a transaction; the consumer may insert rows here, and reserves ordinals by `leave_room`."""

    content: bytes
    """Identifies the watermark; every role can write such a message, so validate it."""
    position: Position
    ordinal: int
    """Ordinal of the transaction's next row."""
    xid: int
    committed_at: int
    """Microseconds UTC."""


@dataclass(frozen=True, slots=True)
class SignalSeen:
    """A signal message, inside or outside a transaction.

    It is yielded before the DecodedRows whose `last` is its position, so a consumer that stores it first loses none.
    """

    content: bytes
    """Content of the signal; every role can write such a message, so validate it."""
    position: Position
    """Position of the message; the same when the server sends it again."""
    ordinal: int
    """Ordinal of the transaction's next row, which orders signals of one transaction; 0 outside a transaction."""


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows in WAL order, and how many of them belong to complete transactions."""

    rows: pa.RecordBatch
    """Rows with LOG_SCHEMA; may be empty."""
    complete: int
    """The first `complete` rows belong to committed transactions, and so do all rows of earlier DecodedRows that were
    still open; the others belong to the transaction that is open now."""
    last: Position | None
    """Position of the last commit in these rows, also of an empty transaction; None without a commit."""
    committed_at: int
    """Time of that commit, microseconds UTC since 1970; 0 if none."""
    transactions: int
    """Number of commits in these rows, including empty transactions."""
    copied: bool = False
    """Whether the rows come from a copy instead of the stream."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the rows; a copy reserves more than it uses, which is not counted."""
        return int(self.rows.nbytes if self.copied else self.rows.get_total_buffer_size())


@dataclass(slots=True)
class OpenTransaction:
    """A transaction between Begin and Commit."""

    position: Position
    xid: int
    committed_at: int
    dropped: bool
    """Whether the log already contains it, so that its rows are skipped."""
    ordinal: int = 0
    """Ordinal of the next row."""
