"""Streamed transactions (protocol versions 2 to 4): control messages, and conversion to frames of plain transactions.

The server sends a transaction larger than its `logical_decoding_work_mem` while it runs, in blocks from Stream Start to
Stream Stop, with other transactions in between. Inside a block every message but Origin contains the xid of its
(sub)transaction after its type letter. Stream Commit or Stream Abort ends the transaction; a Stream Abort with another
xid rolls back one subtransaction. The reader never enables two-phase messages.
"""
# ruff: noqa: PLR1714, SIM109 - flat code on arrays and bytes

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from cdc.pgoutput.kernel import HEADER, WAL, copy_bytes, kernel
from cdc.pgoutput.message_parser import FrameBatch, malformed
from cdc.pgoutput.word_ops import read_4_bytes

START, STOP, ABORT, COMMIT, RELATION, KEEPALIVE = b"SEAcRk"
"""Kinds of frames. The kind of a `w` frame is the letter of its message; the kind of a keepalive is `k`."""
_TYPE, _INSERT, _UPDATE, _DELETE, _TRUNCATE, _MESSAGE = b"YIUDTM"

_BODY: Final = HEADER + 1
"""Offset in a frame at which the body of the message begins, after its type letter."""
_BODY_AFTER_XID: Final = _BODY + 4
"""Offset in a frame from inside a block at which the body of the message begins, after type letter and xid."""
OID: Final = slice(_BODY, _BODY + 4)
"""Slice of the OID in the frame of a Relation message without xid."""
_START: Final = struct.Struct(">IB")
_ABORT: Final = struct.Struct(">II")
_ABORT_SIZE_PARALLEL: Final = _ABORT.size + 16
"""Size in bytes of a Stream Abort message with the LSN and time that `streaming 'parallel'` adds."""
_COMMIT: Final = struct.Struct(">IB8s8s8s")


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Stream Start: the beginning of a block of one transaction."""

    xid: int
    first: bool
    """True if the block is the first one of the transaction."""


@dataclass(frozen=True, slots=True)
class StreamStop:
    """Stream Stop: the end of the open block."""


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """Stream Abort: rollback of a subtransaction, or of the whole transaction if subxid equals xid."""

    xid: int
    subxid: int


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """Stream Commit: the commit of a streamed transaction."""

    xid: int
    begin: bytes
    """Frame of the Begin message that a plain transaction would have."""
    commit: bytes
    """Frame of the Commit message that a plain transaction would have."""


Control: TypeAlias = StreamStart | StreamStop | StreamAbort | StreamCommit


def kind_set(letters: bytes) -> np.ndarray:
    """Return a set of frame kinds as a boolean array, the form that `next_of` needs."""
    kinds = np.zeros(256, np.bool_)
    kinds[list(letters)] = True
    return kinds


def kind_of(frame: bytes) -> int:
    """Return the kind of a frame: for a `w` frame the letter of its message, otherwise its first byte.

    Returns 0 if the frame is too short.
    """
    if frame[:1] != b"w":
        return frame[0] if frame else 0
    return frame[HEADER] if len(frame) > HEADER else 0


@kernel
def next_of(buffer: np.ndarray, offsets: np.ndarray, at: int, kinds: np.ndarray) -> int:
    """Return the index of the first frame from `at` on whose kind is in the set; the number of frames if none is."""
    for i in range(at, len(offsets) - 1):
        first, size = offsets[i], offsets[i + 1] - offsets[i]
        if size > 0:
            kind = buffer[first]
            if kind == WAL:
                kind = buffer[first + HEADER] if size > HEADER else np.uint8(0)
            if kinds[kind]:
                return i
    return len(offsets) - 1


@kernel
def _unwrap(buffer: np.ndarray, offsets: np.ndarray, aborted: np.ndarray, out: np.ndarray, ends: np.ndarray) -> int:
    """Copy the frames that were not rolled back, without xids, to `out`; return their number.

    The function stores the end of frame i in ends[i + 1].
    """
    count = used = 0
    for i in range(len(offsets) - 1):
        at, end = offsets[i], offsets[i + 1]
        kind = buffer[at + HEADER] if end - at >= _BODY_AFTER_XID and buffer[at] == WAL else np.uint8(0)
        if (
            kind == _INSERT
            or kind == _UPDATE
            or kind == _DELETE
            or kind == RELATION
            or kind == _TYPE
            or kind == _TRUNCATE
            or kind == _MESSAGE
        ):
            xid = read_4_bytes(buffer, at + _BODY)
            low, high = 0, len(aborted)
            while low < high:
                middle = (low + high) // 2
                if aborted[middle] < xid:
                    low = middle + 1
                else:
                    high = middle
            if low < len(aborted) and aborted[low] == xid:
                continue
            copy_bytes(buffer, at, _BODY, out, used)
            used += _BODY
            at += _BODY_AFTER_XID
        copy_bytes(buffer, at, end - at, out, used)
        used += end - at
        count += 1
        ends[count] = used
    return count


def unwrap(frames: FrameBatch, aborted: np.ndarray) -> FrameBatch:
    """Convert the frames of a streamed transaction to frames of a plain transaction.

    `aborted` has the rolled-back subxids (int64, sorted), whose frames are left out. A frame that is too short to
    contain an xid is kept unchanged, so that the decoder reports it.
    """
    out, ends = np.empty(frames.nbytes, np.uint8), np.zeros(len(frames) + 1, np.int64)
    count = _unwrap(*readonly_arrays(frames), aborted, out, ends)
    return FrameBatch(out[: ends[count]], ends[: count + 1])


def xid_and_oid(frame: bytes) -> tuple[int, int]:
    """Return the (sub)xid and the OID of a Relation message inside a block; raises MalformedFrame."""
    if len(frame) < _BODY_AFTER_XID + 4:
        raise malformed(frame, "a Relation message inside a block is too short for xid and OID")
    xid, oid = frame[_BODY:_BODY_AFTER_XID], frame[_BODY_AFTER_XID : _BODY_AFTER_XID + 4]
    return int.from_bytes(xid, "big"), int.from_bytes(oid, "big")


def without_xid(frame: bytes) -> bytes:
    """Return a frame from inside a block without its xid, as the frame of a plain transaction."""
    return frame[:_BODY] + frame[_BODY_AFTER_XID:]


def parse_control(frame: bytes) -> Control:
    """Return the control message in a `w` frame of kind START, STOP, ABORT or COMMIT; raises MalformedFrame."""
    kind, body = kind_of(frame), frame[_BODY:]
    try:
        if kind == START:
            xid, first = _START.unpack(body)
            return StreamStart(xid, bool(first))
        if kind == ABORT:
            xids = body[: _ABORT.size] if len(body) == _ABORT_SIZE_PARALLEL else body
            xid, subxid = _ABORT.unpack(xids)
            return StreamAbort(xid, subxid)
        if kind == COMMIT:
            xid, flags, lsn, end_lsn, time = _COMMIT.unpack(body)
            head, number = frame[:HEADER], xid.to_bytes(4, "big")
            begin, commit = b"B" + lsn + time + number, b"C" + bytes([flags]) + lsn + end_lsn + time
            return StreamCommit(xid, head + begin, head + commit)
    except struct.error:
        raise malformed(frame, f"the stream message has a wrong length, {len(body)} bytes") from None
    if body:
        raise malformed(frame, f"Stream Stop is followed by {len(body)} unexpected bytes")
    return StreamStop()


def readonly_arrays(frames: FrameBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return buffer and offsets as read-only contiguous arrays, the type for which the kernels are compiled."""
    buffer, offsets = np.ascontiguousarray(frames.buffer).view(), np.ascontiguousarray(frames.offsets).view()
    buffer.flags.writeable = offsets.flags.writeable = False
    return buffer, offsets
