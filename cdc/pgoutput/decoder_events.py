"""What a decoder yields: rows with the transactions that ended in them, and relations it needs defined."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cdc.pgoutput.messages import Relation
from cdc.position import Position


@dataclass(frozen=True, slots=True)
class RelationSeen:
    """The latest Relation message of an OID, at the first row or truncate of a kept transaction that needs it.

    The consumer calls `define` (or `ignore`) for the OID before it resumes the iterator, which then decodes
    the same frame again; otherwise that raises UnknownRelation.
    """

    relation: Relation
    position: Position
    """Of the open transaction."""


@dataclass(frozen=True, slots=True)
class DdlSeen:
    """What the event trigger in the source says at this place of a kept transaction; the consumer may `announce`."""

    content: bytes
    """See `cdc.postgres.ddl_messages`; anybody can write such a message, so it may be anything."""


@dataclass(frozen=True, slots=True)
class WatermarkSeen:
    """A watermark inside a kept transaction; the consumer may put rows here, and tells the decoder how many."""

    content: bytes
    """Which one; anybody can write such a message, so it may be anything."""
    position: Position
    ordinal: int
    """Of the next row of the transaction."""
    xid: int
    committed_at: int
    """Microseconds UTC."""


@dataclass(frozen=True, slots=True)
class SignalSeen:
    """A signal, inside a kept transaction or outside of all.

    It comes before any Decoded whose `last` is at its position: a consumer that keeps it first loses none.
    """

    content: bytes
    """Which one; anybody can write such a message, so it may be anything."""
    position: Position
    """The same whenever the message comes again."""
    ordinal: int
    """Of the next row of the transaction: the order of signals inside; 0 outside."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows in WAL order, and how many of them are whole transactions."""

    rows: pa.RecordBatch
    """LOG_SCHEMA; may be empty."""
    complete: int
    """The first `complete` rows belong to finished transactions, as do all rows of earlier Decoded
    that were still open; the rest belongs to the transaction that is open now."""
    last: Position | None
    """Of the last transaction finished in this Decoded, with rows or without; None if none finished."""
    committed_at: int
    """Of that transaction, microseconds UTC since 1970; 0 if none."""
    transactions: int
    """Finished in this Decoded, empty ones counted."""
    copied: bool = False
    """The rows were read beside the stream."""

    @property
    def nbytes(self) -> int:
        """Of memory that the rows hold; a copy makes room for more of them, and never touches it."""
        return int(self.rows.nbytes if self.copied else self.rows.get_total_buffer_size())


@dataclass(slots=True)
class OpenTransaction:
    """Between Begin and Commit."""

    position: Position
    xid: int
    committed_at: int
    dropped: bool
    """Already in the log: its rows are not looked at."""
    ordinal: int = 0
    """Of the next row."""
