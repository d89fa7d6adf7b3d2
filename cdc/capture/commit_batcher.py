"""Commit batcher: groups decoded transactions into commits of the log, and decides when a commit is due.

A commit contains whole transactions. It is due in one of three cases:

- The append stage has been idle for the linger time. If many rows wait: for BUSY_LINGER times the linger time, until no
  row has arrived for QUIET seconds, or until the source has no more. Rows that arrive while the
  append stage is busy share one commit.
- A thread, such as one that copies a table, waits for a position of the commit, and no more rows are queued.
- The rows of the commit exceed its maximum size, or an open transaction exceeds OPEN_LIMIT.

The rows of a large open transaction, and of a copy's chunks, are written to data files early. A later commit makes
these files visible. A trim of the log and a rewrite of its small files are commits as well. They are possible only
while no data file waits for its commit. Callers pass the time: the batcher reads no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import Final, TypeAlias

import pyarrow as pa

from cdc import metrics
from cdc.byte_queue import QueueClosed
from cdc.failpoint import hit
from cdc.log.disk_format import CommitInfo, CommitSource
from cdc.log.encoded_chunk import PlacedChunk
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.writer import EncodedFile, StagedFile, encode_files
from cdc.log_row import LOG_SCHEMA
from cdc.metrics import Metrics
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.position import Position
from cdc.postgres.commit_position_bound import WalBound
from cdc.postgres.read_delay import BATCH_SECONDS

OPEN_LIMIT: Final = 16 * 1024 * 1024
"""Maximum bytes of an open transaction in memory; above it, the rows go to data files that a later commit contains."""
CHUNKS_PER_COMMIT: Final = 3
"""While a copying thread waits for a commit, the commit is due as soon as it contains this number of chunks.

With more chunks per commit, the copying connections would be idle.
"""
BUSY_BYTES: Final = 1 << 20
"""Bytes of ready rows from which a commit may linger BUSY_LINGER times as long, if more rows keep arriving.

The reader is then behind, so fewer commits matter more than the latency of each.
"""
BUSY_LINGER: Final = 4
QUIET: Final = 1.5 * BATCH_SECONDS
"""Seconds without new rows after which a commit of BUSY_BYTES is due, even before the linger time.

While the reader is far behind, rows arrive once per batch of frames, so the time is longer than such a batch takes.
"""
GATHER: Final = 1.25
"""Multiple of the linger time for which steady input is gathered before it is decoded.

