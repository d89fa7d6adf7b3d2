"""Watermark windows: combine the chunks of a copy with the changes of the stream, as DBLog and Debezium do.

A copying thread opens a window, reads a chunk, registers the chunk and sends a watermark through the WAL. The decoding
thread collects the relation's changes between the opening and the watermark. At the watermark, the decoding thread
merges chunk and changes, and inserts the result into the watermark's own transaction. It ignores a watermark without a
registered chunk; an earlier process may have sent such a watermark before it was killed.
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

from cdc.errors import SnapshotInvalidated
from cdc.log.encoded_chunk import EncodedChunk, PlacedChunk
from cdc.log_row import Operation, RowOrder, control_row, generation_payload
from cdc.pgoutput.decoder_events import DecodedRows, WatermarkSeen
from cdc.position import Position
from cdc.postgres.visibility import Visibility
from cdc.snapshot.window_merge import (
    KEYED_COLUMNS,
    KEYLESS_COLUMNS,
    has_schema_change,
    merge_encoded,
    merge_keyed,
    rows_at_position,
    rows_of_relation,
    unseen_rows,
)
from cdc.table import TableSchema

OPEN_TRANSACTION_LIMIT: Final = 8 * 1024 * 1024
"""Maximum bytes to keep of the transaction that the stream is receiving.

A window that opens in the middle of the transaction needs its earlier rows. If the transaction is larger than this
limit, new windows wait for its end.
"""
WINDOW_LIMIT: Final = 32 * 1024 * 1024
"""Maximum bytes of the stream's rows in one window. If a window has more, its chunk is read again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that were read from one table and that are inserted into the stream at a watermark.

    In the log, a schema row (`s`) and a truncate (`t`) may precede these rows. The end of a full copy (`g`) may follow.
    """

    relation: int
    topic: str
    rows: pa.Table
    """Rows in LOG_SCHEMA with operation `r` or `d`; position and ordinals are set at the watermark."""
    schema: TableSchema | None = None
    """Schema version to write before the rows, or None for no new version.

    The stream's later changes of the relation are decoded with the new version.
    """
    generation: Position | Literal["here"] | None = None
    """If this chunk ends a full copy: the position where the copy began, or "here" if the chunk is the whole copy.

    None if this chunk does not end a full copy.
    """
    address: str | None = None
    """Name of the only sink that receives the rows, or None for all sinks; `schema` always goes to all sinks."""
    visibility: Visibility | None = None
    """For a table without a key: the snapshot in which all its rows were read; otherwise None.

    The rows of such a chunk replace all earlier rows of the table.
    """
    encoded: EncodedChunk | None = None
    """Rows of a table with a key that an executor encoded, in place of `rows`; None for any other chunk."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Outcome of one chunk: the rows that were written at its watermark."""

    position: Position
    rows: int
    """Number of rows of the chunk that were written."""
    must_read_again: bool = False
    """True if nothing was written and the chunk must be read again.

    The window then contained a schema change, or more bytes of changes than WINDOW_LIMIT.
    """


@dataclass(frozen=True, slots=True)
class _MergedChunk:
    """What a watermark inserts for the rows of a chunk."""

    tables: list[pa.Table]
    """Rows of the chunk; for a source table without a key, then the changes of the window that must be repeated."""
    groups: tuple[int, ...] = ()
    """Row groups of an encoded chunk that no change of the window concerns; they precede the tables."""


