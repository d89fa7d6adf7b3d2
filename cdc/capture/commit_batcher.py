"""Commit batcher: groups decoded transactions into commits of the log, and decides when each commit is due.

A commit contains whole transactions. The rows of a large open transaction, and of a copy's chunks, are encoded to data
files early; they become visible with a later commit. Callers pass the time: the batcher reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc.change import LOG_SCHEMA
from cdc.log.durable_position import DurablePosition
from cdc.log.layout import CommitInfo, CommitSource
from cdc.log.writer import EncodedFile, encode_files
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.position import Position

OPEN_LIMIT: Final = 16 * 1024 * 1024
"""Bytes of an open transaction kept in memory; above it, its rows go to data files that no commit contains yet."""
CHUNKS_PER_COMMIT: Final = 3
"""Chunks of a copy after which a commit is due if a thread waits for it; more would idle the copying connections."""


@dataclass(frozen=True, slots=True)
class CommitBoundary:
    """Last position, commit time and transaction count of one commit."""

    last: Position
    committed_at: int
    transactions: int

    def info(self, lineage: CommitSource, rows: int) -> CommitInfo:
        """The commit's metadata for the log."""
        return CommitInfo(
            last=self.last,
            committed_at=self.committed_at,
            rows=rows,
            transactions=self.transactions,
            **lineage._asdict(),
        )


class PendingRows:
    """Rows in WAL order that wait for a commit; a transaction moves from open to ready as a whole."""

    def __init__(self) -> None:
        self._ready: list[pa.RecordBatch] = []
        self._open: list[pa.RecordBatch] = []
        self.ready_bytes = 0
        """Bytes of rows of finished transactions."""
        self.open_bytes = 0
        """Bytes of rows of the open transaction."""
        self._last: Position | None = None
        self._committed_at = 0
        self._transactions = 0

    @property
    def is_ready(self) -> bool:
        """Whether a finished transaction waits."""
        return self._last is not None

    @property
    def last(self) -> Position:
        """Last position of a commit made now; 0 if there is nothing to commit."""
        return self._last or Position(0)

    def add(self, decoded: DecodedRows) -> None:
        """Add decoded rows."""
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

    def take_ready(self) -> tuple[list[pa.RecordBatch], CommitBoundary] | None:
        """Remove and return all finished transactions; None if there is nothing to commit."""
        if self._last is None:
            return None
        rows, end = self._ready, CommitBoundary(self._last, self._committed_at, self._transactions)
        self._ready, self._last, self._transactions = [], None, 0
        self.ready_bytes = 0
        return rows, end

    def take_finished(self) -> list[pa.RecordBatch]:
        """Remove and return rows of finished transactions, to write them before their commit."""
        batches, self._ready, self.ready_bytes = self._ready, [], 0
        return batches

    def take_open(self) -> list[pa.RecordBatch]:
        """Remove and return rows of the open transaction, to write them before it ends."""
        batches, self._open, self.open_bytes = self._open, [], 0
        return batches


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Encoded data files that are not on disk yet."""

    files: list[EncodedFile]
    end: CommitBoundary | None
    """None if a later batch commits the files: parts of a large transaction, or chunks of a copy."""


class CommitBatcher:
    """Collects rows in WAL order and yields batches to append; times are seconds of one monotonic clock."""

    def __init__(self, commit_bytes: int, linger: float, durable: DurablePosition) -> None:
        """commit_bytes: a commit of this size is due at once; linger: seconds between smaller commits."""
        self._commit_bytes, self._linger, self._durable = commit_bytes, linger, durable
        self._last = durable.position
        self._pending = PendingRows()
        self._is_copied = self._has_chunk = False
        self._chunks = 0

    def add(self, arrived: DecodedRows) -> None:
        """Add decoded rows."""
        self._pending.add(arrived)
        self._is_copied = self._is_copied or arrived.copied
        if self._is_copied and arrived.last is not None:
            self._is_copied, self._has_chunk = False, True
            self._chunks += 1

    def next_due(self, free_since: float | None, *, more: bool) -> float | None:
        """When the next commit is due if no more rows arrive; None if none is due.

        free_since: when the last batch was appended, None while the append stage is busy; rows that arrive meanwhile
        join one commit. more: decoded rows are queued and may join a commit that a thread waits for.
        """
        if not self._pending.is_ready:
            return None
        if (not more or self._chunks >= CHUNKS_PER_COMMIT) and self._durable.is_awaited(self._last, self._pending.last):
            return 0.0
        return None if free_since is None else free_since + self._linger

    def batches(self, now: float, free_since: float | None, *, more: bool) -> Iterator[CommitBatch]:
        """Batches to append now, in order."""
        due = self.next_due(free_since, more=more)
        is_due = due is not None and now >= due
        if self._has_chunk and not is_due:  # free the rows' memory while the next chunks arrive
            self._has_chunk = False
            yield _batch(self._pending.take_finished(), None)
        is_large = self._pending.open_bytes > OPEN_LIMIT
        if is_due or is_large or self._pending.ready_bytes >= self._commit_bytes:
            yield from self.flush()
        if is_large:  # only open rows are left: flush() took the finished ones
            yield _batch(self._pending.take_open(), None)

    def flush(self) -> Iterator[CommitBatch]:
        """All finished transactions, as one batch."""
        if ready := self._pending.take_ready():
            self._last, self._has_chunk, self._chunks = ready[1].last, False, 0
            yield _batch(*ready)


def _batch(rows: list[pa.RecordBatch], end: CommitBoundary | None) -> CommitBatch:
    files = encode_files(pa.Table.from_batches(rows, LOG_SCHEMA))
    rows.clear()  # frees memory while the batch waits
    return CommitBatch(files, end)
