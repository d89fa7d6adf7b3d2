"""ReferenceDecoder: the readable specification of how messages become rows of the log.

`ColumnarDecoder` does the same without an object per change. Property tests compare the two decoders. If the kernel of
`ColumnarDecoder` rejects a row, that decoder calls `expand` of this module for the error message.

Rules of the images (the tests name them):
- The key of an insert or update comes from the new tuple, the key of a delete from the old tuple.
- A value that is missing in the new tuple comes from the old tuple, if the old tuple contains it. An old row `O`
  contains every column. An old key `K` contains only the key columns; its nulls in other columns have no meaning.
- An update that changes the key becomes two rows: `d` with the old key, then `u` with the new key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from cdc.errors import SourceError, UnknownRelation
from cdc.log_row import DDL_PREFIX, LOG_SCHEMA, OWN_PREFIXES, SIGNAL_PREFIX, WATERMARK_PREFIX, Operation
from cdc.logical_message import message_key
from cdc.pgoutput.decoder_events import (
    EVENT_PREFIXES,
    DdlSeen,
    DecodedRows,
    OpenTransaction,
    OwnMessages,
    RelationSeen,
    SignalSeen,
    WatermarkSeen,
    every_message,
)
from cdc.pgoutput.kernel_arrays import IGNORED, TupleLayout
from cdc.pgoutput.message_parser import HEADER, FrameBatch, malformed, parse_frame
from cdc.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    BeginMessage,
    CommitMessage,
    Delete,
    Insert,
    Keepalive,
    Message,
    OldKind,
    OldTuple,
    Relation,
    Truncate,
    Update,
    Value,
    Values,
    row_oids,
)
from cdc.position import Position
from cdc.table import TableSchema

VALUE_LIMIT: Final = 16 << 20
"""The decoder yields its pending rows as DecodedRows when their values have about this many bytes."""

Image = dict[int, str | None]
Event = DecodedRows | RelationSeen | DdlSeen | WatermarkSeen | SignalSeen | Keepalive


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImage:
    """Operation, key and row images of one log row; an attribute is None where the column of the row is null."""

    op: Operation
    key: list[str | None] | None
    old_key: list[str | None] | None = None
    before: Image | None = None
    after: Image | None = None
    partial: bool = False


def expand(frame: bytes, message: Insert | Update | Delete, layout: TupleLayout) -> list[RowImage]:
    """Return the one or two log rows of a change; raises MalformedFrame if the tuples do not match the layout."""
    old = None if isinstance(message, Insert) else message.old
    new = None if isinstance(message, Delete) else message.new
    for values in (old.values if old else None, new):
        if values is not None and len(values) != len(layout.ids):
            raise malformed(frame, f"expected {len(layout.ids)} columns of {layout.topic!r}, got {len(values)}")
    before = _before(old, layout) if old else None
    old_key = _key(frame, old.values, layout) if old else None
    if new is None:
        return [RowImage(op=Operation.DELETE, key=old_key, before=before)]
    new = _completed(new, old, layout) if old else new
    key, after = _key(frame, new, layout), _image(new, layout)
    partial = len(after) < len(layout.ids)
    if isinstance(message, Insert):
        return [RowImage(op=Operation.CREATE, key=key, after=after, partial=partial)]
    if old is None or old_key == key:
        return [RowImage(op=Operation.UPDATE, key=key, before=before, after=after, partial=partial)]
    return [
        RowImage(op=Operation.DELETE, key=old_key, before=before),
        RowImage(op=Operation.UPDATE, key=key, old_key=old_key, before=before, after=after, partial=partial),
    ]


def _has_value(old: OldTuple, place: int, layout: TupleLayout) -> bool:
    return old.kind is OldKind.ROW or place in layout.key


def _before(old: OldTuple, layout: TupleLayout) -> Image:
    shown = (value if _has_value(old, place, layout) else UNCHANGED for place, value in enumerate(old.values))
    return _image(tuple(shown), layout)


def _completed(new: Values, old: OldTuple, layout: TupleLayout) -> Values:
    def value(place: int) -> Value:
        use_old = new[place] is UNCHANGED and _has_value(old, place, layout)
        return old.values[place] if use_old else new[place]

    return tuple(value(place) for place in range(len(new)))


def _image(values: Values, layout: TupleLayout) -> Image:
    return {column: value for column, value in zip(layout.ids, values, strict=True) if value is not UNCHANGED}


def _key(frame: bytes, values: Values, layout: TupleLayout) -> list[str | None] | None:
    key = [value for place in layout.key if (value := values[place]) is not UNCHANGED]
    if len(key) < len(layout.key):
        raise malformed(frame, f"a key column of {layout.topic!r} was not sent")
    return key or None


@dataclass(slots=True)
class _Pending:
    """Log rows and finished transactions since the decoder last yielded DecodedRows."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    nbytes: int = 0
    complete: int = 0
    last: Position | None = None
    committed_at: int = 0
    transactions: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.transactions)

    def finish(self, position: Position, committed_at: int) -> None:
        self.complete = len(self.rows)
        self.last, self.committed_at = position, committed_at
        self.transactions += 1

    def decoded(self) -> DecodedRows:
        rows = pa.RecordBatch.from_pylist(self.rows, schema=LOG_SCHEMA)
        return DecodedRows(rows, self.complete, self.last, self.committed_at, self.transactions)


