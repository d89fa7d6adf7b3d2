"""Cuts: how a table is cut into chunks, which of them are read already, and where the next begins.

A whole table is cut by blocks, in the order in which it lies on disk: the fastest way to read it, and any connection
can take the next part. A range of keys, or what a predicate says, is cut by key, one part after another. Both learn
from what they read how large a part should be. Listed keys are cut into lists.
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
"""Rows of the first part by key, which tells how wide rows are."""
FIRST_BLOCKS: Final = 64
"""Blocks of the first part by blocks."""
ROWS_PER_BLOCK: Final = 200
"""As many as narrow rows have; what a first part is measured by."""
GROWTH: Final = 8
"""By how much a part may be larger than the one before."""
LIST_KEYS: Final = 1_000
"""Keys of one part of a list."""
IDLE_FACTOR: Final = 3
"""By how much parts are larger while the stream is quiet: each costs a commit."""
LINE_CUTS: Final = (*range(0, 300, 20), 1 << 14)
"""Where a block of rows too wide for one part is cut: one of 8 kB has room for 291, none for more than 16,384."""
NO_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """How large a part may be, about."""

    rows: int
    nbytes: int
    """Of the rows as Arrow."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """What is read at once."""

    rows: KeyBounds | BlockRange
    limit: int = NO_LIMIT
    """Rows at most; of weight only for bounds."""
    gone: bool = False
    """Whether a listed key without a row is told as deleted."""

    @property
    def is_smallest(self) -> bool:
        """Whether it cannot be cut any smaller."""
        if isinstance(self.rows, BlockRange):
            return self.rows.lines is not None and self.rows.lines[1] - self.rows.lines[0] == 1
        if self.rows.keys is not None:
            return len(self.rows.keys) == 1
        return self.limit in {1, NO_LIMIT}


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What came of a part."""

    part: ChunkRange
    rows: int
    nbytes: int
    """As Arrow."""
    last: tuple[str, ...] | None
    """The last row's key; None without rows."""
    quiet: bool
    """Whether the stream brought nothing meanwhile: then a larger part keeps nobody waiting."""

    @classmethod
    def of(cls, part: ChunkRange, rows: pa.Table, *, quiet: bool = False) -> Self:
        """From the rows (LOG_SCHEMA)."""
        key = rows["key"][-1].as_py() if rows.num_rows else None
        return cls(part, rows.num_rows, rows.nbytes, None if key is None else tuple(key), quiet)


class ChunkPlan(Protocol):
    """One table on its way; safe for several threads."""

    parallel: bool
    """Whether several connections may read at once."""

    def take(self) -> ChunkRange | None:
        """The next part, or None when no more is to be read."""

    def came(self, read: ChunkResult) -> None:
        """Learn from what was read, and where the next part begins."""

    def too_large(self, part: ChunkRange) -> None:
        """It was given up, for it is too large; smaller ones take its place."""

    def again(self, read: ChunkResult) -> ChunkRange:
        """The part that has all the rows which that one had, as they are by now."""

    def durable(self, read: ChunkResult) -> None:
        """The log holds it: note it in the table's work."""


