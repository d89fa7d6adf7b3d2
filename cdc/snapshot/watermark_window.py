"""Placing: where a chunk that one thread reads meets the stream that another decodes.

A copying thread opens a window, reads its chunk, offers it and sends a watermark; the decoding thread collects what
the stream says of the relation meanwhile, and when the watermark comes it puts the chunk's rows into the watermark's
own transaction. A watermark without its rows in hand (those of a process that was killed) means nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from cdc.change import Operation, RowOrder, control_row
from cdc.errors import SnapshotInvalidated
from cdc.log.durable_position import DurablePosition
from cdc.pgoutput.decoder_events import Decoded, WatermarkSeen
from cdc.position import Position
from cdc.postgres.chunk_snapshot import Visibility
from cdc.snapshot.signal_queue import SignalQueue
from cdc.snapshot.window_merge import (
    KEYED_COLUMNS,
    KEYLESS_COLUMNS,
    has_schema_change,
    merge_keyed,
    rows_at_position,
    rows_of_relation,
    unseen_rows,
)
from cdc.table import TableSchema

OPEN_TRANSACTION_LIMIT: Final = 8 * 1024 * 1024
"""Bytes of an unfinished transaction that are kept for a window which may open in its middle; above it windows wait."""
WINDOW_LIMIT: Final = 32 * 1024 * 1024
"""Bytes of a relation's rows in one window; above it the chunk is read again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is to be put at a watermark: `s`, `t`, the rows and `g`, those of them that there are, in this order."""

    relation: int
    topic: str
    rows: pa.Table
    """LOG_SCHEMA, `r`; positions and ordinals are given when it is placed."""
    schema: TableSchema | None = None
    """A version to write, by which the stream is read from here on."""
    generation: Position | Literal["here"] | None = None
    """Close a full copy that began there; "here": that this chunk is all of, whose position nobody knows yet."""
    address: str | None = None
    """The one sink that it is for. A version is for everyone, as what the stream says from here on is."""
    visibility: Visibility | None = None
    """What the one snapshot saw in which `rows` were read, all that a table without a key holds: it begins anew."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """What became of it."""

    position: Position
    rows: int
    """Of the chunk's own."""
    again: bool = False
    """The schema changed meanwhile, or too much else: nothing was written."""


@dataclass(slots=True)
class _Window:
    relation: int
    after: Position
    xids: np.ndarray
    """Received by then, and not known to be visible."""
    whole: bool = False
    """Its rows may have to be told once more."""
    lasting: bool = False
    """Somebody waits for it who is no copy."""
    rows: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0
    versioned: bool = False
    """A new version of the schema came."""
    chunk: Chunk | None = None
    outcome: PlacedRows | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep what concerns the relation, until the chunk is placed."""
        if self.outcome is not None:
            return
        found = rows_of_relation(
            batch, self.relation, int(self.after), KEYLESS_COLUMNS if self.whole else KEYED_COLUMNS
        )
        self.nbytes += found.nbytes
        self.versioned = self.versioned or has_schema_change(found)
        if self.nbytes > WINDOW_LIMIT:
            self.rows.clear()
        else:
            self.rows.append(found)

    def settled(self, chunk: Chunk) -> list[pa.Table] | None:
        """The chunk's own rows, and those that follow it; None: the chunk is worthless, or too much came to tell."""
        if chunk.schema is not None and self.versioned:  # the stream's is the newer one
            return None
        if chunk.visibility is None and not chunk.rows.num_rows:
            return [chunk.rows]
        if self.nbytes > WINDOW_LIMIT:
            return None
        if not self.rows:
            return [chunk.rows]
        window = pa.concat_tables(self.rows)
        if chunk.visibility is None:
            rows = merge_keyed(chunk.rows, window)
            return None if rows is None else [rows]
        follows = unseen_rows(window, chunk.visibility)
        return None if follows is None else [chunk.rows, follows]


