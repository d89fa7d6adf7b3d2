"""A small pgoutput encoder: messages to frames, written from the manual and apart from the parsers."""

from __future__ import annotations

import struct

from cdc.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    BeginMessage,
    CommitMessage,
    Delete,
    Insert,
    Keepalive,
    Message,
    OldTuple,
    OriginMessage,
    Relation,
    Truncate,
    Type,
    Update,
    Values,
)

POSTGRES_EPOCH = 946_684_800_000_000
WAL = struct.pack(">cQQq", b"w", 0, 0, 0)
"""The head of a frame that carries a message."""


def frame(message: AnyMessage, *, sent_at: int = POSTGRES_EPOCH) -> bytes:
    """The CopyData payload that carries message."""
    time = sent_at - POSTGRES_EPOCH
    if isinstance(message, Keepalive):
        return struct.pack(">cQqB", b"k", message.wal_end, time, message.reply_requested)
    if isinstance(message, Message):
        time = message.sent_at - POSTGRES_EPOCH
    return struct.pack(">cQQq", b"w", 0, 0, time) + body(message)


def placed_frame(message: AnyMessage) -> bytes:
    """The same with the header's WAL position, as a server sends it where it repeats an LSN of the message."""
    whole = frame(message)
    if not isinstance(message, CommitMessage | Message):
        return whole
    place = message.end_lsn if isinstance(message, CommitMessage) else message.lsn
    return whole[:1] + struct.pack(">QQ", place, place) + whole[17:]


def body(message: AnyMessage) -> bytes:  # noqa: PLR0911, C901 - one line per message
    """The message alone."""
    match message:
        case BeginMessage(lsn, committed_at, xid):
            return struct.pack(">cQqI", b"B", lsn, committed_at - POSTGRES_EPOCH, xid)
        case CommitMessage(lsn, end_lsn, committed_at):
            return struct.pack(">cBQQq", b"C", 0, lsn, end_lsn, committed_at - POSTGRES_EPOCH)
        case Relation():
            return _relation(message)
        case Insert(oid, new):
            return struct.pack(">cI", b"I", oid) + b"N" + _tuple(new)
        case Update(oid, old, new):
            return struct.pack(">cI", b"U", oid) + (_old(old) if old else b"") + b"N" + _tuple(new)
        case Delete(oid, old):
            return struct.pack(">cI", b"D", oid) + _old(old)
        case Truncate(oids, cascade, restart_identity):
            options = cascade | restart_identity << 1
            return struct.pack(f">cIB{len(oids)}I", b"T", len(oids), options, *oids)
        case Message(transactional, lsn, prefix, content, _):
            return struct.pack(">cBQ", b"M", transactional, lsn) + _name(prefix) + _sized(content)
        case OriginMessage(lsn, name):
            return struct.pack(">cQ", b"O", lsn) + _name(name)
        case Type(oid, schema, name):
            return struct.pack(">cI", b"Y", oid) + _name(schema) + _name(name)
    raise TypeError(message)


def stream_start(xid: int, *, first: bool) -> bytes:
    """The frame that opens a block."""
    return WAL + struct.pack(">cIB", b"S", xid, first)


def stream_stop() -> bytes:
    """The frame that closes it."""
    return WAL + b"E"


def stream_abort(xid: int, subxid: int, *, told: bool) -> bytes:
    """The frame that takes a (sub)transaction back; told under `streaming 'parallel'`: with LSN and time."""
    return WAL + struct.pack(">cII", b"A", xid, subxid) + (struct.pack(">Qq", 77, 99) if told else b"")


def stream_commit(xid: int, lsn: int, end_lsn: int, committed_at: int) -> bytes:
    """The frame that ends a streamed transaction."""
    return WAL + struct.pack(">cIBQQq", b"c", xid, 0, lsn, end_lsn, committed_at - POSTGRES_EPOCH)


def in_block(xid: int, message: AnyMessage) -> bytes:
    """The frame of message inside a block, as part of the (sub)transaction xid."""
    plain = frame(message)
    if isinstance(message, Keepalive | OriginMessage):
        return plain
    return plain[: len(WAL) + 1] + struct.pack(">I", xid) + plain[len(WAL) + 1 :]


def _relation(message: Relation) -> bytes:
    names = _name(message.schema) + _name(message.name) + message.replica_identity.encode()
    columns = b"".join(
        struct.pack(">B", column.key) + _name(column.name) + struct.pack(">Ii", column.type_oid, column.typmod)
        for column in message.columns
    )
    return struct.pack(">cI", b"R", message.oid) + names + struct.pack(">H", len(message.columns)) + columns


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


def _sized(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def _old(old: OldTuple) -> bytes:
    return old.kind.value.encode() + _tuple(old.values)


def _tuple(values: Values) -> bytes:
    def one(value: object) -> bytes:
        if value is UNCHANGED:
            return b"u"
        return b"n" if value is None else b"t" + _sized(str(value).encode())

    return struct.pack(">H", len(values)) + b"".join(map(one, values))
