"""Placing: where a chunk that one thread reads meets the stream that another decodes.

The copying thread opens a window, reads its chunk, offers it and sends a watermark; the decoding thread collects what
the stream says of the relation meanwhile, and when the watermark comes it puts the chunk's rows into the watermark's
own transaction. A watermark without its rows in hand (those of a process that was killed) means nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.change import Operation, Place, control_row
from cdc.errors import SnapshotVoid
from cdc.pgoutput.transactions import Decoded, WatermarkSeen
from cdc.position import Position
from cdc.postgres.chunk import Visibility
from cdc.snapshot.window import placed, settle, window_of
from cdc.table import TableSchema

TAIL_LIMIT: Final = 8 * 1024 * 1024
"""Bytes of an unfinished transaction that are kept for a window which may open in its middle; above it windows wait."""
WINDOW_LIMIT: Final = 32 * 1024 * 1024
"""Bytes of a relation's rows in one window; above it the chunk is read again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is to be put at a watermark."""

    relation: int
    topic: str
    rows: pa.Table
    """LOG_SCHEMA, `r`; positions and ordinals are given when it is placed."""
    schema: TableSchema | None = None
    """A version to write, by which the stream is read from here on; such a chunk has no rows."""
    generation: Position | None = None
    """Close a full copy that began there."""
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """What became of it."""

    position: Position
    rows: int
    again: bool = False
    """The schema changed meanwhile, or too much else: nothing was written."""


@dataclass(slots=True)
class _Window:
    relation: int
    after: Position
    xids: np.ndarray
    """Received by then, and not known to be visible."""
    rows: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0
    chunk: Chunk | None = None
    outcome: Placed | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep what concerns the relation, until the chunk is placed."""
        if self.outcome is not None:
            return
        found = window_of(batch, self.relation, int(self.after))
        self.nbytes += found.nbytes
        if self.nbytes > WINDOW_LIMIT:
            self.rows.clear()
        else:
            self.rows.append(found)

    def settled(self, rows: pa.Table) -> pa.Table | None:
        """See settle; None also where the window took in too much to tell."""
        if self.nbytes > WINDOW_LIMIT:
            return None
        return settle(rows, pa.concat_tables(self.rows)) if self.rows else rows


@dataclass(slots=True)
class _Tail:
    """Rows of the transaction that is not finished yet."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    nbytes: int = 0
    lost: bool = False


