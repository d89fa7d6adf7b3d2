"""ColumnarDecoder: decodes frames to log rows with the compiled kernel, without a Python object per change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from cdc.errors import SourceError, UnknownRelation
from cdc.log_row import DDL_PREFIX, OWN_PREFIXES, SIGNAL_PREFIX, WATERMARK_PREFIX, Operation
from cdc.logical_message import message_key
from cdc.pgoutput import kernel
from cdc.pgoutput.decoder_events import (
    EVENT_PREFIXES,
    DdlSeen,
    DecodedRows,
    OwnMessages,
    RelationSeen,
    SignalSeen,
    WatermarkSeen,
    every_message,
)
from cdc.pgoutput.kernel_arrays import IGNORED, TupleLayout, pack_layouts, with_layout, without_layout
from cdc.pgoutput.message_parser import FrameBatch, malformed, parse_frame
from cdc.pgoutput.messages import (
    AnyMessage,
    BeginMessage,
    CommitMessage,
    Delete,
    Insert,
    Keepalive,
    Message,
    Relation,
    Truncate,
    Update,
    row_oids,
)
from cdc.pgoutput.reference_decoder import expand
from cdc.pgoutput.row_buffers import Capacity, RowBuffers, new_state, new_values
from cdc.position import Position
from cdc.table import TableSchema

Event: TypeAlias = DecodedRows | RelationSeen | DdlSeen | WatermarkSeen | SignalSeen | Keepalive

_NONE: Final = -1


class ColumnarDecoder:
    """Decoder of one replication session, from its first frame on. Not thread-safe; not usable after an error.

    The decoder drops transactions at or below the position `after`: they yield no rows, and DecodedRows does not count
    them. A batch of frames may end anywhere, even inside a transaction.
    """

    def __init__(self, *, epoch: int = 0, after: Position = Position(0)) -> None:  # noqa: B008 - an int
        self._state = new_state()
        self._state[kernel.EPOCH] = Position.of(0, epoch).epoch
        self._state[kernel.AFTER] = after
        self._state[kernel.LAST] = _NONE
        self._buffers = RowBuffers(self._state, Capacity())
        self.takes: OwnMessages = every_message
        """Whether a message with a prefix of cdc has an event; set by the consumer."""
        self._layouts: dict[int, TupleLayout] = {}
        self._undefined: dict[int, Relation] = {}
        self._announced: dict[int, TableSchema] = {}
        self._topics: dict[str, int] = {}
        self._names = pa.array([], pa.string())
        self._packed = pack_layouts([])
        self._old, self._new = new_values(0), new_values(0)

    @property
    def in_transaction(self) -> bool:
        """True if the frames so far end inside a transaction, even if the decoder drops it."""
        return bool(self._state[kernel.OPEN])

    def define(self, schema: TableSchema, *, announce: bool) -> None:
        """Decode the following tuples of schema.oid with the columns `schema.sent`, in that order.

        With `announce` the decoder also writes an `s` row, a log row that contains the schema version. The row gets the
        next ordinal of the open transaction. Without an open transaction, or inside a dropped one, the row waits for
        the next transaction that is not dropped. A later version of the same relation replaces a waiting row.

        Raises ValueError if a key column is not sent.
        """
        self._set_layout(TupleLayout.of(schema))
        if announce:
            self.announce(schema)

    def announce(self, schema: TableSchema) -> None:
        """Write an `s` row, as `define` does, for a schema version without a Relation message.

        The decoder still decodes tuples with the columns of the last Relation message; only topic and key may change.
        """
        self._announced[schema.relation] = schema
        if self._state[kernel.OPEN] and not self._state[kernel.DROPPED]:
            self._announce()
        self._state[kernel.ANNOUNCING] = bool(self._announced)
        before = self._layouts.get(schema.oid)
        if before is not None and before.relation != IGNORED and before.ids == tuple(c.id for c in schema.sent):
            self._set_layout(TupleLayout.of(schema))

    def ignore(self, oid: int) -> None:
        """Skip the following rows of this OID, whose table is published but not captured."""
        self._set_layout(TupleLayout.ignored(oid))

    def skip_to(self, position: Position) -> None:
        """Raise the position up to which transactions are dropped. Call this method only between transactions."""
        self._state[kernel.AFTER] = max(int(self._state[kernel.AFTER]), position)

    def leave_room(self, rows: int) -> None:
        """Reserve ordinals for rows that the consumer inserts into the open transaction at the current event."""
        self._state[kernel.ORDINAL] += rows

    def decode(self, frames: FrameBatch) -> Iterator[Event]:
        """Yield the events of the frames in WAL order.

        Every keepalive that requests a reply is an event. A keepalive without a request is an event only if no other
        keepalive follows in `frames`; it is then the last event.

        A Relation message is stored and invalidates the definition of its OID. RelationSeen is yielded only when a
        change or truncate first needs the message. The reason: under publish_via_partition_root the walsender also
        describes leaf partitions, of which it sends no rows.

        DecodedRows is yielded when enough rows for one batch are pending, for example 16 MiB of values. It is yielded
        before a DdlSeen, a WatermarkSeen and a keepalive that requests a reply, if rows or transactions are pending. It
        is yielded at the end if a `w` frame was consumed since the last DecodedRows. Raises MalformedFrame or
        UnknownRelation after yielding the events before the error.
        """
        buffer, offsets = _readonly(frames.buffer), _readonly(frames.offsets)
        state, keepalive = self._state, None
        state[kernel.CURSOR] = state[kernel.MOVED] = 0
        while (stop := self._walk(buffer, offsets)) != kernel.DONE:
            if stop == kernel.FULL:
                yield self._flush()
            if stop != kernel.OTHER:
                continue
            frame = frames[int(state[kernel.CURSOR])]
            try:
                message = parse_frame(frame)
                if seen := self._needed(message):
                    yield seen
                    continue
                state[kernel.CURSOR] += 1
                if not isinstance(message, Keepalive):
                    state[kernel.MOVED] = 1
                    self._handle(frame, message)
                    if isinstance(message, Message) and (event := self._message_event(message)):
                        if not isinstance(event, SignalSeen):
                            yield from self._flushed()
                        yield event
                elif message.reply_requested:
                    yield from self._flushed()
                    keepalive = None
                    yield message
                else:
                    keepalive = message
            except SourceError:
                yield from self._flushed()
                raise
        if self._pending or state[kernel.MOVED]:
            yield self._flush()
        if keepalive:
            yield keepalive

    @property
    def _pending(self) -> bool:
        return bool(self._state[kernel.ROWS] or self._state[kernel.TRANSACTIONS])

    def _walk(self, buffer: np.ndarray, offsets: np.ndarray) -> int:
        state = self._state
        stop = kernel.walk(buffer, offsets, state, self._buffers.rows, self._packed, self._old, self._new)
        if stop == kernel.GROW:
            self._buffers.grow(*map(int, state[kernel.NEED_VALUES : kernel.NEED_COLUMNS + 1]))
        if stop == kernel.ANNOUNCE:
            self._announce()
            state[kernel.ANNOUNCING] = 0
        return int(stop)

    def _set_layout(self, layout: TupleLayout) -> None:
        self._layouts[layout.oid] = layout
        self._packed = with_layout(self._packed, layout, self._topic(layout.topic))
        if len(layout.ids) > len(self._old.kind):
            self._old, self._new = new_values(len(layout.ids)), new_values(len(layout.ids))

    def _topic(self, name: str) -> int:
        return self._topics.setdefault(name, len(self._topics))

    def _flushed(self) -> Iterator[DecodedRows]:
        if self._pending:
            yield self._flush()

    def _flush(self) -> DecodedRows:
        state = self._state
        if len(self._names) != len(self._topics):
            self._names = pa.array(list(self._topics), pa.string())
        last = int(state[kernel.LAST])
        decoded = DecodedRows(
            self._buffers.take(self._names),
            int(state[kernel.COMPLETE]),
            None if last == _NONE else Position(last),
            int(state[kernel.LAST_COMMITTED_AT]),
            int(state[kernel.TRANSACTIONS]),
        )
        self._buffers = RowBuffers.like(state, self._buffers)
        for place in (kernel.ROWS, kernel.COMPLETE, kernel.TRANSACTIONS, kernel.LAST_COMMITTED_AT, kernel.MOVED):
            state[place] = 0
        state[kernel.LAST] = _NONE
        return decoded

    def _needed(self, message: AnyMessage) -> RelationSeen | None:
        if not self.in_transaction or self._state[kernel.DROPPED]:
            return None
        for oid in row_oids(message):
            if oid not in self._layouts and (relation := self._undefined.pop(oid, None)) is not None:
                position, xid = self._state[kernel.POSITION], self._state[kernel.XID]
                return RelationSeen(relation, Position(int(position)), int(xid))
        return None

    def _store_relation(self, message: Relation) -> None:
        if self._layouts.pop(message.oid, None) is not None:
            self._packed = without_layout(self._packed, message.oid)
        self._undefined[message.oid] = message

    def _announce(self) -> None:
        for schema in self._announced.values():
            self._buffers.control(Operation.SCHEMA, schema.relation, self._topic(schema.topic), schema.to_json())
        self._announced.clear()

    def _handle(self, frame: bytes, message: AnyMessage) -> None:
        """Handle a frame that the kernel does not handle: relations, truncates, logical messages, malformed frames."""
        match message:
            case Relation():
                self._store_relation(message)
            case Truncate():
                self._require_transaction(frame)
                self._truncate(message)
            case Message():
                self._message(frame, message)
            case BeginMessage():
                raise malformed(frame, "a transaction begins inside another transaction")
            case CommitMessage():
                self._require_transaction(frame)
                expected = Position(int(self._state[kernel.POSITION]))
                raise malformed(frame, f"expected the commit of {expected}, got {message.lsn}")
            case Insert() | Update() | Delete():
                self._require_transaction(frame)
                expand(frame, message, self._layout(message.oid))
                raise malformed(frame, "the change is larger than 1 GiB")

    def _require_transaction(self, frame: bytes) -> None:
        if not self.in_transaction:
            raise malformed(frame, "the message is outside a transaction")

    def _layout(self, oid: int) -> TupleLayout:
        if (layout := self._layouts.get(oid)) is None:
            raise UnknownRelation(f"relation {oid} is unknown: expected a Relation message before its rows")
        return layout

    def _truncate(self, message: Truncate) -> None:
        for layout in [] if self._state[kernel.DROPPED] else [self._layout(oid) for oid in message.oids]:
            if layout.relation != IGNORED:
                self._buffers.control(Operation.TRUNCATE, layout.relation, self._topic(layout.topic), None)

    def _message_event(self, message: Message) -> DdlSeen | WatermarkSeen | SignalSeen | None:
        """Return the event of a logical message that cdc uses; None for other messages and in dropped transactions."""
        state = self._state
        # POSITION is that of the open transaction, or that of a message outside transactions
        if state[kernel.POSITION] <= state[kernel.AFTER]:
            return None
        position, ordinal = Position(int(state[kernel.POSITION])), int(state[kernel.ORDINAL])
        if message.prefix not in EVENT_PREFIXES or not self.takes(message.prefix, message.content):
            return None
        if message.prefix == SIGNAL_PREFIX:
            return SignalSeen(message.content, position, ordinal)
        if not message.transactional:
            return None
        if message.prefix == DDL_PREFIX:
            return DdlSeen(message.content)
        if message.prefix != WATERMARK_PREFIX:
            return None
        xid, committed_at = int(state[kernel.XID]), int(state[kernel.COMMITTED_AT])
        return WatermarkSeen(message.content, position, ordinal, xid, committed_at)

    def _message(self, frame: bytes, message: Message) -> None:
        state = self._state
        if message.transactional:
            self._require_transaction(frame)
            dropped = bool(state[kernel.DROPPED])
        elif self.in_transaction:
            raise malformed(frame, "a non-transactional message is inside a transaction")
        else:
            # its LSN can equal that of the next commit record, so its position is one byte before
            position = Position.of(message.lsn - 1, int(state[kernel.EPOCH]))
            state[kernel.POSITION], state[kernel.XID], state[kernel.ORDINAL] = position, 0, 0
            state[kernel.COMMITTED_AT] = message.sent_at
            dropped = position <= state[kernel.AFTER]
        if dropped:
            return
        if message.prefix not in OWN_PREFIXES:
            key = message_key(message.prefix, message.lsn, transactional=message.transactional)
            self._buffers.message(key, message.content)
        if not message.transactional:
            state[kernel.COMPLETE] = state[kernel.ROWS]
            state[kernel.TRANSACTIONS] += 1
            state[kernel.LAST] = state[kernel.POSITION]
            state[kernel.LAST_COMMITTED_AT] = message.sent_at


def _readonly(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of the array; for a writable array numba would compile the kernel again."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
