"""A rewriter of replication streams for a proxy: frame by frame, by a random script that a seed repeats."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

Frame = bytes
Script = Callable[[Frame], Frame]
"""One CopyData payload of a replication stream -> what goes to the client in its place."""

HEADER: Final = 25
"""Bytes of a `w` frame before the letter of its message."""
FAR: Final = 0xFFFFF_FFFF0000
"""An LSN that fits a position, and which no server reaches."""
SHARES: Final = {b"k": 0.9, b"B": 0.03, b"C": 0.03, b"M": 0.03, b"S": 0.03, b"E": 0.03, b"A": 0.03, b"c": 0.1}
ROWS_SHARE: Final = 0.004
"""Of the frames of a kind that are changed: about every second session finds a lie, the others get on."""
_HEAD: Final = struct.Struct(">cI")
_LSN: Final = struct.Struct(">Q")
_LSNS: Final = {b"k": (1,), b"w": (1, 9)}
_LSNS_OF_MESSAGE: Final = {b"B": (26,), b"C": (27, 35), b"M": (27,), b"c": (31, 39)}
_FLAGS_OF_MESSAGE: Final = {b"C": (26,), b"M": (26,), b"c": (30,), b"S": (30,)}
_TIMES_OF_MESSAGE: Final = {b"B": (34,), b"C": (43,), b"c": (47,)}


def kind_of(frame: Frame) -> bytes:
    """The letter of the message, or of a frame without one."""
    return frame[HEADER : HEADER + 1] if frame[:1] == b"w" else frame[:1]


def with_lsn(frame: Frame, place: int, lsn: int) -> Frame:
    """The frame with another LSN at the place."""
    return frame[:place] + _LSN.pack(lsn % 2**64) + frame[place + 8 :]


def lsn_at(frame: Frame, place: int) -> int:
    """The LSN there."""
    return int(_LSN.unpack_from(frame, place)[0])


class StreamRewriter:
    """For one connection: whole messages of the protocol go out, CopyData of a replication stream by the script."""

    def __init__(self, script: Script) -> None:
        self._script, self._buffer = script, b""
        self._begun = self._replicates = False

    def __call__(self, piece: bytes) -> bytes:
        """What of the stream can go on now."""
        self._buffer += piece
        passed = []
        if not self._begun and self._buffer[:1] == b"N":  # the answer to a request for encryption has no length
            passed, self._buffer = [b"N"], self._buffer[1:]
        while len(self._buffer) >= _HEAD.size:
            self._begun = True
            kind, size = _HEAD.unpack_from(self._buffer)
            if len(self._buffer) < 1 + size:
                break
            body, self._buffer = self._buffer[_HEAD.size : 1 + size], self._buffer[1 + size :]
            self._replicates = self._replicates or kind == b"W"
            if kind == b"d" and self._replicates:
                body = self._script(body)
            passed.append(_HEAD.pack(kind, len(body) + 4) + body)
        return b"".join(passed)


class Liar:
    """A script that changes one field of some of the frames: an LSN, a time, a flag or a length."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._seen = [FAR]
        self.changed: Counter[str] = Counter()
        """Frames that were changed, by the letter of their message."""

    def __call__(self, frame: Frame) -> Frame:
        """Change it, or not."""
        self._seen = [*self._seen[-50:], lsn_at(frame, 1)]
        kind = kind_of(frame)
        if self._random.random() >= SHARES.get(kind, ROWS_SHARE):
            return frame
        lies: list[Callable[[Frame, bytes], Frame]] = [self._lsn, self._lsn, self._time]
        if kind == b"k" or kind in _FLAGS_OF_MESSAGE:
            lies.append(self._flag)
        if kind == b"M":
            lies.append(self._length)
        changed = self._random.choice(lies)(frame, kind)
        self.changed[kind.decode()] += changed != frame
        return changed

    def _lsn(self, frame: Frame, kind: bytes) -> Frame:
        places = [*_LSNS[frame[:1]], *_LSNS_OF_MESSAGE.get(kind, ()) * 2]
        place = self._random.choice(places)
        return with_lsn(frame, place, self._false_lsn(lsn_at(frame, place)))

    def _false_lsn(self, true: int) -> int:
        random = self._random
        return random.choice([
            0, 1, FAR, 2**63, 2**64 - 1, random.choice(self._seen), random.randrange(2**52),
            true + random.randrange(1, 64), true - random.randrange(1, 64), true + random.randrange(2**16),
            true - random.randrange(2**16), true + 2 ** random.randrange(52),
        ])  # fmt: skip

    def _time(self, frame: Frame, kind: bytes) -> Frame:
        place = self._random.choice([9 if kind == b"k" else 17, *_TIMES_OF_MESSAGE.get(kind, ())])
        return with_lsn(frame, place, self._random.choice([0, 2**63, self._random.randrange(2**60)]))

    def _flag(self, frame: Frame, kind: bytes) -> Frame:
        place = 17 if kind == b"k" else _FLAGS_OF_MESSAGE[kind][0]
        return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]

    def _length(self, frame: Frame, _kind: bytes) -> Frame:
        place = frame.index(b"\0", 35) + 1
        size = int.from_bytes(frame[place : place + 4], "big") + self._random.choice([-1, 1, 2**20, 2**31])
        return frame[:place] + (size % 2**32).to_bytes(4, "big") + frame[place + 4 :]
