"""Chunk plans: how a table is divided into chunks, which chunks are read, and which range is next.

A whole table is divided by blocks, in disk order; that is the fastest way to read it, and any connection can read any
range. A key range or a predicate is divided by key, one chunk after another. Both adapt the chunk size to what they
have read. A key list is divided into shorter lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Final, Protocol, Self

import pyarrow as pa

from cdc.postgres.chunk_snapshot import BlockRange, KeyBounds, StoredTable
from cdc.snapshot.backfill_state import Blocks, TableBackfillState

FIRST_ROWS: Final = 5_000
"""Rows of the first chunk by key, which shows how wide the rows are."""
FIRST_BLOCKS: Final = 64
"""Blocks of the first chunk by blocks."""
ROWS_PER_BLOCK: Final = 200
"""Estimate for narrow rows, used for the size of the first chunk."""
GROWTH: Final = 8
"""Factor by which a chunk may exceed the previous one."""
LIST_KEYS: Final = 1_000
"""Keys per chunk of a key list."""
IDLE_FACTOR: Final = 3
"""Factor by which chunks are larger while the stream is idle, because each costs a commit."""
LINE_CUTS: Final = (*range(0, 300, 20), 1 << 14)
"""Line numbers at which a block of wide rows is split: a block of 8 kB has at most 291 lines, none more than 16,384."""
NO_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Approximate maximum size of a chunk."""

    rows: int
    nbytes: int
    """Bytes of the rows in Arrow format."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Rows to read as one chunk."""

    rows: KeyBounds | BlockRange
    limit: int = NO_LIMIT
    """Maximum number of rows; used for key bounds only."""
    delete_missing: bool = False
    """Whether a listed key without a row becomes a deletion."""

    @property
    def is_smallest(self) -> bool:
        """Whether the range cannot be split."""
        if isinstance(self.rows, BlockRange):
            return self.rows.lines is not None and self.rows.lines[1] - self.rows.lines[0] == 1
        if self.rows.keys is not None:
            return len(self.rows.keys) == 1
        return self.limit in {1, NO_LIMIT}


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Result of reading one range."""

    part: ChunkRange
    rows: int
    nbytes: int
    """Bytes of the rows in Arrow format."""
    last: tuple[str, ...] | None
    """Key of the last row; None without rows."""
    is_idle: bool
    """Whether the stream received no rows meanwhile: then a larger chunk delays no change."""

    @classmethod
    def of(cls, part: ChunkRange, rows: pa.Table, *, is_idle: bool = False) -> Self:
        """Build it from the rows (LOG_SCHEMA)."""
        key = rows["key"][-1].as_py() if rows.num_rows else None
        return cls(part, rows.num_rows, rows.nbytes, None if key is None else tuple(key), is_idle)


class ChunkPlan(Protocol):
    """Division of one table into chunks, and its progress; thread-safe."""

    parallel: bool
    """Whether several connections may read concurrently."""

    def next_range(self) -> ChunkRange | None:
        """The next range to read; None if all ranges are taken."""

    def record_read(self, read: ChunkResult) -> None:
        """Adapt the chunk size, and find the start of the next range."""

    def split(self, part: ChunkRange) -> None:
        """Replace a range that was too large by smaller ones."""

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        """The range to read again for the same rows in their current state."""

    def mark_durable(self, read: ChunkResult) -> None:
        """Record in the table's state that the log contains the chunk."""