class ReferenceDecoder:
    """Slow decoder with the interface of ColumnarDecoder and a Python object per change; not usable after an error."""

    def __init__(self, *, epoch: int = 0, after: Position = Position(0)) -> None:  # noqa: B008 - an int
        self._epoch, self._after = Position.of(0, epoch).epoch, after
        self.takes: OwnMessages = every_message
        """Whether a message with a prefix of cdc has an event; set by the consumer."""
        self._layouts: dict[int, TupleLayout] = {}
        self._undefined: dict[int, Relation] = {}
        self._announced: dict[int, TableSchema] = {}
        self._open: OpenTransaction | None = None
        self._pending = _Pending()
        self._moved = False

    @property
    def in_transaction(self) -> bool:
        """True if the frames so far end inside a transaction, even if the decoder drops it."""
        return self._open is not None

    def define(self, schema: TableSchema, *, announce: bool) -> None:
        """See ColumnarDecoder.define."""
        self._layouts[schema.oid] = TupleLayout.of(schema)
        if announce:
            self.announce(schema)

    def announce(self, schema: TableSchema) -> None:
        """See ColumnarDecoder.announce."""
        self._announced[schema.relation] = schema
        self._announce()
        before = self._layouts.get(schema.oid)
        if before is not None and before.relation != IGNORED and before.ids == tuple(c.id for c in schema.sent):
            self._layouts[schema.oid] = TupleLayout.of(schema)

    def ignore(self, oid: int) -> None:
        """See ColumnarDecoder.ignore."""
        self._layouts[oid] = TupleLayout.ignored(oid)

    def leave_room(self, rows: int) -> None:
        """See ColumnarDecoder.leave_room."""
        assert self._open is not None  # noqa: S101 - between events of an open transaction
        self._open.ordinal += rows

    def decode(self, frames: FrameBatch) -> Iterator[Event]:
        """See ColumnarDecoder.decode."""
        self._moved, keepalive = False, None
        for frame in frames:
            try:
                message = None if self._skips(frame) else parse_frame(frame)
                if not isinstance(message, Keepalive):
                    yield from self._step(frame, message)
                elif message.reply_requested:
                    yield from self._flushed()
                    keepalive = None
                    yield message
                else:
                    keepalive = message
            except SourceError:
                yield from self._flushed()
                raise
        if self._pending or self._moved:
            yield self._flush()
        if keepalive:
            yield keepalive

    def _step(self, frame: bytes, message: AnyMessage | None) -> Iterator[Event]:
        while message is not None and (seen := self._needed(message)) is not None:
            yield seen
            message = None if self._skips(frame) else message
        self._moved = True
        if message is not None:
            self._handle(frame, message)
        if isinstance(message, Message) and (event := self._message_event(message)):
            if not isinstance(event, SignalSeen):
                yield from self._flushed()
            yield event
        if self._pending.nbytes >= VALUE_LIMIT:
            yield self._flush()

    def _flushed(self) -> Iterator[DecodedRows]:
        if self._pending:
            yield self._flush()

    def _flush(self) -> DecodedRows:
        self._moved = False
        pending, self._pending = self._pending, _Pending()
        return pending.decoded()

    def _skips(self, frame: bytes) -> bool:
        """Return True if the frame is a change of a dropped transaction or of an ignored relation."""
        if self._open is None or frame[:1] != b"w" or frame[HEADER : HEADER + 1] not in {b"I", b"U", b"D"}:
            return False
        oid = int.from_bytes(frame[HEADER + 1 : HEADER + 5], "big")
        layout = self._layouts.get(oid) if len(frame) > HEADER + 5 else None
        return self._open.dropped or (layout is not None and layout.relation == IGNORED)

    def _needed(self, message: AnyMessage) -> RelationSeen | None:
        if self._open is None or self._open.dropped:
            return None
        for oid in row_oids(message):
            if oid not in self._layouts and (relation := self._undefined.pop(oid, None)) is not None:
                return RelationSeen(relation, self._open.position, self._open.xid)
        return None

    def _handle(self, frame: bytes, message: AnyMessage) -> None:
        handle = _HANDLERS.get(type(message))  # Origin and Type have no handler: no row depends on them
        if handle is not None:
            handle(self, frame, message)

    def _relation(self, _: bytes, message: Relation) -> None:
        self._layouts.pop(message.oid, None)
        self._undefined[message.oid] = message

    def _begin(self, frame: bytes, message: BeginMessage) -> None:
        if self._open:
            raise malformed(frame, "a transaction begins inside another transaction")
        position = Position.of(message.final_lsn, self._epoch)
        dropped = position <= self._after
        self._open = OpenTransaction(position, message.xid, message.committed_at, dropped)
        self._announce()

    def _commit(self, frame: bytes, message: CommitMessage) -> None:
        transaction = self._transaction(frame)
        if message.lsn != transaction.position.lsn:
            raise malformed(frame, f"expected the commit of {transaction.position}, got {message.lsn}")
        if not transaction.dropped:
            self._pending.finish(transaction.position, transaction.committed_at)
        self._open = None

    def _transaction(self, frame: bytes) -> OpenTransaction:
        if self._open is None:
            raise malformed(frame, "the message is outside a transaction")
        return self._open

    def _announce(self) -> None:
        if self._open and not self._open.dropped:
            for schema in self._announced.values():
                self._row(op=Operation.SCHEMA, relation=schema.relation, topic=schema.topic, payload=schema.to_json())
            self._announced.clear()

    def _change(self, frame: bytes, message: Insert | Update | Delete) -> None:
        self._transaction(frame)
        layout = self._layout(message.oid)
        for image in expand(frame, message, layout):
            self._row(
                op=image.op,
                relation=layout.relation,
                topic=layout.topic,
                key=image.key,
                old_key=image.old_key,
                before=_items(image.before),
                after=_items(image.after),
                partial=image.partial,
            )
        self._pending.nbytes += len(frame)

    def _truncate(self, frame: bytes, message: Truncate) -> None:
        transaction = self._transaction(frame)
        for layout in [] if transaction.dropped else [self._layout(oid) for oid in message.oids]:
            if layout.relation != IGNORED:
                self._row(op=Operation.TRUNCATE, relation=layout.relation, topic=layout.topic)

    def _message_event(self, message: Message) -> DdlSeen | WatermarkSeen | SignalSeen | None:
        transaction = self._open or self._own_transaction(message)
        if transaction.dropped or not self._is_taken(message):
            return None
        if message.prefix == SIGNAL_PREFIX:
            return SignalSeen(message.content, transaction.position, transaction.ordinal)
        if not message.transactional:
            return None
        if message.prefix == DDL_PREFIX:
            return DdlSeen(message.content)
        if message.prefix != WATERMARK_PREFIX:
            return None
        return WatermarkSeen(
            message.content, transaction.position, transaction.ordinal, transaction.xid, transaction.committed_at
        )

    def _is_taken(self, message: Message) -> bool:
        return message.prefix in EVENT_PREFIXES and self.takes(message.prefix, message.content)

    def _message(self, frame: bytes, message: Message) -> None:
        if message.transactional:
            transaction = self._transaction(frame)
        elif self._open:
            raise malformed(frame, "a non-transactional message is inside a transaction")
        else:
            transaction = self._own_transaction(message)
        if transaction.dropped:
            return
        if message.prefix not in OWN_PREFIXES:
            key = message_key(message.prefix, message.lsn, transactional=message.transactional)
            self._row(transaction, op=Operation.MESSAGE, key=key, payload=message.content)
        if not message.transactional:
            self._pending.finish(transaction.position, transaction.committed_at)

    def _own_transaction(self, message: Message) -> OpenTransaction:
        """Return a transaction that contains only this non-transactional message.

        The transaction's LSN is the LSN of the message minus 1, because the next commit record can have the same LSN as
        the message.
        """
        position = Position.of(message.lsn - 1, self._epoch)
        return OpenTransaction(position, 0, message.sent_at, position <= self._after)

    def _layout(self, oid: int) -> TupleLayout:
        if (layout := self._layouts.get(oid)) is None:
            raise UnknownRelation(f"relation {oid} is unknown: expected a Relation message before its rows")
        return layout

    def _row(self, transaction: OpenTransaction | None = None, **columns: Any) -> None:
        transaction = transaction or self._open
        assert transaction is not None  # noqa: S101 - every caller has checked
        self._pending.rows.append(
            {
                "position": int(transaction.position),
                "ordinal": transaction.ordinal,
                "xid": transaction.xid,
                "committed_at": transaction.committed_at,
                "partial": False,
                **columns,
            }
        )
        transaction.ordinal += 1


def _items(image: Image | None) -> list[tuple[int, str | None]] | None:
    return None if image is None else list(image.items())


_HANDLERS: Final[dict[type, Callable[[ReferenceDecoder, bytes, Any], None]]] = {
    Relation: ReferenceDecoder._relation,  # noqa: SLF001 - the class's own table
    BeginMessage: ReferenceDecoder._begin,  # noqa: SLF001
    CommitMessage: ReferenceDecoder._commit,  # noqa: SLF001
    Insert: ReferenceDecoder._change,  # noqa: SLF001
    Update: ReferenceDecoder._change,  # noqa: SLF001
    Delete: ReferenceDecoder._change,  # noqa: SLF001
    Truncate: ReferenceDecoder._truncate,  # noqa: SLF001
    Message: ReferenceDecoder._message,  # noqa: SLF001
}
