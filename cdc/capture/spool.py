"""Spool: transactions that the server streams while they run wait on disk, raw, until they commit.

Stands before the decoder, which so sees whole and plain transactions only, each at the place of its commit. What is
kept per transaction is an unnamed file and the subxids that were rolled back, four bytes each: memory does not grow
with its rows, and a process that dies leaves nothing behind. The server sends an unfinished transaction again, for what
was confirmed lies before its end.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final, NamedTuple

import numpy as np

from cdc.errors import LogUnwritable
from cdc.failpoint import hit
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.parse import malformed
from cdc.pgoutput.streamed import (
    ABORT,
    COMMIT,
    KEEPALIVE,
    OID,
    RELATION,
    START,
    STOP,
    StreamAbort,
    StreamCommit,
    StreamStart,
    kind_of,
    kind_set,
    next_of,
    parse_control,
    readonly_arrays,
    unwrap,
    without_xid,
    xid_and_oid,
)

BATCH: Final = 4 << 20
"""Bytes at least that are replayed at once, as much as one receive gives."""

_CONTROLS: Final = bytes([START, STOP, ABORT, COMMIT])
_QUIET: Final = kind_set(_CONTROLS)
_BETWEEN: Final = kind_set(_CONTROLS + bytes([RELATION]))
_INSIDE: Final = kind_set(_CONTROLS + bytes([RELATION, KEEPALIVE]))


class _SpooledRelation(NamedTuple):
    """One Relation message of a streamed transaction."""

    order: int
    """Of arrival, over all transactions."""
    subxid: int
    frame: bytes
    """Made plain."""


@dataclass(slots=True)
class _SpooledTransaction:
    """One transaction on disk: runs of frames, each as count, offsets (int64) and bytes."""

    xid: int
    file: IO[bytes]
    nbytes: int = 0
    _aborted: array[int] = field(default_factory=lambda: array("I"))
    _described: dict[int, list[_SpooledRelation]] = field(default_factory=lambda: defaultdict(list))
    """By OID the Relation messages that may become the last one, in order of arrival."""
    _describers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The OIDs in it by subxid."""

    def append(self, frames: FrameBatch) -> None:
        """Add a run of frames; it is with the operating system when this returns."""
        offsets = frames.offsets - frames.offsets[0]
        self.file.write(np.int64(len(frames)).tobytes() + offsets.tobytes())
        self.file.write(frames.buffer[frames.offsets[0] : frames.offsets[-1]].data)
        self.file.flush()
        self.nbytes += frames.nbytes

    def describe(self, oid: int, note: _SpooledRelation, elsewhere: int) -> None:
        """Note a Relation message; `elsewhere` is when the last one of the OID came outside of this transaction.

        Every rollback makes the server repeat them all. A repetition goes without a note: a rollback that takes the
        earlier one back, of a subtransaction that is running still, would take the later one with it.
        """
        notes = self._described[oid]
        if notes and notes[-1].frame == note.frame and notes[-1].order > elsewhere:
            return
        notes.append(note)
        self._describers[note.subxid].add(oid)

    def roll_back(self, subxid: int) -> None:
        """Leave the rows and descriptions of a subtransaction out of the replay."""
        self._aborted.append(subxid)
        for oid in self._describers.pop(subxid, ()):
            self._described[oid] = [note for note in self._described[oid] if note.subxid != subxid]

    @property
    def aborted(self) -> np.ndarray:
        """Subxids that were rolled back, int64, sorted."""
        return np.unique(np.array(self._aborted, np.int64))

    def runs(self) -> Iterator[FrameBatch]:
        """The frames in order, joined into batches of BATCH or one run more."""
        self.file.seek(0)
        buffers: list[np.ndarray] = []
        offsets, used = [np.zeros(1, np.int64)], 0
        while head := self.file.read(8):
            ends = np.frombuffer(self._read(8 * (int.from_bytes(head, "little") + 1)), np.int64)[1:]
            buffers.append(np.frombuffer(self._read(int(ends[-1])), np.uint8))
            offsets.append(ends + used)
            used += int(ends[-1])
            if used >= BATCH:
                yield FrameBatch(np.concatenate(buffers), np.concatenate(offsets))
                buffers, offsets, used = [], [np.zeros(1, np.int64)], 0
        if buffers:
            yield FrameBatch(np.concatenate(buffers), np.concatenate(offsets))

    def surviving(self) -> dict[int, _SpooledRelation]:
        """By OID the last Relation that was not rolled back."""
        return {oid: notes[-1] for oid, notes in self._described.items() if notes}

    def close(self) -> None:
        """Give the space back."""
        with suppress(OSError):  # closing writes what did not fit before
            self.file.close()

    def _read(self, size: int) -> bytes:
        if len(found := self.file.read(size)) < size:
            raise OSError(f"the spool of transaction {self.xid} is shorter than what was written to it")
        return found