class KeyRangePlan:
    """Chunks of a key range or predicate, in key order."""

    parallel = False

    def __init__(self, state: TableBackfillState, bounds: KeyBounds, limits: ChunkLimits) -> None:
        self._state, self._limits = state, limits
        after = None if state.after is None else tuple(state.after)
        self._next: KeyBounds | None = replace(bounds, after=after)
        self._size = min(FIRST_ROWS, limits.rows)

    def next_range(self) -> ChunkRange | None:
        """See ChunkPlan; called again only after the previous range was read."""
        return None if self._next is None else ChunkRange(self._next, self._size)

    def record_read(self, read: ChunkResult) -> None:
        """See ChunkPlan."""
        self._next = replace(_bounds(read.part), after=read.last) if read.rows == read.part.limit else None
        if read.rows:
            self._size = max(1, min(self._limits.rows, self._limits.nbytes * read.rows // max(1, read.nbytes)))

    def split(self, part: ChunkRange) -> None:
        """See ChunkPlan."""
        self._size = max(1, part.limit // GROWTH)

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        """See ChunkPlan."""
        bounds = _bounds(read.part)
        last = read.last if read.rows == read.part.limit else bounds.last
        return ChunkRange(replace(bounds, last=last))

    def mark_durable(self, read: ChunkResult) -> None:
        """See ChunkPlan; chunks become durable in key order."""
        self._state.after = self._state.after if read.last is None else list(read.last)


class KeyListPlan:
    """Chunks of a key list: the keys' rows, and with `delete_missing` a deletion for each key without a row."""

    parallel = True

    def __init__(self, keys: Sequence[tuple[str, ...]], *, delete_missing: bool = False) -> None:
        self._delete_missing = delete_missing
        self._unread = [tuple(keys[start : start + LIST_KEYS]) for start in range(0, len(keys), LIST_KEYS)]
        self._lock = Lock()

    def next_range(self) -> ChunkRange | None:
        """See ChunkPlan."""
        with self._lock:
            return (
                ChunkRange(KeyBounds(keys=self._unread.pop()), delete_missing=self._delete_missing)
                if self._unread
                else None
            )

    def record_read(self, read: ChunkResult) -> None:
        """See ChunkPlan."""

    def split(self, part: ChunkRange) -> None:
        """See ChunkPlan."""
        keys = _bounds(part).keys or ()
        middle = len(keys) // 2
        with self._lock:
            self._unread += [keys[middle:], keys[:middle]]

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        """See ChunkPlan."""
        return read.part

    def mark_durable(self, read: ChunkResult) -> None:
        """See ChunkPlan; records nothing: after a crash the list is read again, which is cheap and idempotent."""


class BlockPlan:
    """Chunks of a whole table by block ranges, in disk order."""

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
        """See ChunkPlan."""
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
        """See ChunkPlan."""
        span, limits = _block_range(read.part), self._limits
        if span.lines is not None:
            return
        blocks = span.end - span.first
        nbytes = limits.nbytes * (IDLE_FACTOR if read.is_idle else 1)
        fits = min(limits.rows * blocks // max(1, read.rows), nbytes * blocks // max(1, read.nbytes))
        with self._lock:
            self._size = max(1, min(fits, blocks * GROWTH))

    def split(self, part: ChunkRange) -> None:
        """See ChunkPlan."""
        span = _block_range(part)
        with self._lock:
            self._reading.discard(span)
            self._returned += reversed(_split(span))
            self._size = max(1, (span.end - span.first) // GROWTH)

    def range_to_reread(self, read: ChunkResult) -> ChunkRange:
        """See ChunkPlan."""
        return read.part

    def mark_durable(self, read: ChunkResult) -> None:
        """See ChunkPlan; chunks become durable in any order."""
        with self._lock:
            self._reading.discard(_block_range(read.part))
            self._save_progress()

    def _save_progress(self) -> None:
        """Save the blocks that are not durable: unread ones and those in progress."""
        spans = (*self._reading, *self._returned)
        waiting = {(span.leaf.oid, span.leaf.file, span.first, span.end) for span in spans}
        self._state.blocks = [Blocks(*span) for span in sorted(waiting)] + [replace(part) for part in self._unread]


def _split(span: BlockRange) -> list[BlockRange]:
    """Smaller ranges that replace a block range, in order."""
    if span.end - span.first > 1:
        middle = (span.first + span.end) // 2
        return [replace(span, end=middle), replace(span, first=middle)]
    low, high = span.lines or (0, 0)
    bounds = (low, (low + high) // 2, high) if span.lines else LINE_CUTS
    return [replace(span, lines=lines) for lines in pairwise(bounds)]


def _unread_blocks(state: TableBackfillState, leaves: Sequence[StoredTable]) -> list[Blocks]:
    """Blocks to read; of leaf tables that were begun and not rewritten since, the rest."""
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
