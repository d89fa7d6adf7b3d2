"""Gathering: decoded rows become data files, and it is decided what one commit holds and when; asks no clock itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc.capture.pending_rows import CommitBoundary, PendingRows
from cdc.change import LOG_SCHEMA
from cdc.log.durable_position import DurablePosition
from cdc.log.writer import EncodedFile, encoded
from cdc.pgoutput.decoder_events import Decoded

OPEN_LIMIT: Final = 16 * 1024 * 1024
"""Bytes of an unfinished transaction in memory; above it its rows go to data files that nobody sees yet."""
CHUNKS_PER_COMMIT: Final = 3
"""Of a copy in one commit, if somebody waits: longer would let connections rest that could read."""


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Data files that are not on disk yet."""

    files: list[EncodedFile]
    end: CommitBoundary | None
    """None of rows that are committed with a later batch: parts of a large transaction, and chunks of a copy."""


class CommitBatcher:
    """Rows in WAL order on their way into commits; times are seconds of one clock."""

    def __init__(self, commit_bytes: int, linger: float, reached: DurablePosition) -> None:
        """commit_bytes: of rows that wait for nothing; linger: seconds between small commits."""
        self._commit_bytes, self._linger, self._reached = commit_bytes, linger, reached
        self._last = reached.position
        self._pending = PendingRows()
        self._is_copied = self._has_chunk = False
        self._chunks = 0

    def take(self, arrived: Decoded) -> None:
        """Rows as they were decoded."""
        self._pending.add(arrived)
        self._is_copied = self._is_copied or arrived.copied
        if self._is_copied and arrived.last is not None:
            self._is_copied, self._has_chunk = False, True
            self._chunks += 1

    def due(self, free_since: float | None, *, more: bool) -> float | None:
        """When there is something to commit if nothing more arrives; None: not before that changes.

        free_since: when the last batch was appended, None while one is on its way: what comes meanwhile costs no
        commit of its own. more: rows wait to be taken, and may go into the commit that somebody waits for.
        """
        if not self._pending.is_ready:
            return None
        if (not more or self._chunks >= CHUNKS_PER_COMMIT) and self._reached.is_awaited(self._last, self._pending.last):
            return 0.0
        return None if free_since is None else free_since + self._linger

    def batches(self, now: float, free_since: float | None, *, more: bool) -> Iterator[CommitBatch]:
        """What is to be appended now, in order."""
        due = self.due(free_since, more=more)
        is_due = due is not None and now >= due
        if self._has_chunk and not is_due:  # nobody needs the memory of its rows while the next ones come
            self._has_chunk = False
            yield _batch(self._pending.take_finished(), None)
        is_large = self._pending.open_bytes > OPEN_LIMIT
        if is_due or is_large or self._pending.ready_bytes >= self._commit_bytes:
            yield from self.rest()
        if is_large:  # a part of the open transaction alone, for the finished ones went first
            yield _batch(self._pending.take_open(), None)

    def rest(self) -> Iterator[CommitBatch]:
        """All that is finished."""
        if ready := self._pending.take_ready():
            self._last, self._has_chunk, self._chunks = ready[1].last, False, 0
            yield _batch(*ready)


def _batch(rows: list[pa.RecordBatch], end: CommitBoundary | None) -> CommitBatch:
    files = encoded(pa.Table.from_batches(rows, LOG_SCHEMA))
    rows.clear()  # nobody needs them while the batch waits
    return CommitBatch(files, end)