@dataclass(slots=True)
class _OpenTransaction:
    """Rows of the transaction that is not finished yet."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    nbytes: int = 0
    lost: bool = False


class WatermarkWindows:
    """One reader's meeting place; safe for threads that copy and one that decodes."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._streaming = False
        self._received = Position(0)
        self._tracking = False
        self._xids: list[np.ndarray] = []
        self._tail = _OpenTransaction()
        self._windows: dict[str, _Window] = {}
        self._versions: dict[int, TableSchema] = {}
        self.streamed = 0
        """Rows that the stream has brought so far, those of copies not counted."""
        self.reached = DurablePosition()
        """How far the log is durable."""
        self.inbox: SignalQueue | None = None
        """Where the decoding thread leaves signals; None while nobody carries any out."""

    # the decoding thread

    def begin(self, after: Position, known: Mapping[int, TableSchema]) -> None:
        """A session streams from behind this position, with these versions known; what was on its way is void."""
        with self._changed:
            self._streaming, self._received, self._tail = True, after, _OpenTransaction()
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
            self.streamed += 0 if decoded.copied else rows.num_rows
            if self._tracking and rows.num_rows:
                self._xids.append(_distinct(rows["xid"]))
            for window in self._windows.values():
                window.add(rows)
            if decoded.last is not None:
                self._received = decoded.last
                self._tail = _OpenTransaction()
            if complete < rows.num_rows:
                self._keep(rows.slice(complete), decoded.nbytes)
            self._changed.notify_all()

    def place(self, seen: WatermarkSeen) -> tuple[TableSchema | None, Iterable[pa.RecordBatch]]:
        """The version to read by from here, and the rows that belong into the watermark's transaction."""
        with self._changed:
            window = self._windows.get(seen.content.decode(errors="replace"))
            if window is None or window.chunk is None or window.outcome is not None:
                return None, []
            chunk, window.chunk = window.chunk, None
            settled, window.rows = window.settled(chunk), []
            count = settled[0].num_rows if settled else 0
            window.outcome = PlacedRows(seen.position, count, again=settled is None)
            self._changed.notify_all()
            if settled is None:
                return None, []
            if chunk.schema is not None:
                self._versions[chunk.relation] = chunk.schema
            place = RowOrder(int(seen.position), seen.ordinal, seen.xid, seen.committed_at)
            return chunk.schema, _batches_at(chunk, settled, place, window.after)

    # the copying threads

    def track(self, *, on: bool) -> Position:
        """Begin or cease to note which transactions were received; gives the last one of before.

        What a copy has on its way when the noting ceases is void: nobody waits for it any more.
        """
        with self._changed:
            self._tracking, self._xids = on, []
            self._windows = {token: window for token, window in self._windows.items() if window.lasting}
            return self._received

    def versions(self) -> list[TableSchema]:
        """Those that the stream is read by; none while nothing streams."""
        with self._changed:
            return list(self._versions.values()) if self._streaming else []

    def add_received(self, xids: np.ndarray) -> None:
        """Note transactions that had been received before, and may not be visible yet."""
        with self._changed:
            self._xids.append(xids)

    def open(
        self, token: str, relation: int, patience: float, *, whole: bool = False, lasting: bool = False
    ) -> TableSchema | None:
        """Collect what comes from here on; gives the version of the relation at this place of the stream.

        The log may not hold that version yet; None where the stream has not told of the relation. `whole` for a chunk
        with a visibility, `lasting` for who waits for it whatever copies begin and end meanwhile. Raises
        SnapshotInvalidated if nothing streams within so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._streaming and not self._tail.lost, patience):
                raise SnapshotInvalidated("nothing streams, so nothing can be placed")
            window = _Window(relation, self._received, _distinct_of_all(self._xids), whole, lasting)
            for batch in self._tail.batches:
                window.add(batch)
            self._windows[token] = window
            return self._versions.get(relation)

    @contextmanager
    def closing(self, token: str) -> Iterator[None]:
        """Forget the window if reading its chunk fails."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._windows.pop(token, None)
            raise

    def sees_all(self, token: str, visibility: Visibility) -> bool:
        """Whether a snapshot that was taken after open() sees all that had been received by then.

        A transaction can be in the stream before others see it: it waits for a synchronous standby, say.
        """
        with self._changed:
            window = self._windows.get(token)
            if window is None:
                raise SnapshotInvalidated("the session ended meanwhile")
            known = _distinct_of_all(self._xids)  # what one snapshot sees every later one sees as well
            self._xids = [known[~visibility.sees(known)]]
            if all_seen := bool(visibility.sees(window.xids).all()):
                window.xids = window.xids[:0]
            else:
                del self._windows[token]
            return all_seen

    def offer(self, token: str, chunk: Chunk) -> None:
        """Have the chunk in hand for the window's watermark, which may be sent from now on.

        Raises ValueError for a chunk with a visibility in a window that was not opened `whole`.
        """
        with self._changed:
            if (window := self._windows.get(token)) is None:
                return
            if chunk.visibility is not None and not window.whole:
                raise ValueError(f"the window keeps too little to begin {chunk.topic!r} anew")
            window.chunk = chunk

    def outcome(self, token: str, patience: float) -> PlacedRows:
        """What became of it; raises SnapshotInvalidated if the session ended, or brought nothing for so many seconds.

        A stream that is far behind takes its time until the watermark comes.
        """
        with self._changed:
            received, deadline = self._received, time.monotonic() + patience
            while (window := self._windows.get(token)) is not None and window.outcome is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    break
                if self._received != received:
                    received, deadline = self._received, time.monotonic() + patience
            window = self._windows.pop(token, None)
            if window is None or window.outcome is None:
                raise SnapshotInvalidated("the watermark did not come back")
            return window.outcome

    def _keep(self, rows: pa.RecordBatch, nbytes: int) -> None:
        self._tail.nbytes += nbytes
        if self._tail.nbytes > OPEN_TRANSACTION_LIMIT:
            self._tail = _OpenTransaction(nbytes=self._tail.nbytes, lost=True)
        elif not self._tail.lost:
            self._tail.batches.append(rows)


