"""Chunk plans divide a table into chunks and track which chunks are read and durable.

A plan divides a whole table by blocks, in disk order. This is the fastest way to read a table, and several connections
can read in parallel. A key range or a condition is divided by key, one chunk after another. Plans by block and by key
adapt the chunk size to the rows that were read. A key list is divided into shorter lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Final, Protocol, Self

from cdc.postgres.chunk_queries import BlockRange, KeyBounds, StoredTable
from cdc.snapshot.backfill_documents import Blocks, TableBackfillState
from cdc.snapshot.chunk_rows import ChunkRows

FIRST_ROWS: Final = 5_000
"""Maximum number of rows in the first chunk by key; the size of later chunks depends on how wide these rows are."""
FIRST_BLOCKS: Final = 64
"""Maximum number of blocks in the first chunk of a plan by blocks."""
ROWS_PER_BLOCK: Final = 200
"""Estimated number of narrow rows in a block, used for the size of the first chunk."""
GROWTH: Final = 8
"""Maximum factor by which the chunk size grows from one chunk to the next; a split divides the size by this factor."""
LIST_KEYS: Final = 1_000
"""Number of keys per chunk of a key list."""
IDLE_FACTOR: Final = 3
"""Factor by which the byte limit of a chunk is raised while the stream is idle, so that a copy has fewer chunks."""
LINE_CUTS: Final = (*range(0, 300, 20), 1 << 14)
"""Line pointer numbers at which a block of wide rows is split.

A block of 8 kB has at most 291 line pointers, and no block has more than 16,384.
"""
NO_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Approximate maximum number of rows and bytes in a chunk."""

    rows: int
    nbytes: int
    """Maximum size of the rows in Arrow format, in bytes."""

    def bytes_of(self, part: ChunkRange) -> int | None:
        """Return the size in bytes above which a range is split instead of copied; None if it cannot be split."""
        return None if part.is_smallest else (IDLE_FACTOR + 1) * self.nbytes


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """A part of a table that is read as one chunk."""

    rows: KeyBounds | BlockRange
    limit: int = NO_LIMIT
    """Maximum number of rows; applies only to a range by key."""
    delete_missing: bool = False
    """True if the chunk contains a delete row for each of its listed keys without a row at the source."""

    @property
    def is_smallest(self) -> bool:
        """True if the range cannot be split."""
        if isinstance(self.rows, BlockRange):
            return self.rows.lines is not None and self.rows.lines[1] - self.rows.lines[0] == 1
        if self.rows.keys is not None:
            return len(self.rows.keys) == 1
        return self.limit in {1, NO_LIMIT}


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Number, size and last key of the rows that were read for one chunk."""

    part: ChunkRange
    rows: int
    nbytes: int
    """Size of the rows in Arrow format, in bytes."""
    last: tuple[str, ...] | None
    """Key of the last row; None if the chunk has no rows or the table has no key."""
    is_idle: bool
    """True if the stream received no rows while the chunk was read; a larger chunk would then delay no change."""

    @classmethod
    def of(cls, part: ChunkRange, rows: ChunkRows, *, is_idle: bool = False) -> Self:
        """Return the result for a range and the rows that were read for it."""
        return cls(part, rows.count, rows.nbytes, rows.last_key, is_idle)


class ChunkPlan(Protocol):
    """Divides one table into chunks and tracks the progress of copying them."""

    parallel: bool
    """True if several connections may read chunks at the same time."""

    def next_range(self) -> ChunkRange | None:
        """Return the next range to read; None if every range was already returned."""

    def record_read(self, read: ChunkResult) -> None:
        """Record the result of reading a range. The plan then chooses the start and size of the next range."""

    def split(self, part: ChunkRange) -> None:
        """Replace a range that was too large by smaller ranges."""

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        """Return the range to read again in place of a chunk that could not be merged."""

    def mark_durable(self, read: ChunkResult) -> None:
        """Record in the table's state that the log contains the chunk."""