class Spool:
    """Turns the stream of one replication session into whole, plain transactions; after an error it is spent.

    Relation messages of a streamed transaction are replayed with it, so one that is rolled back leaves nothing in the
    decoder. The server, though, remembers what it sent last: if another transaction described the same relation
    later than the replayed one, that description is given out again behind it.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._streams: dict[int, _SpooledTransaction] = {}
        self._inside: _SpooledTransaction | None = None
        self._known: dict[int, tuple[int, bytes]] = {}
        self._arrived = 0
        self.is_replaying = False
        """Whether what whole() gives out just now is part of a streamed transaction."""

    @property
    def nbytes(self) -> int:
        """Bytes of frames that wait for their transactions' end."""
        return sum(stream.nbytes for stream in self._streams.values())

    def whole(self, frames: FrameBatch) -> Iterator[FrameBatch]:
        """Frames of protocol version 1, in the order of the commits; keepalives pass at once.

        Any split of the stream into whole frames gives the same. Raises MalformedFrame, and LogUnwritable when the
        disk is full.
        """
        buffer, offsets = readonly_arrays(frames)
        start = at = 0
        while (at := next_of(buffer, offsets, at, self._marked)) < len(frames):
            frame = frames[at]
            if kind_of(frame) == RELATION:
                self._note(frame)
                at += 1
                continue
            yield from self._pass(frames, start, at)
            if kind_of(frame) == KEEPALIVE:
                yield _slice_frames(frames, at, at + 1)
            else:
                yield from self._turn(frame)
            start = at = at + 1
        yield from self._pass(frames, start, at)

    def close(self) -> None:
        """Drop everything."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    @property
    def _marked(self) -> np.ndarray:
        if self._inside:
            return _INSIDE
        return _BETWEEN if self._streams else _QUIET

    def _pass(self, frames: FrameBatch, start: int, stop: int) -> Iterator[FrameBatch]:
        if start == stop:
            return
        run = _slice_frames(frames, start, stop)
        if self._inside is None:
            yield run
            return
        with self._disk():
            self._inside.append(run)
        hit("mid_spool")

    def _turn(self, frame: bytes) -> Iterator[FrameBatch]:
        control = parse_control(frame)
        if (self._inside is not None) != (kind_of(frame) == STOP):
            raise malformed(frame, "a stream message that is out of place")
        match control:
            case StreamStart():
                self._inside = self._entered(frame, control)
            case StreamAbort():
                self._abort(control)
            case StreamCommit():
                yield from self._replay(frame, control)
            case _:
                self._inside = None

    def _entered(self, frame: bytes, start: StreamStart) -> _SpooledTransaction:
        if start.first == (start.xid in self._streams):
            raise malformed(frame, f"a block of transaction {start.xid} that is out of order")
        if start.first:
            with self._disk():
                self._streams[start.xid] = _SpooledTransaction(start.xid, TemporaryFile(dir=self._directory))  # noqa: SIM115 - lives until the end
        return self._streams[start.xid]

    def _abort(self, abort: StreamAbort) -> None:
        stream = self._streams.get(abort.xid)
        if stream is not None and abort.subxid != abort.xid:
            stream.roll_back(abort.subxid)
        elif stream is not None:
            self._end(stream)

    def _replay(self, frame: bytes, commit: StreamCommit) -> Iterator[FrameBatch]:
        stream = self._streams.get(commit.xid)
        if stream is None:
            raise malformed(frame, f"the end of transaction {commit.xid}, which was never streamed")
        self.is_replaying = True
        yield FrameBatch.of([commit.begin])
        aborted = stream.aborted
        with self._disk():
            for run in stream.runs():
                hit("mid_replay")
                yield unwrap(run, aborted)
        yield FrameBatch.of([commit.commit, *self._overtaken(stream)])
        self.is_replaying = False
        self._end(stream)

    def _overtaken(self, stream: _SpooledTransaction) -> list[bytes]:
        """Relation frames that came after those of the stream, which is replayed after them."""
        later = []
        for oid, note in stream.surviving().items():
            known, description = self._known.get(oid, (0, b""))
            if known > note.order:
                later.append(description)
            else:
                self._known[oid] = note.order, note.frame
        return later

    def _end(self, stream: _SpooledTransaction) -> None:
        stream.close()
        del self._streams[stream.xid]
        if not self._streams:
            self._known.clear()

    def _note(self, frame: bytes) -> None:
        self._arrived += 1
        if self._inside is None:
            self._known[int.from_bytes(frame[OID], "big")] = self._arrived, frame
        else:
            subxid, oid = xid_and_oid(frame)
            elsewhere, _ = self._known.get(oid, (0, b""))
            self._inside.describe(oid, _SpooledRelation(self._arrived, subxid, without_xid(frame)), elsewhere)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            place = str(self._directory or "the directory for temporary files")
            reason = exc.strerror or str(exc)
            raise LogUnwritable(f"streamed transactions cannot be kept in {place!r}: {reason.lower()}") from exc


def _slice_frames(frames: FrameBatch, start: int, stop: int) -> FrameBatch:
    if stop - start == len(frames):
        return frames
    return FrameBatch(frames.buffer, frames.offsets[start : stop + 1])