@dataclass(slots=True)
class _Window:
    relation: int
    after: Position
    xids: np.ndarray
    """Xids of transactions that the stream sent before the window opened, and that snapshots may not see yet."""
    is_keyless: bool = False
    """True for a table without a key; the window then keeps complete rows, so that they can be written again."""
    outlives_copies: bool = False
    """True if the window stays open when a copy starts or ends."""
    rows: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0
    schema_changed: bool = False
    """True if the stream or another chunk had a new version of the relation's schema in the window."""
    chunk: Chunk | None = None
    outcome: PlacedRows | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the batch's rows of the window's relation to the window; do nothing after the chunk was merged."""
        if self.outcome is not None:
            return
        found = rows_of_relation(
            batch, self.relation, int(self.after), KEYLESS_COLUMNS if self.is_keyless else KEYED_COLUMNS
        )
        self.nbytes += found.nbytes
        self.schema_changed = self.schema_changed or has_schema_change(found)
        if self.nbytes > WINDOW_LIMIT:
            self.rows.clear()
        else:
            self.rows.append(found)

    def merge(self, chunk: Chunk) -> _MergedChunk | None:
        """Return what to insert for a chunk, or None if the chunk must be read again."""
        has_rows = chunk.visibility is not None or chunk.rows.num_rows > 0 or chunk.encoded is not None
        if self.schema_changed and (has_rows or chunk.schema is not None):  # the new version is not the chunk's
            return None
        if not has_rows:
            return _MergedChunk([chunk.rows])
        if self.nbytes > WINDOW_LIMIT:
            return None
        if not self.rows:
            return _MergedChunk([chunk.rows], _all_groups(chunk.encoded))
        return self._merge_changes(chunk, pa.concat_tables(self.rows))

    @staticmethod
    def _merge_changes(chunk: Chunk, window: pa.Table) -> _MergedChunk | None:
        """Return what to insert for a chunk whose window contains changes, or None if it must be read again."""
        if chunk.encoded is not None:
            merged = merge_encoded(chunk.encoded, window)
            return None if merged is None else _MergedChunk([merged[1]], merged[0])
        if chunk.visibility is None:
            rows = merge_keyed(chunk.rows, window)
            return None if rows is None else _MergedChunk([rows])
        follows = unseen_rows(window, chunk.visibility)
        return None if follows is None else _MergedChunk([chunk.rows, follows])


@dataclass(slots=True)
class _OpenTransaction:
    """Rows of the transaction that the stream is receiving."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    nbytes: int = 0
    lost: bool = False
    xids: list[np.ndarray] = field(default_factory=list)
    """The transaction's xid, once there are rows."""