class KeyRangePlan:
    """Plan that divides a key range, or the rows that match a condition, into chunks in key order."""

    parallel = False

    def __init__(self, state: TableBackfillState, bounds: KeyBounds, limits: ChunkLimits) -> None:
        self._state, self._limits = state, limits
        after = None if state.after is None else tuple(state.after)
        self._next: KeyBounds | None = replace(bounds, after=after)
        self._size = min(FIRST_ROWS, limits.rows)

    def next_range(self) -> ChunkRange | None:
        """Return the next range; None at the end.

        The caller must pass the result of a range to `record_read` before it calls this method again.
        """
        return None if self._next is None else ChunkRange(self._next, self._size)

    def record_read(self, read: ChunkResult) -> None:
        self._next = replace(_bounds(read.part), after=read.last) if read.rows == read.part.limit else None
        if read.rows:
            self._size = max(1, min(self._limits.rows, self._limits.nbytes * read.rows // max(1, read.nbytes)))

    def split(self, part: ChunkRange) -> None:
        self._size = max(1, part.limit // GROWTH)

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        bounds = _bounds(read.part)
        last = read.last if read.rows == read.part.limit else bounds.last
        return ChunkRange(replace(bounds, last=last))

    def mark_durable(self, read: ChunkResult) -> None:
        """Record the last key of a durable chunk; the caller must mark chunks in key order."""
        self._state.after = self._state.after if read.last is None else list(read.last)


class KeyListPlan:
    """Plan that divides a key list into chunks of up to LIST_KEYS keys.

    With `delete_missing`, a chunk contains a delete row for each key without a row at the source.
    """

    parallel = True

    def __init__(self, keys: Sequence[tuple[str, ...]], *, delete_missing: bool = False) -> None:
        self._delete_missing = delete_missing
        self._unread = [tuple(keys[start : start + LIST_KEYS]) for start in range(0, len(keys), LIST_KEYS)]
        self._lock = Lock()

    def next_range(self) -> ChunkRange | None:
        with self._lock:
            return (
                ChunkRange(KeyBounds(keys=self._unread.pop()), delete_missing=self._delete_missing)
                if self._unread
                else None
            )

    def record_read(self, read: ChunkResult) -> None:
        """Do nothing, because the size of the chunks is fixed."""

    def split(self, part: ChunkRange) -> None:
        keys = _bounds(part).keys or ()
        middle = len(keys) // 2
        with self._lock:
            self._unread += [keys[middle:], keys[:middle]]

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        return read.part

    def mark_durable(self, read: ChunkResult) -> None:
        """Do nothing, because the whole list is read again after a crash."""


class BlockPlan:
    """Plan that divides a whole table into block ranges, in disk order."""

    parallel = True

    def __init__(self, state: TableBackfillState, leaves: Sequence[StoredTable], limits: ChunkLimits) -> None:
        self._state, self._limits, self._lock = state, limits, Lock()
        self._leaves = {leaf.oid: leaf for leaf in leaves}
        self._unread = _unread_blocks(state, leaves)
        self._returned: list[BlockRange] = []
        self._reading: set[BlockRange] = set()
        self._size = max(1, min(FIRST_BLOCKS, limits.rows // ROWS_PER_BLOCK))
        self._save_progress()

    def next_range(self) -> ChunkRange | None:
        with self._lock:
            span = self._returned.pop() if self._returned else self._following()
            if span is None:
                return None
            self._reading.add(span)
            return ChunkRange(span)

    def _following(self) -> BlockRange | None:
        for part in self._unread:
            if part.next < part.end:
                first, part.next = part.next, min(part.next + self._size, part.end)
                return BlockRange(self._leaves[part.oid], first, part.next)
        return None

    def record_read(self, read: ChunkResult) -> None:
        span, limits = _block_range(read.part), self._limits
        if span.lines is not None:
            return
        blocks = span.end - span.first
        nbytes = limits.nbytes * (IDLE_FACTOR if read.is_idle else 1)
        fits = min(limits.rows * blocks // max(1, read.rows), nbytes * blocks // max(1, read.nbytes))
        with self._lock:
            self._size = max(1, min(fits, blocks * GROWTH))

    def split(self, part: ChunkRange) -> None:
        span = _block_range(part)
        with self._lock:
            self._reading.discard(span)
            self._returned += reversed(_split(span))
            self._size = max(1, (span.end - span.first) // GROWTH)

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        return read.part

    def mark_durable(self, read: ChunkResult) -> None:
        """Record that a chunk is durable; chunks may be marked in any order."""
        with self._lock:
            self._reading.discard(_block_range(read.part))
            self._save_progress()

    def _save_progress(self) -> None:
        """Save in the table's state which blocks are not durable: unread blocks, split ranges, and pending chunks."""
        spans = (*self._reading, *self._returned)
        waiting = {(span.leaf.oid, span.leaf.file, span.first, span.end) for span in spans}
        self._state.blocks = [Blocks(*span) for span in sorted(waiting)] + [replace(part) for part in self._unread]


def _split(span: BlockRange) -> list[BlockRange]:
    """Split a block range that was too large into smaller ranges, and return them in the order to read."""
    if span.end - span.first > 1:
        middle = (span.first + span.end) // 2
        return [replace(span, end=middle), replace(span, first=middle)]
    low, high = span.lines or (0, 0)
    bounds = (low, (low + high) // 2, high) if span.lines else LINE_CUTS
    return [replace(span, lines=lines) for lines in pairwise(bounds)]


def _unread_blocks(state: TableBackfillState, leaves: Sequence[StoredTable]) -> list[Blocks]:
    """Return the blocks to read in all leaf tables, and set the size of the table in the state.

    If the copy of a leaf table has begun and its file is still the same, only the remaining blocks are returned.
    """
    left = list[Blocks]()
    for leaf in leaves:
        begun = [part for part in state.blocks or () if (part.oid, part.file) == (leaf.oid, leaf.file)]
        last = max(begun, key=lambda part: part.end, default=Blocks(leaf.oid, leaf.file, 0, leaf.blocks))
        left += [part for part in begun if part.next < part.end and part is not last]
        left.append(last)  # kept even if empty: it records that the leaf was begun, and its size
    state.size = sum({part.oid: part.end for part in left}.values())
    return left


def _bounds(part: ChunkRange) -> KeyBounds:
    assert isinstance(part.rows, KeyBounds)  # noqa: S101 - a plan gets only its own ranges back
    return part.rows


def _block_range(part: ChunkRange) -> BlockRange:
    assert isinstance(part.rows, BlockRange)  # noqa: S101 - a plan gets only its own ranges back
    return part.rows
