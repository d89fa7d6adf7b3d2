"""Frames of the replication stream: batches of frames, and the parser of one frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Self

import numpy as np

from cdc.errors import MalformedFrame
from cdc.lsn import Lsn
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
    OriginMessage,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
    Value,
    Values,
)
from cdc.position import LSN_BITS

POSTGRES_EPOCH: Final = 946_684_800_000_000
"""2000-01-01 UTC in microseconds since 1970; times in the replication protocol begin at 2000-01-01."""
HEADER: Final = 25
"""Number of bytes of a `w` frame before its message: the letter, start and end of WAL, send time."""
KEEPALIVE_SIZE: Final = 18
"""Number of bytes of a `k` frame, which is shorter than every `w` frame."""
_HEX_BYTES: Final = 32
"""Number of bytes of a malformed frame that an error shows: header and start of the message, but no row value."""
_TIMES: Final = range(-62_135_596_800_000_000, 253_402_300_800_000_000)
"""Microseconds since 1970 in the years 1 to 9999, the range that readers of the log support."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """A batch of whole `w` and `k` frames in the order of the stream, without a Python object per frame."""

    buffer: np.ndarray
    """uint8, C-contiguous: the bytes of all frames."""
    offsets: np.ndarray
    """int64, number of frames + 1 entries; frame i is `buffer[offsets[i]:offsets[i + 1]]`."""

    @classmethod
    def of(cls, frames: Sequence[bytes]) -> Self:
        """Return a batch of the given frames; copies their bytes once."""
        offsets = np.zeros(len(frames) + 1, np.int64)
        np.cumsum([len(frame) for frame in frames], out=offsets[1:])
        return cls(np.frombuffer(b"".join(frames), np.uint8), offsets)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all frames."""
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def ends_with_keepalive(self) -> bool:
        """True if the last frame is a keepalive: usually the server has then sent all of its WAL."""
        return len(self) > 0 and bool(self.buffer[self.offsets[-2]] == ord("k"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"no frame has this index: expected 0 to {len(self) - 1}, got {index}")
        return self.buffer[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))


def malformed(frame: bytes, reason: str) -> MalformedFrame:
    """Return the error for a frame that violates the protocol; the text shows LSN and first 32 bytes of the frame."""
    lsn = Lsn(int.from_bytes(frame[1:9], "big"))
    return MalformedFrame(f"malformed frame at {lsn}: {reason}; frame starts with '{frame[:_HEX_BYTES].hex()}'")


def parse_frame(frame: bytes) -> AnyMessage:
    """Parse one `w` or `k` frame; raises MalformedFrame for any other frame and for trailing bytes."""
    cursor = _Cursor(frame)
    letter = cursor.letter()
    if letter == "k":
        message: AnyMessage = _keepalive(cursor)
    elif letter == "w":
        cursor.skip(HEADER - 1)
        kind = cursor.letter()
        if (read := _READERS.get(kind)) is None:
            cursor.fail(f"unknown message {kind!r}")
        message = read(cursor)
    else:
        cursor.fail(f"expected 'w' or 'k', got {letter!r}")
    cursor.end()
    return message