class WatermarkWindows:
    """All open windows of one reader; thread-safe for several copying threads and one decoding thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_streaming = False
        self._received = Position(0)
        self._is_tracking = False
        self._xids: list[np.ndarray] = []
        self._open_transaction = _OpenTransaction()
        self._windows: dict[str, _Window] = {}
        self._schemas: dict[int, TableSchema] = {}
        self.streamed_rows = 0
        """Number of rows received from the stream so far, without the rows of copies."""

    @property
    def is_waiting(self) -> bool:
        """Whether a window is open, so that a copying thread waits for the stream; any thread may ask."""
        return bool(self._windows)

    # called by the decoding thread

    def start_session(self, after: Position, known: Mapping[int, TableSchema]) -> None:
        """Start a replication session that streams all transactions after a position, and discard all open windows.

        `known` maps each relation to its schema version at this position.
        """
        with self._changed:
            self._is_streaming, self._received, self._open_transaction = True, after, _OpenTransaction()
            self._schemas = dict(known)
            self._windows.clear()
            self._changed.notify_all()

    def end_session(self) -> None:
        """End the replication session, and discard all open windows."""
        with self._changed:
            self._is_streaming = False
            self._windows.clear()
            self._changed.notify_all()

    def set_schema(self, schema: TableSchema) -> None:
        """Record a relation's new schema version, which the stream contains before all later rows of the relation."""
        with self._changed:
            self._schemas[schema.relation] = schema

    def observe(self, decoded: DecodedRows) -> None:
        """Add decoded rows to the open windows."""
        rows, complete = decoded.rows, decoded.complete
        with self._changed:
            self.streamed_rows += 0 if decoded.copied else rows.num_rows
            if self._is_tracking and rows.num_rows:
                self._xids.append(_distinct(rows["xid"]))
            for window in self._windows.values():
                window.add(rows)
            if decoded.last is not None:
                self._received = decoded.last
                self._open_transaction = _OpenTransaction()
            if complete < rows.num_rows:
                self._add_open_rows(rows.slice(complete), decoded.nbytes)
            self._changed.notify_all()

    def has_window(self, content: bytes) -> bool:
        """Return True if a watermark with this content closes an open window; nobody else knows the content."""
        with self._changed:
            return content.decode(errors="replace") in self._windows

    def batches_at_watermark(
        self, seen: WatermarkSeen
    ) -> tuple[TableSchema | None, Iterable[pa.RecordBatch | PlacedChunk]]:
        """Merge the chunk of a watermark; return the chunk's schema version (None if it has none) and the merged rows.

        The caller inserts the rows into the stream. If no chunk is registered, or the chunk must be read again, return
        None and no rows. Row groups that an executor encoded come first.
        """
        with self._changed:
            window = self._windows.get(seen.content.decode(errors="replace"))
            if window is None or window.chunk is None or window.outcome is not None:
                return None, []
            chunk, window.chunk = window.chunk, None
            merged, window.rows = window.merge(chunk), []
            placed = _placed_groups(chunk, merged, seen) if merged is not None else None
            count = merged.tables[0].num_rows if merged is not None else 0
            count += placed.rows if placed is not None else 0
            window.outcome = PlacedRows(seen.position, count, must_read_again=merged is None)
            self._changed.notify_all()
            if merged is None:
                return None, []
            if chunk.schema is not None:
                schema = chunk.schema.following(self._schemas.get(chunk.relation))
                chunk, self._schemas[chunk.relation] = replace(chunk, schema=schema), schema
                for other in self._windows.values():
                    other.schema_changed = other.schema_changed or other.relation == chunk.relation
            if placed is not None:  # a chunk of rows alone, without control rows
                first_row = replace(placed.first, ordinal=placed.first.ordinal + placed.rows)
                return None, [placed, *_batches_at(chunk, merged.tables, first_row, window.after)]
            return chunk.schema, _batches_at(chunk, merged.tables, _row_order(seen), window.after)

    # called by the copying threads

    def track_xids(self, *, on: bool) -> Position:
        """Start or stop recording the xids of received transactions, and return the last received position.

        The transaction that the stream is receiving is recorded too. The method also discards all open windows, except
        those with `outlives_copies`.
        """
        with self._changed:
            self._is_tracking, self._xids = on, [*self._open_transaction.xids] if on else []
            self._windows = {token: window for token, window in self._windows.items() if window.outlives_copies}
            return self._received

    def schemas(self) -> list[TableSchema]:
        """Return the current schema versions of all relations; empty if no replication session is streaming."""
        with self._changed:
            return list(self._schemas.values()) if self._is_streaming else []

    def add_unconfirmed_xids(self, xids: np.ndarray) -> None:
        """Record xids of transactions received before `track_xids` was called; snapshots may not see them yet."""
        with self._changed:
            self._xids.append(xids)

    def open_window(
        self, token: str, relation: int, patience: float, *, keyless: bool = False, outlives_copies: bool = False
    ) -> TableSchema | None:
        """Start collecting the relation's changes, and return its schema version at this point of the stream.

        Return None if the stream has not described the relation. The log may not contain the returned version yet.
        `keyless` must be true if the chunk will have a `visibility`. If `outlives_copies` is true, the window stays
        open when a copy starts or ends. Raises SnapshotInvalidated if, after `patience` seconds, no replication session
        streams, or the stream is still in a transaction above OPEN_TRANSACTION_LIMIT.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_streaming and not self._open_transaction.lost, patience):
                reason = (
                    f"the stream is receiving a transaction of more than {OPEN_TRANSACTION_LIMIT >> 20} MiB"
                    if self._is_streaming
                    else "no replication session is streaming"
                )
                raise SnapshotInvalidated(f"the reader cannot read chunks of tables now: {reason}; it tries again")
            window = _Window(relation, self._received, _distinct_of_all(self._xids), keyless, outlives_copies)
            for batch in self._open_transaction.batches:
                window.add(batch)
            self._windows[token] = window
            return self._schemas.get(relation)

    @contextmanager
    def discard_on_error(self, token: str) -> Iterator[None]:
        """Discard the window with this token if the `with` block raises."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._windows.pop(token, None)
            raise

    def sees_all(self, token: str, visibility: Visibility) -> bool:
        """Return True if a snapshot sees every transaction that was received before the window opened.

        Otherwise discard the window and return False. A transaction can be in the stream before snapshots see it, for
        example while it waits for a synchronous standby. Raises SnapshotInvalidated if the window no longer exists.
        """
        with self._changed:
            window = self._windows.get(token)
            if window is None:
                raise SnapshotInvalidated(
                    "the replication session ended while a chunk of a table was read: "
                    "the reader will read the chunk again"
                )
            known = _distinct_of_all(self._xids)  # later snapshots see every transaction that this snapshot sees
            self._xids = [known[~visibility.sees(known)]]
            if all_seen := bool(visibility.sees(window.xids).all()):
                window.xids = window.xids[:0]
            else:
                del self._windows[token]
            return all_seen

    def set_chunk(self, token: str, chunk: Chunk) -> None:
        """Register the chunk of a window; the caller sends the watermark afterwards.

        Does nothing if the window no longer exists. Raises ValueError if the chunk has a `visibility` and the window
        was not opened as `keyless`.
        """
        with self._changed:
            if (window := self._windows.get(token)) is None:
                return
            if chunk.visibility is not None and not window.is_keyless:
                raise ValueError(f"table {chunk.topic!r} has no key, but its window was opened for a table with a key")
            window.chunk = chunk

    def wait_for_outcome(self, token: str, patience: float) -> PlacedRows:
        """Wait until the watermark of a window arrives, and return the outcome of its chunk.

        Raises SnapshotInvalidated if the window was discarded, for example because the session ended, or if the stream
        makes no progress for `patience` seconds.
        """
        with self._changed:
            received, deadline = self._received, time.monotonic() + patience
            while (window := self._windows.get(token)) is not None and window.outcome is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    break
                if self._received != received:
                    received, deadline = self._received, time.monotonic() + patience
            window = self._windows.pop(token, None)
            if window is None:
                raise SnapshotInvalidated(
                    "the replication session ended before the watermark of a chunk arrived: "
                    "the reader will read the chunk again"
                )
            if window.outcome is None:
                raise SnapshotInvalidated(
                    f"the stream made no progress for {patience:g} s and did not contain the watermark of a chunk: "
                    "the reader will read the chunk again"
                )
            return window.outcome

    def _add_open_rows(self, rows: pa.RecordBatch, nbytes: int) -> None:
        self._open_transaction.nbytes += nbytes
        self._open_transaction.xids = [_distinct(rows["xid"])]
        if self._open_transaction.nbytes > OPEN_TRANSACTION_LIMIT:
            open_transaction = self._open_transaction
            self._open_transaction = _OpenTransaction(
                nbytes=open_transaction.nbytes, lost=True, xids=open_transaction.xids
            )
        elif not self._open_transaction.lost:
            self._open_transaction.batches.append(rows)


