"""Spool: stores raw frames of streamed (in-progress) transactions on disk until the transaction commits.

The spool precedes the decoder, so the decoder gets only whole transactions, in commit order, in protocol version 1.
Each transaction has an unnamed temporary file and a list of rolled-back subxids (four bytes each). So memory does not
grow with its rows, and a killed process leaves no files. After a restart the server sends an unfinished transaction
again, because the confirmed LSN precedes its end.
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
from cdc.pgoutput.message_parser import FrameBatch, malformed
from cdc.pgoutput.stream_blocks import (
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
"""Minimum size in bytes of a batch of replayed frames; one receive from the server returns about as much."""

_CONTROLS: Final = bytes([START, STOP, ABORT, COMMIT])
_QUIET: Final = kind_set(_CONTROLS)
_BETWEEN: Final = kind_set(_CONTROLS + bytes([RELATION]))
_INSIDE: Final = kind_set(_CONTROLS + bytes([RELATION, KEEPALIVE]))


class _SpooledRelation(NamedTuple):
    """One Relation message inside a streamed transaction, and its order of arrival."""

    order: int
    """Number of the message among all Relation messages of the session, in order of arrival."""
    subxid: int
    frame: bytes
    """Frame of the message in protocol version 1."""


@dataclass(slots=True)
class _SpooledTransaction:
    """One streamed transaction, in a file of frame blocks; a block is a frame count, offsets (int64) and bytes."""

    xid: int
    file: IO[bytes]
    nbytes: int = 0
    _aborted: array[int] = field(default_factory=lambda: array("I"))
    _relations: dict[int, list[_SpooledRelation]] = field(default_factory=lambda: defaultdict(list))
    """Relation messages by OID, in order of arrival, without those of subtransactions that were rolled back."""
    _oids_by_subxid: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """OIDs of the Relation messages in `_relations`, by subxid."""

    def append(self, frames: FrameBatch) -> None:
        """Append one block of frames to the file."""
        offsets = frames.offsets - frames.offsets[0]
        self.file.write(np.int64(len(frames)).tobytes() + offsets.tobytes())
        self.file.write(frames.buffer[frames.offsets[0] : frames.offsets[-1]].data)
        self.file.flush()
        self.nbytes += frames.nbytes

    def add_relation(self, oid: int, relation: _SpooledRelation, elsewhere: int) -> None:
        """Record a Relation message, unless it repeats the last recorded message of the OID.

        The server repeats all Relation messages after every rollback to a savepoint.

        elsewhere: number of the OID's last Relation message outside this transaction. If that message arrived after
        this transaction's last recorded message, the method records the repeated message too.
        """
        relations = self._relations[oid]
        if relations and relations[-1].frame == relation.frame and relations[-1].order > elsewhere:
            return
        relations.append(relation)
        self._oids_by_subxid[relation.subxid].add(oid)

    def roll_back(self, subxid: int) -> None:
        """Exclude the rows and Relation messages of a rolled-back subtransaction from the replay."""
        self._aborted.append(subxid)
        for oid in self._oids_by_subxid.pop(subxid, ()):
            self._relations[oid] = [relation for relation in self._relations[oid] if relation.subxid != subxid]

    @property
    def aborted(self) -> np.ndarray:
        """Subxids that were rolled back, as a sorted array of int64."""
        return np.unique(np.array(self._aborted, np.int64))

    def runs(self) -> Iterator[FrameBatch]:
        """Yield all frames in order, in batches of at least BATCH bytes; only the last batch may be smaller."""
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
                buffers = []
                offsets = [np.zeros(1, np.int64)]
                used = 0
        if buffers:
            yield FrameBatch(np.concatenate(buffers), np.concatenate(offsets))

    def surviving(self) -> dict[int, _SpooledRelation]:
        """Return, by OID, the last Relation message that was not rolled back."""
        return {oid: relations[-1] for oid, relations in self._relations.items() if relations}

    def close(self) -> None:
        """Close the temporary file, which frees its space on disk."""
        with suppress(OSError):  # closing writes what did not fit before
            self.file.close()

    def _read(self, size: int) -> bytes:
        if len(content := self.file.read(size)) < size:
            raise OSError(f"the spool file of transaction {self.xid} has fewer bytes than were written")
        return content


class Spool:
    """Converter of one session's frames to whole transactions of protocol version 1; not usable after an error.

    The Relation messages of a streamed transaction are replayed with the transaction. So the messages of a rolled-back
    transaction never reach the decoder.

    Postgres does not repeat a table's Relation message while that message is valid. A replayed transaction gives the
    decoder its own Relation messages. If another transaction sent a later message for the same table, the decoder now
    has an outdated schema. So the spool repeats the later message after the replay.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._streams: dict[int, _SpooledTransaction] = {}
        self._inside: _SpooledTransaction | None = None
        self._known: dict[int, tuple[int, bytes]] = {}
        self._arrived = 0
        self.is_replaying = False
        """True while `committed` yields the frames of a streamed transaction that has committed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the spooled frames of transactions that have not ended."""
        return sum(stream.nbytes for stream in self._streams.values())

    def committed(self, frames: FrameBatch) -> Iterator[FrameBatch]:
        """Yield frames of committed transactions in protocol version 1 and in commit order; keepalives pass at once.

        The result does not depend on how the stream is split into batches. Raises MalformedFrame if the frames violate
        the protocol, and LogUnwritable if the spool file cannot be written, for example because the disk is full.
        """
        buffer, offsets = readonly_arrays(frames)
        start = at = 0
        while (at := next_of(buffer, offsets, at, self._marked)) < len(frames):
            frame = frames[at]
            if kind_of(frame) == RELATION:
                self._record_relation(frame)
                at += 1
                continue
            yield from self._pass_run(frames, start, at)
            if kind_of(frame) == KEEPALIVE:
                yield _slice_frames(frames, at, at + 1)
            else:
                yield from self._handle_control(frame)
            start = at = at + 1
        yield from self._pass_run(frames, start, at)

    def close(self) -> None:
        """Discard all streamed transactions that have not ended, and close their files."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    @property
    def _marked(self) -> np.ndarray:
        if self._inside:
            return _INSIDE
        return _BETWEEN if self._streams else _QUIET

    def _pass_run(self, frames: FrameBatch, start: int, stop: int) -> Iterator[FrameBatch]:
        if start == stop:
            return
        run = _slice_frames(frames, start, stop)
        if self._inside is None:
            yield run
            return
        with self._disk():
            self._inside.append(run)
        hit("mid_spool")

    def _handle_control(self, frame: bytes) -> Iterator[FrameBatch]:
        control = parse_control(frame)
        if (self._inside is not None) != (kind_of(frame) == STOP):
            raise malformed(
                frame, "Stream Start, Stream Commit or Stream Abort inside a block, or Stream Stop outside a block"
            )
        match control:
            case StreamStart():
                self._inside = self._start_block(frame, control)
            case StreamAbort():
                self._abort(control)
            case StreamCommit():
                yield from self._replay(frame, control)
            case _:
                self._inside = None

    def _start_block(self, frame: bytes, start: StreamStart) -> _SpooledTransaction:
        if start.first == (start.xid in self._streams):
            raise malformed(frame, f"first block of transaction {start.xid} is missing or arrived twice")
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
            raise malformed(frame, f"Stream Commit of transaction {commit.xid} without a Stream Start")
        self.is_replaying = True
        yield FrameBatch.of([commit.begin])
        aborted = stream.aborted
        with self._disk():
            for run in stream.runs():
                hit("mid_replay")
                yield unwrap(run, aborted)
        yield FrameBatch.of([commit.commit, *self._later_relations(stream)])
        self.is_replaying = False
        self._end(stream)

    def _later_relations(self, stream: _SpooledTransaction) -> list[bytes]:
        """Return the Relation messages that other transactions sent after a message for the same OID in `stream`.

        If no other transaction sent a later message for an OID, the message in `stream` becomes the OID's last message.
        """
        later = []
        for oid, relation in stream.surviving().items():
            known_order, description = self._known.get(oid, (0, b""))
            if known_order > relation.order:
                later.append(description)
            else:
                self._known[oid] = relation.order, relation.frame
        return later

    def _end(self, stream: _SpooledTransaction) -> None:
        stream.close()
        del self._streams[stream.xid]
        if not self._streams:
            self._known.clear()

    def _record_relation(self, frame: bytes) -> None:
        self._arrived += 1
        if self._inside is None:
            self._known[int.from_bytes(frame[OID], "big")] = self._arrived, frame
        else:
            subxid, oid = xid_and_oid(frame)
            elsewhere, _ = self._known.get(oid, (0, b""))
            self._inside.add_relation(oid, _SpooledRelation(self._arrived, subxid, without_xid(frame)), elsewhere)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            directory = str(self._directory or "the directory for temporary files")
            reason = exc.strerror or str(exc)
            raise LogUnwritable(f"streamed transactions cannot be written to {directory!r}: {reason.lower()}") from exc


def _slice_frames(frames: FrameBatch, start: int, stop: int) -> FrameBatch:
    if stop - start == len(frames):
        return frames
    return FrameBatch(frames.buffer, frames.offsets[start : stop + 1])