class KeyRangePlan:
    """A range, in the order of the key."""

    parallel = False

    def __init__(self, done: TableBackfillState, bounds: KeyBounds, limits: ChunkLimits) -> None:
        self._done, self._limits = done, limits
        after = None if done.after is None else tuple(done.after)
        self._next: KeyBounds | None = replace(bounds, after=after)
        self._size = min(FIRST_ROWS, limits.rows)

    def take(self) -> ChunkRange | None:
        """See Cut; asked again only when the part before came."""
        return None if self._next is None else ChunkRange(self._next, self._size)

    def came(self, read: ChunkResult) -> None:
        """See Cut."""
        self._next = replace(_bounds(read.part), after=read.last) if read.rows == read.part.limit else None
        if read.rows:
            self._size = max(1, min(self._limits.rows, self._limits.nbytes * read.rows // max(1, read.nbytes)))

    def too_large(self, part: ChunkRange) -> None:
        """See Cut."""
        self._size = max(1, part.limit // GROWTH)

    def again(self, read: ChunkResult) -> ChunkRange:
        """See Cut."""
        bounds = _bounds(read.part)
        last = read.last if read.rows == read.part.limit else bounds.last
        return ChunkRange(replace(bounds, last=last))

    def durable(self, read: ChunkResult) -> None:
        """See Cut; parts come in their order."""
        self._done.after = self._done.after if read.last is None else list(read.last)


class KeyListPlan:
    """Listed keys: their rows, and with `gone` a deletion of those that have none."""

    parallel = True

    def __init__(self, keys: Sequence[tuple[str, ...]], *, gone: bool = False) -> None:
        self._gone = gone
        self._left = [tuple(keys[start : start + LIST_KEYS]) for start in range(0, len(keys), LIST_KEYS)]
        self._lock = Lock()

    def take(self) -> ChunkRange | None:
        """See Cut."""
        with self._lock:
            return ChunkRange(KeyBounds(keys=self._left.pop()), gone=self._gone) if self._left else None

    def came(self, read: ChunkResult) -> None:
        """See Cut."""

    def too_large(self, part: ChunkRange) -> None:
        """See Cut."""
        keys = _bounds(part).keys or ()
        middle = len(keys) // 2
        with self._lock:
            self._left += [keys[middle:], keys[:middle]]

    def again(self, read: ChunkResult) -> ChunkRange:
        """See Cut."""
        return read.part

    def durable(self, read: ChunkResult) -> None:
        """See Cut; nothing is noted: after a crash a list is read again, which costs little and changes nothing."""


class BlockPlan:
    """A whole table, as it lies on disk."""

    parallel = True

    def __init__(self, done: TableBackfillState, leaves: Sequence[StoredTable], limits: ChunkLimits) -> None:
        self._done, self._limits, self._lock = done, limits, Lock()
        self._leaves = {leaf.oid: leaf for leaf in leaves}
        self._left = _unread_blocks(done, leaves)
        self._returned: list[BlockRange] = []
        self._reading: set[BlockRange] = set()
        self._size = max(1, min(FIRST_BLOCKS, limits.rows // ROWS_PER_BLOCK))
        self._note()

    def take(self) -> ChunkRange | None:
        """See Cut."""
        with self._lock:
            span = self._returned.pop() if self._returned else self._following()
            if span is None:
                return None
            self._reading.add(span)
            return ChunkRange(span)

    def _following(self) -> BlockRange | None:
        for part in self._left:
            if part.next < part.end:
                first, part.next = part.next, min(part.next + self._size, part.end)
                return BlockRange(self._leaves[part.oid], first, part.next)
        return None

    def came(self, read: ChunkResult) -> None:
        """See Cut."""
        span, limits = _block_range(read.part), self._limits
        if span.lines is not None:
            return
        blocks = span.end - span.first
        nbytes = limits.nbytes * (IDLE_FACTOR if read.quiet else 1)
        fits = min(limits.rows * blocks // max(1, read.rows), nbytes * blocks // max(1, read.nbytes))
        with self._lock:
            self._size = max(1, min(fits, blocks * GROWTH))

    def too_large(self, part: ChunkRange) -> None:
        """See Cut."""
        span = _block_range(part)
        with self._lock:
            self._reading.discard(span)
            self._returned += reversed(_split(span))
            self._size = max(1, (span.end - span.first) // GROWTH)

    def again(self, read: ChunkResult) -> ChunkRange:
        """See Cut."""
        return read.part

    def durable(self, read: ChunkResult) -> None:
        """See Cut; what others read before it and after it is no matter."""
        with self._lock:
            self._reading.discard(_block_range(read.part))
            self._note()

    def _note(self) -> None:
        """Left is what nobody has taken, and what is on its way."""
        spans = (*self._reading, *self._returned)
        waiting = {(span.leaf.oid, span.leaf.file, span.first, span.end) for span in spans}
        self._done.blocks = [Blocks(*span) for span in sorted(waiting)] + [replace(part) for part in self._left]


def _split(span: BlockRange) -> list[BlockRange]:
    """What takes the place of a span, in its order."""
    if span.end - span.first > 1:
        middle = (span.first + span.end) // 2
        return [replace(span, end=middle), replace(span, first=middle)]
    low, high = span.lines or (0, 0)
    bounds = (low, (low + high) // 2, high) if span.lines else LINE_CUTS
    return [replace(span, lines=lines) for lines in pairwise(bounds)]


def _unread_blocks(done: TableBackfillState, leaves: Sequence[StoredTable]) -> list[Blocks]:
    """What is to be read: of leaves that were begun and not rewritten since, the rest."""
    left = list[Blocks]()
    for leaf in leaves:
        begun = [part for part in done.blocks or () if (part.oid, part.file) == (leaf.oid, leaf.file)]
        last = max(begun, key=lambda part: part.end, default=Blocks(leaf.oid, leaf.file, 0, leaf.blocks))
        left += [part for part in begun if part.next < part.end and part is not last]
        left.append(last)  # also if nothing is left of it: it says that the leaf was begun, and its size
    done.size = sum({part.oid: part.end for part in left}.values())
    return left


def _bounds(part: ChunkRange) -> KeyBounds:
    assert isinstance(part.rows, KeyBounds)  # noqa: S101 - a cut gets back what it gave out
    return part.rows


def _block_range(part: ChunkRange) -> BlockRange:
    assert isinstance(part.rows, BlockRange)  # noqa: S101 - a cut gets back what it gave out
    return part.rows