def _distinct_of_all(xids: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(xids)) if xids else np.empty(0, np.int64)


def _distinct(xids: pa.Array) -> np.ndarray:
    """Transactions come one after the other, so equal neighbours are enough to look at."""
    values = xids.to_numpy(zero_copy_only=False)
    return values[np.concatenate(([True], values[1:] != values[:-1]))]


def _batches_at(chunk: Chunk, settled: list[pa.Table], place: RowOrder, after: Position) -> Iterator[pa.RecordBatch]:
    """All that the chunk says at the place, ordinals counting on, made while it is asked for; LOG_SCHEMA.

    `settled` by a window that began behind `after`.
    """
    for rows, address in _tables_at(chunk, settled, place, after):
        yield from rows_at_position(rows, place, address)
        place = replace(place, ordinal=place.ordinal + rows.num_rows)


def _tables_at(
    chunk: Chunk, settled: list[pa.Table], place: RowOrder, after: Position
) -> Iterator[tuple[pa.Table, str | None]]:
    """What stands at the place, in its order, and the sink that each part is for."""

    def control(operation: Operation, payload: bytes | None = None) -> pa.Table:
        return pa.Table.from_batches([control_row(place, operation, chunk.relation, chunk.topic, payload)])

    own, *follows = settled
    if chunk.schema is not None:
        yield control(Operation.SCHEMA, chunk.schema.to_json()), None
    parts = [own]
    if chunk.visibility is not None:
        yield control(Operation.TRUNCATE), chunk.address
        # in batches as they were read: all of a table may be too much for one
        parts = [pa.Table.from_batches([batch]) for batch in own.to_batches()]
    for rows in (*parts, *follows):
        yield rows, chunk.address
    if (began := chunk.generation) is not None:
        if began == "here":
            # of a keyed chunk what the window brought instead stands between the two; it must not go
            began = Position(place.position if chunk.visibility is not None else after + 1)
        yield control(Operation.GENERATION, str(int(began)).encode()), chunk.address