class _Cursor:
    """A read position in one frame; every read advances it and fails at the frame's end."""

    __slots__ = ("_at", "_frame")

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._at = 0

    def fail(self, reason: str) -> NoReturn:
        raise malformed(self._frame, reason)

    def take(self, count: int) -> bytes:
        start = self._at
        if count < 0 or start + count > len(self._frame):
            self.fail(f"expected {count} bytes at offset {start}, got {len(self._frame) - start}")
        self._at = start + count
        return self._frame[start : self._at]

    def skip(self, count: int) -> None:
        self.take(count)

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def signed(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big", signed=True)

    def letter(self) -> str:
        return self.take(1).decode("latin-1")

    def lsn(self) -> Lsn:
        return Lsn(self.unsigned(8))

    def time(self) -> int:
        since_1970 = self.signed(8) + POSTGRES_EPOCH
        if since_1970 not in _TIMES:
            self.fail("time out of range: expected the years 1 to 9999")
        return since_1970

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # an error with the cause would show the value
            raise malformed(self._frame, f"text that ends at offset {self._at} is not UTF-8") from None

    def name(self) -> str:
        end = self._frame.find(b"\0", self._at)
        if end < 0:
            self.fail(f"string at offset {self._at} has no terminating zero byte")
        raw = self.take(end - self._at)
        self.skip(1)
        return self.text(raw)

    def sent_at(self) -> int:
        """Return the send time in the frame's header, in microseconds since 1970."""
        since_2000 = int.from_bytes(self._frame[HEADER - 8 : HEADER], "big", signed=True)
        if since_2000 + POSTGRES_EPOCH not in _TIMES:
            self.fail("time out of range: expected the years 1 to 9999")
        return since_2000 + POSTGRES_EPOCH

    def end(self) -> None:
        if self._at != len(self._frame):
            self.fail(f"{len(self._frame) - self._at} unexpected bytes after the end of the message")


def _keepalive(cursor: _Cursor) -> Keepalive:
    wal_end = cursor.lsn()
    cursor.skip(8)
    return Keepalive(wal_end, cursor.unsigned(1) != 0)


def _begin(cursor: _Cursor) -> BeginMessage:
    final_lsn = cursor.lsn()
    if final_lsn >> LSN_BITS:
        cursor.fail(f"commit lsn does not fit a position: {final_lsn}")
    return BeginMessage(final_lsn, cursor.time(), cursor.unsigned(4))


def _commit(cursor: _Cursor) -> CommitMessage:
    cursor.skip(1)  # flags, unused
    return CommitMessage(cursor.lsn(), cursor.lsn(), cursor.time())


def _origin(cursor: _Cursor) -> OriginMessage:
    return OriginMessage(cursor.lsn(), cursor.name())


def _relation(cursor: _Cursor) -> Relation:
    oid, schema, name = cursor.unsigned(4), cursor.name(), cursor.name()
    identity = cursor.letter()
    columns = tuple(_relation_column(cursor) for _ in range(cursor.unsigned(2)))
    return Relation(oid, schema, name, identity, columns)


def _relation_column(cursor: _Cursor) -> RelationColumn:
    flags, name = cursor.unsigned(1), cursor.name()
    return RelationColumn(name, cursor.unsigned(4), cursor.signed(4), bool(flags & 1))


def _type(cursor: _Cursor) -> Type:
    return Type(cursor.unsigned(4), cursor.name(), cursor.name())


def _insert(cursor: _Cursor) -> Insert:
    oid, mark = cursor.unsigned(4), cursor.letter()
    if mark != "N":
        cursor.fail(f"expected a new tuple 'N', got {mark!r}")
    return Insert(oid, _tuple(cursor))


def _update(cursor: _Cursor) -> Update:
    oid, mark, old = cursor.unsigned(4), cursor.letter(), None
    if mark in "KO":
        old = OldTuple(OldKind(mark), _tuple(cursor))
        mark = cursor.letter()
    if mark != "N":
        cursor.fail(f"expected a new tuple 'N', got {mark!r}")
    return Update(oid, old, _tuple(cursor))


def _delete(cursor: _Cursor) -> Delete:
    oid, mark = cursor.unsigned(4), cursor.letter()
    if mark not in "KO":
        cursor.fail(f"expected an old tuple 'K' or 'O', got {mark!r}")
    return Delete(oid, OldTuple(OldKind(mark), _tuple(cursor)))


def _tuple(cursor: _Cursor) -> Values:
    return tuple(_value(cursor) for _ in range(cursor.unsigned(2)))


def _value(cursor: _Cursor) -> Value:
    kind = cursor.letter()
    if kind == "t":
        return cursor.text(cursor.take(cursor.signed(4)))
    if kind not in "nu":
        cursor.fail(f"expected a value of kind 't', 'n' or 'u', got {kind!r}")
    return UNCHANGED if kind == "u" else None


def _truncate(cursor: _Cursor) -> Truncate:
    count, options = cursor.unsigned(4), cursor.unsigned(1)
    oids = cursor.take(count * 4)
    return Truncate(
        tuple(int.from_bytes(oids[at : at + 4], "big") for at in range(0, len(oids), 4)),
        cascade=bool(options & 1),
        restart_identity=bool(options & 2),
    )


def _message(cursor: _Cursor) -> Message:
    transactional, lsn, prefix = bool(cursor.unsigned(1) & 1), cursor.lsn(), cursor.name()
    if not transactional and not 0 < lsn <= 1 << LSN_BITS:
        cursor.fail(f"message lsn does not fit a position: {lsn}")
    return Message(transactional, lsn, prefix, cursor.take(cursor.signed(4)), cursor.sent_at())


_READERS: Final[dict[str, Callable[[_Cursor], AnyMessage]]] = {
    "B": _begin,
    "C": _commit,
    "D": _delete,
    "I": _insert,
    "M": _message,
    "O": _origin,
    "R": _relation,
    "T": _truncate,
    "U": _update,
    "Y": _type,
}