def _all_groups(encoded: EncodedChunk | None) -> tuple[int, ...]:
    return () if encoded is None else tuple(range(len(encoded.group_rows)))


def _placed_groups(chunk: Chunk, merged: _MergedChunk, seen: WatermarkSeen) -> PlacedChunk | None:
    """Return the row groups of an encoded chunk at the place of a watermark; None if there are none to insert."""
    if chunk.encoded is None or not merged.groups:
        return None
    return PlacedChunk(chunk.encoded, merged.groups, _row_order(seen))


def _row_order(seen: WatermarkSeen) -> RowOrder:
    return RowOrder(int(seen.position), seen.ordinal, seen.xid, seen.committed_at)


def _distinct_of_all(xids: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(xids)) if xids else np.empty(0, np.int64)


def _distinct(xids: pa.Array) -> np.ndarray:
    """Return the xids without adjacent duplicates; the rows of one transaction are adjacent."""
    values = xids.to_numpy(zero_copy_only=False)
    return values[np.concatenate(([True], values[1:] != values[:-1]))]


def _batches_at(chunk: Chunk, merged: list[pa.Table], first_row: RowOrder, after: Position) -> Iterator[pa.RecordBatch]:
    """Yield the batches in LOG_SCHEMA to insert for a chunk; `first_row` has their position and first ordinal.

    `merged` are the tables of `_Window.merge`, and `after` is the position at which the window opened.
    """
    for rows, address in _tables_at(chunk, merged, first_row, after):
        yield from rows_at_position(rows, first_row, address)
        first_row = replace(first_row, ordinal=first_row.ordinal + rows.num_rows)


def _tables_at(
    chunk: Chunk, merged: list[pa.Table], first_row: RowOrder, after: Position
) -> Iterator[tuple[pa.Table, str | None]]:
    """Yield the Arrow tables to insert, in log order, each as (rows, name of the only sink that receives the rows).

    The name is None if all sinks receive the rows.
    """

    def control(operation: Operation, payload: bytes | None = None) -> pa.Table:
        return pa.Table.from_batches([control_row(first_row, operation, chunk.relation, chunk.topic, payload)])

    own, *follows = merged
    if chunk.schema is not None:
        yield control(Operation.SCHEMA, chunk.schema.to_json()), None
    parts = [own]
    if chunk.visibility is not None:
        yield control(Operation.TRUNCATE), chunk.address
        # as they were read: the rows of a whole table may exceed one batch
        parts = [pa.Table.from_batches([batch]) for batch in own.to_batches()]
    for rows in (*parts, *follows):
        yield rows, chunk.address
    if (began := chunk.generation) is not None:
        if began == "here":
            # the window's changes that replaced rows of a keyed chunk are later than `after`; targets must keep them
            began = Position(first_row.position if chunk.visibility is not None else after + 1)
        yield control(Operation.GENERATION, generation_payload(began)), chunk.address