When the rows arrive at the encode stage, their commit is then due, so they wait only once.
"""
MAX_GATHER: Final = 0.1
"""Maximum seconds for which input is gathered, because the receive stage sends no status update meanwhile."""
COPY_GATHER: Final = 0.005
"""Seconds for which input is gathered while a copying thread waits for a watermark."""


def _wake_no_stage() -> None:
    """Do nothing; `DurablePosition.wait` calls this function while no replication session runs."""


class DurablePosition:
    """The durable position of the log, for which threads can wait; thread-safe.

    One object serves all replication sessions of a process.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._position = Position(0)
        self._awaited: list[Position] = []
        self._wake: Callable[[], None] = _wake_no_stage

    @property
    def position(self) -> Position:
        """The last durable position."""
        return self._position

    def advance(self, position: Position) -> None:
        """Set the durable position, and wake the threads that wait for a position."""
        with self._changed:
            self._position = position
            self._changed.notify_all()

    def wait(self, position: Position, seconds: float) -> bool:
        """Wait until the position is durable, for at most `seconds`; return False if it is not durable by then."""
        with self._changed:
            if self._position >= position:
                return True
            self._awaited.append(position)
        try:
            self._wake()
            with self._changed:
                return self._changed.wait_for(lambda: self._position >= position, seconds)
        finally:
            with self._changed:
                self._awaited.remove(position)

    def is_awaited(self, after: Position, upto: Position) -> bool:
        """Return True if a thread waits for a position in the range (after, upto]."""
        with self._changed:
            return any(after < position <= upto for position in self._awaited)

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """While the `with` block runs, `wait` calls `wake`, so that the encode stage checks whether a commit is due."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = _wake_no_stage


@dataclass(frozen=True, slots=True)
class CommitBoundary:
    """Last position, commit time and transaction count of one commit."""

    last: Position
    committed_at: int
    transactions: int

    def info(self, lineage: CommitSource, rows: int) -> CommitInfo:
        """Return the metadata that the log stores with the commit; rows: number of rows of the commit."""
        return CommitInfo(
            last=self.last,
            committed_at=self.committed_at,
            rows=rows,
            transactions=self.transactions,
            **lineage._asdict(),
        )


PendingItem: TypeAlias = pa.RecordBatch | PlacedChunk
"""Rows that wait for a commit: in memory, or in a data file that an executor has encoded."""


class PendingRows:
    """Rows in WAL order that wait for a commit: those of finished transactions, and those of the open transaction."""

    def __init__(self) -> None:
        self._ready: list[PendingItem] = []
        self._open: list[PendingItem] = []
        self.ready_bytes = 0
        """Bytes of rows of finished transactions."""
        self.open_bytes = 0
        """Bytes of rows of the open transaction."""
        self._last: Position | None = None
        self._committed_at = 0
        self._transactions = 0

    @property
    def is_ready(self) -> bool:
        """True if a finished transaction waits for a commit."""
        return self._last is not None

    @property
    def last(self) -> Position:
        """Position of the last finished transaction; 0 if there is none."""
        return self._last or Position(0)

    def add(self, decoded: DecodedRows) -> None:
        """Add decoded rows: rows of finished transactions become ready to commit, the others stay open."""
        finished, rest = decoded.rows.slice(0, decoded.complete), decoded.rows.slice(decoded.complete)
        if decoded.last is not None:
            self._ready += self._open
            self.ready_bytes += self.open_bytes
            self._open, self.open_bytes = [], 0
            self._last, self._committed_at = decoded.last, decoded.committed_at or self._committed_at
            self._transactions += decoded.transactions
        # by share of rows: Arrow walks all buffers to compute the size of a slice
        share = decoded.nbytes // max(1, decoded.rows.num_rows)
        if finished.num_rows:
            self._ready.append(finished)
            self.ready_bytes += share * finished.num_rows
        if rest.num_rows:
            self._open.append(rest)
            self.open_bytes += share * rest.num_rows

    def add_open(self, placed: PlacedChunk) -> None:
        """Add rows of the open transaction that are encoded already."""
        self._open.append(placed)
        self.open_bytes += placed.nbytes

    def take_ready(self) -> tuple[list[PendingItem], CommitBoundary] | None:
        """Remove all finished transactions, and return their rows and the boundary of their commit.

        Returns None if no transaction has finished since the last call.
        """
        if self._last is None:
            return None
        rows, end = self._ready, CommitBoundary(self._last, self._committed_at, self._transactions)
        self._ready = []
        self._last = None
        self._transactions = 0
        self.ready_bytes = 0
        return rows, end

    def take_finished(self) -> list[PendingItem]:
        """Remove and return the rows of finished transactions, to write them to data files before their commit."""
        batches, self._ready, self.ready_bytes = self._ready, [], 0
        return batches

    def take_open(self) -> list[PendingItem]:
        """Remove and return the rows of the open transaction, to write them to data files before it ends."""
        batches, self._open, self.open_bytes = self._open, [], 0
        return batches


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Encoded data files for the append stage, which writes them and may commit them."""

    files: list[EncodedFile]
    end: CommitBoundary | None
    """Boundary of the commit; None if a later batch commits the files.

    Without a boundary, the files contain part of an open transaction, or chunks of a copy.
    """

    is_trim: bool = False
    """True if the batch has no files and only lets the append stage trim the log or rewrite its small files."""


