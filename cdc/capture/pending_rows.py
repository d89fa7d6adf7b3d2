"""Pending: decoded rows on their way into one commit, whole transactions kept apart from an open one."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cdc.log.layout import CommitInfo, Lineage
from cdc.pgoutput.decoder_events import Decoded
from cdc.position import Position


@dataclass(frozen=True, slots=True)
class CommitBoundary:
    """Of what one commit will hold."""

    last: Position
    committed_at: int
    transactions: int

    def info(self, lineage: Lineage, rows: int) -> CommitInfo:
        """The commit's own words."""
        return CommitInfo(
            last=self.last,
            committed_at=self.committed_at,
            rows=rows,
            transactions=self.transactions,
            **lineage._asdict(),
        )


class PendingRows:
    """Collects rows in WAL order; a transaction moves from open to ready as a whole."""

    def __init__(self) -> None:
        self._ready: list[pa.RecordBatch] = []
        self._open: list[pa.RecordBatch] = []
        self.ready_bytes = 0
        """Of the rows of finished transactions."""
        self.open_bytes = 0
        """Of the rows of the transaction that is not finished yet."""
        self._last: Position | None = None
        self._committed_at = 0
        self._transactions = 0

    @property
    def is_ready(self) -> bool:
        """Whether a finished transaction waits."""
        return self._last is not None

    @property
    def last(self) -> Position:
        """Where a commit would end now; 0 if there is nothing to commit."""
        return self._last or Position(0)

    def add(self, decoded: Decoded) -> None:
        """Take rows as decoded."""
        finished, rest = decoded.rows.slice(0, decoded.complete), decoded.rows.slice(decoded.complete)
        if decoded.last is not None:
            self._ready += self._open
            self.ready_bytes += self.open_bytes
            self._open, self.open_bytes = [], 0
            self._last, self._committed_at = decoded.last, decoded.committed_at or self._committed_at
            self._transactions += decoded.transactions
        # by share: asking Arrow for the size of a slice walks all of its buffers
        share = decoded.nbytes // max(1, decoded.rows.num_rows)
        if finished.num_rows:
            self._ready.append(finished)
            self.ready_bytes += share * finished.num_rows
        if rest.num_rows:
            self._open.append(rest)
            self.open_bytes += share * rest.num_rows

    def take_ready(self) -> tuple[list[pa.RecordBatch], CommitBoundary] | None:
        """Everything finished, once; None when there is nothing to commit."""
        if self._last is None:
            return None
        rows, end = self._ready, CommitBoundary(self._last, self._committed_at, self._transactions)
        self._ready, self._last, self._transactions = [], None, 0
        self.ready_bytes = 0
        return rows, end

    def take_finished(self) -> list[pa.RecordBatch]:
        """The rows of finished transactions, to be written to disk before their commit."""
        batches, self._ready, self.ready_bytes = self._ready, [], 0
        return batches

    def take_open(self) -> list[pa.RecordBatch]:
        """The rows of the open transaction, to be written to disk before it ends."""
        batches, self._open, self.open_bytes = self._open, [], 0
        return batches