class Placing:
    """One reader's meeting place; safe for one thread that copies and one that decodes."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._streaming = False
        self._received = Position(0)
        self._tracking = False
        self._xids: list[np.ndarray] = []
        self._tail = _Tail()
        self._windows: dict[str, _Window] = {}
        self._versions: dict[int, TableSchema] = {}

    # the decoding thread

    def begin(self, after: Position, known: Mapping[int, TableSchema]) -> None:
        """A session streams from behind this position, with these versions known; what was on its way is void."""
        with self._changed:
            self._streaming, self._received, self._tail = True, after, _Tail()
            self._versions = dict(known)
            self._windows.clear()
            self._changed.notify_all()

    def end(self) -> None:
        """The session is over."""
        with self._changed:
            self._streaming = False
            self._windows.clear()
            self._changed.notify_all()

    def learn(self, schema: TableSchema) -> None:
        """A version whose `s` row is on its way to the log, or will be before any other row of the relation."""
        with self._changed:
            self._versions[schema.relation] = schema

    def note(self, decoded: Decoded) -> None:
        """Take notice of rows on their way to the log."""
        rows, complete = decoded.rows, decoded.complete
        with self._changed:
            if self._tracking and rows.num_rows:
                self._xids.append(_distinct(rows["xid"]))
            for window in self._windows.values():
                window.add(rows)
            if decoded.last is not None:
                self._received = decoded.last
                self._tail = _Tail()
            if complete < rows.num_rows:
                self._keep(rows.slice(complete), decoded.nbytes)
            self._changed.notify_all()

    def place(self, seen: WatermarkSeen) -> tuple[TableSchema | None, list[pa.RecordBatch]]:
        """The version to read by from here, and the rows that belong into the watermark's transaction."""
        with self._changed:
            window = self._windows.get(seen.content.decode(errors="replace"))
            if window is None or window.chunk is None or window.outcome is not None:
                return None, []
            chunk, window.chunk = window.chunk, None
            settled = window.settled(chunk.rows)
            again = settled is None and chunk.rows.num_rows > 0
            place = Place(int(seen.position), seen.ordinal, seen.xid, seen.committed_at)
            batches = [] if settled is None else list(placed(settled, place, chunk.address))
            count = sum(batch.num_rows for batch in batches)
            batches += _controls(chunk, replace(place, ordinal=place.ordinal + count))
            window.outcome = Placed(seen.position, count, again)
            if chunk.schema is not None:
                self._versions[chunk.relation] = chunk.schema
            self._changed.notify_all()
            return chunk.schema, batches

    # the copying thread

    def track(self, *, on: bool) -> Position:
        """Begin or cease to note which transactions were received; gives the last one of before.

        What is on its way when the noting ceases is void: nobody waits for it any more.
        """
        with self._changed:
            self._tracking, self._xids = on, []
            self._windows.clear()
            return self._received

    def add_received(self, xids: np.ndarray) -> None:
        """Note transactions that had been received before, and may not be visible yet."""
        with self._changed:
            self._xids.append(xids)

    def open(self, token: str, relation: int, patience: float) -> TableSchema:
        """Collect what comes from here on; gives the version of the relation at this place of the stream.

        The log may not hold that version yet. Raises SnapshotVoid if nothing streams within so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._streaming and not self._tail.lost, patience):
                raise SnapshotVoid("nothing streams, so nothing can be placed")
            window = _Window(relation, self._received, _joined(self._xids))
            for batch in self._tail.batches:
                window.add(batch)
            self._windows[token] = window
            return self._versions[relation]

    def sees_all(self, token: str, visibility: Visibility) -> bool:
        """Whether a snapshot that was taken after open() sees all that had been received by then.

        A transaction can be in the stream before others see it: it waits for a synchronous standby, say.
        """
        with self._changed:
            window = self._windows.get(token)
            if window is None:
                raise SnapshotVoid("the session ended meanwhile")
            known = _joined(self._xids)  # what one snapshot sees every later one sees as well
            self._xids = [known[~visibility.sees(known)]]
            if all_seen := bool(visibility.sees(window.xids).all()):
                window.xids = window.xids[:0]
            else:
                del self._windows[token]
            return all_seen

    def offer(self, token: str, chunk: Chunk) -> None:
        """Have the chunk in hand for the window's watermark, which may be sent from now on."""
        with self._changed:
            if (window := self._windows.get(token)) is not None:
                window.chunk = chunk

    def outcome(self, token: str, patience: float) -> Placed:
        """What became of it; raises SnapshotVoid if the session ended meanwhile, or after so many seconds."""
        deadline = time.monotonic() + patience
        with self._changed:
            while (window := self._windows.get(token)) is not None and window.outcome is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    break
            window = self._windows.pop(token, None)
            if window is None or window.outcome is None:
                raise SnapshotVoid("the watermark did not come back")
            return window.outcome

    def _keep(self, rows: pa.RecordBatch, nbytes: int) -> None:
        self._tail.nbytes += nbytes
        if self._tail.nbytes > TAIL_LIMIT:
            self._tail = _Tail(nbytes=self._tail.nbytes, lost=True)
        elif not self._tail.lost:
            self._tail.batches.append(rows)


def _joined(xids: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(xids)) if xids else np.empty(0, np.int64)


def _distinct(xids: pa.Array) -> np.ndarray:
    """Transactions come one after the other, so equal neighbours are enough to look at."""
    values = xids.to_numpy(zero_copy_only=False)
    return values[np.concatenate(([True], values[1:] != values[:-1]))]


def _controls(chunk: Chunk, place: Place) -> Iterator[pa.RecordBatch]:
    said: list[tuple[Operation, bytes]] = []
    if chunk.schema is not None:
        said.append((Operation.SCHEMA, chunk.schema.to_json()))
    if chunk.generation is not None:
        said.append((Operation.GENERATION, str(int(chunk.generation)).encode()))
    for number, (operation, payload) in enumerate(said):
        yield control_row(
            replace(place, ordinal=place.ordinal + number), operation, chunk.relation, chunk.topic, payload
        )