class CommitBatcher:
    """Collects rows in WAL order and yields batches to append; times are seconds of one monotonic clock.

    The encode stage calls the batcher. Other threads report appended batches, and request checks and trims.
    """

    def __init__(self, commit_bytes: int, linger: float, durable: DurablePosition, wake: Callable[[], None]) -> None:
        """commit_bytes: size in bytes from which a commit is due at once; linger: seconds between smaller commits.

        wake: makes the encode stage call `batches` again; raises QueueClosed if that stage has ended.
        """
        self._commit_bytes = commit_bytes
        self._linger = linger
        self._durable = durable
        self._wake = wake
        self._last = durable.position
        self._pending = PendingRows()
        self._is_copied = self._has_chunk = False
        self._chunks = 0
        self._yielded = self._appended = 0
        self._appended_at = self._arrived_at = 0.0
        self._source_is_idle = False
        """True if the source had no more rows when the last frames were decoded."""
        self._is_staged = False
        """True if the last batch has no commit boundary, so its files wait for a later commit."""
        self._trim_requested = False

    # called by other threads

    def seconds_to_gather(self, *, is_copying: bool) -> float:
        """Return for how long the receive stage gathers input that arrives steadily, before the input is decoded.

        is_copying: a copying thread waits for a watermark in the stream.
        """
        return min(self._linger * GATHER, COPY_GATHER if is_copying else MAX_GATHER)

    def record_append(self, now: float) -> None:
        """Record that the append stage has written a batch, and check whether a commit is due."""
        self._appended_at = now
        self._appended += 1
        self.check_again()

    def record_decoded(self, *, source_is_idle: bool) -> None:
        """Record whether the source has no more rows than those decoded; if so, check whether a commit is due."""
        self._source_is_idle = source_is_idle
        if source_is_idle:
            self.check_again()

    def check_again(self) -> None:
        """Make the encode stage check whether a commit is due; does nothing once that stage has ended."""
        with suppress(QueueClosed):
            self._wake()

    def request_trim(self) -> None:
        """Ask the append stage to trim the log; it does so as soon as no data file waits for a commit.

        Raises QueueClosed if the replication session has ended.
        """
        self._trim_requested = True
        self._wake()

    # called by the encode stage

    def add(self, arrived: DecodedRows | PlacedChunk, now: float) -> None:
        """Add rows from the decode stage, and count a chunk of a copy when its transaction ends."""
        self._arrived_at = now
        if isinstance(arrived, PlacedChunk):
            self._pending.add_open(arrived)
            self._is_copied = True
            return
        self._pending.add(arrived)
        self._is_copied = self._is_copied or arrived.copied
        if self._is_copied and arrived.last is not None:
            self._is_copied, self._has_chunk = False, True
            self._chunks += 1

    def next_due(self, *, more: bool) -> float | None:
        """Return the time at which the next commit is due if no more rows arrive.

        Returns None if no finished transaction is pending, or while the append stage is busy. A commit is due at once
        (0.0) if many rows wait and the source has no more. It is also due at once if a thread waits for it, even if the
        append stage is busy.

        more: True if more decoded rows are queued. Then a waiting thread makes a commit due only if the commit already
        has CHUNKS_PER_COMMIT chunks.
        """
        if not self._pending.is_ready:
            return None
        if (not more or self._chunks >= CHUNKS_PER_COMMIT) and self._durable.is_awaited(self._last, self._pending.last):
            return 0.0
        if self._yielded > self._appended:  # the append stage is busy
            return None
        if self._pending.ready_bytes < BUSY_BYTES:
            return self._appended_at + self._linger
        if self._source_is_idle and not more:
            return 0.0
        return min(self._arrived_at + QUIET, self._appended_at + self._linger * BUSY_LINGER)

    def batches(self, now: float, *, more: bool) -> Iterator[CommitBatch]:
        """Yield the batches that the append stage must write now, in order; often none.

        more: True if more decoded rows are queued.
        """
        due = self.next_due(more=more)
        is_due = due is not None and now >= due
        if self._has_chunk and not is_due:  # free the rows' memory while the next chunks arrive
            self._has_chunk = False
            yield self._batch(self._pending.take_finished(), None)
        is_large = self._pending.open_bytes > OPEN_LIMIT
        if is_due or is_large or self._pending.ready_bytes >= self._commit_bytes:
            yield from self.flush()
        if is_large:  # only open rows are left: flush() took the finished ones
            yield self._batch(self._pending.take_open(), None)
        if self._trim_requested and not self._is_staged:
            self._trim_requested = False
            yield CommitBatch([], None, is_trim=True)

    def flush(self) -> Iterator[CommitBatch]:
        """Yield one batch with a commit of all finished transactions; yield nothing if no transaction has finished."""
        if ready := self._pending.take_ready():
            self._last = ready[1].last
            self._has_chunk = False
            self._chunks = 0
            self._trim_requested = False  # the append stage trims after every commit
            yield self._batch(*ready)

    def _batch(self, items: list[PendingItem], end: CommitBoundary | None) -> CommitBatch:
        rows = [item for item in items if isinstance(item, pa.RecordBatch)]
        files = encode_files(pa.Table.from_batches(rows, LOG_SCHEMA))
        files += [item.encode() for item in items if isinstance(item, PlacedChunk)]
        items.clear()  # frees memory while the batch waits
        rows.clear()
        self._yielded += 1
        self._is_staged = end is None
        return CommitBatch(files, end)


@dataclass(slots=True, kw_only=True)
class LogAppender:
    """Writer of batches to the log, for the append stage of one replication session."""

    writer: RetryingWriter
    bound: WalBound
    lineage: CommitSource
    durable: DurablePosition
    metrics: Metrics
    pipeline: str
    has_received_all: Event
    """Event that is set when the receive stage has ended.

    From then on the writer raises an error if the storage is full, instead of waiting for free space.
    """
    _staged: list[StagedFile] = field(default_factory=list)
    """Data files on disk that no commit contains yet."""

    def append(self, batch: CommitBatch) -> None:
        """Write the files of a batch; if it has a commit boundary, commit all files that no commit contains yet.

        If the boundary is at or below the durable position, the log already has the rows: the files are dropped.
        """
        end, began = batch.end, time.monotonic()
        if end is not None and end.last <= self.durable.position:
            self._staged = []
            return
        if end is not None:
            self.bound.ask(end.last.lsn)
        self._staged += self.writer.stage_encoded(batch.files)
        if end is None:
            return
        self.bound.require(end.last.lsn)
        hit("after_data_file")
        files, self._staged = self._staged, []
        count = sum(file.rows for file in files)
        self.writer.commit(files, end.info(self.lineage, count))
        hit("after_log_commit")
        self.durable.advance(end.last)
        lag = max(0.0, time.time() - end.committed_at / 1e6) if end.committed_at else None
        nbytes, seconds = sum(file.size for file in files), time.monotonic() - began
        added = metrics.CommitMetrics(count, end.transactions, nbytes, seconds, lag)
        metrics.record_commit(self.metrics, self.pipeline, int(end.last), added)
