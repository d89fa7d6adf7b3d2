"""Gathering: decoded rows become data files, and it is decided what one commit holds and when; asks no clock itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc.change import LOG_SCHEMA
from cdc.log.append import EncodedFile, encoded
from cdc.log.pending import End, Pending
from cdc.pgoutput.transactions import Decoded
from cdc.position import Position

OPEN_LIMIT: Final = 16 * 1024 * 1024
"""Bytes of an unfinished transaction in memory; above it its rows go to data files that nobody sees yet."""
ADVANCE_EVERY: Final = 1.0
"""Seconds between empty commits that answer a keepalive; a stopping server asks many times a second."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Data files that are not on disk yet."""

    files: list[EncodedFile]
    end: End | None
    """None of a part of a large transaction: it is committed with the batch that ends that."""


class Gathering:
    """Rows in WAL order on their way into commits; times are seconds of one clock."""

    def __init__(self, commit_bytes: int, linger: float, last: Position) -> None:
        """commit_bytes: of rows that wait for nothing; linger: seconds between small commits; last: what is durable."""
        self._commit_bytes, self._linger, self._last = commit_bytes, linger, last
        self._pending = Pending()
        self._is_split = self._is_copied = self._is_urgent = False
        self._advance_due = 0.0

    def take(self, arrived: Decoded | Position, now: float) -> None:
        """Rows, or the position that the stream has reached without any."""
        if isinstance(arrived, Decoded):
            self._pending.add(arrived)
            self._is_copied = self._is_copied or arrived.copied
            if self._is_copied and arrived.last is not None:  # the next chunk is not read before this one is durable
                self._is_copied, self._is_urgent = False, True
        elif not (self._is_split or self._pending.open_bytes) and now >= self._advance_due:
            self._advance_due = now + ADVANCE_EVERY
            self._pending.advance(max(arrived, self._last), 0)

    def due(self, free_since: float | None) -> float | None:
        """When there is something to commit if nothing more arrives; None: not before that changes.

        free_since: when the last batch was appended, None while one is on its way: what comes meanwhile costs no
        commit of its own.
        """
        if not self._pending.is_ready:
            return None
        if self._is_urgent:
            return 0.0
        return None if free_since is None else free_since + self._linger

    def batches(self, now: float, free_since: float | None) -> Iterator[Batch]:
        """What is to be appended now, in order."""
        is_large = self._pending.open_bytes > OPEN_LIMIT
        is_full = is_large or self._pending.ready_bytes >= self._commit_bytes
        due = self.due(free_since)
        if is_full or (due is not None and now >= due):
            yield from self.rest()
        if is_large:  # a part of the open transaction alone, for the finished ones went first
            self._is_split = True
            yield _batch(self._pending.take_open(), None)

    def rest(self) -> Iterator[Batch]:
        """All that is finished."""
        if ready := self._pending.take_ready():
            self._last, self._is_split, self._is_urgent = ready[1].last, False, False
            yield _batch(*ready)


def _batch(rows: list[pa.RecordBatch], end: End | None) -> Batch:
    files = encoded(pa.Table.from_batches(rows, LOG_SCHEMA))
    rows.clear()  # nobody needs them while the batch waits
    return Batch(files, end)
