"""Compare: are two sides the same multiset of rows, and if not, which keys and columns differ.

The first pass over both sides keeps checksums only. Buckets that differ are read again, a bounded
number of rows at a time, and compared row by row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from pipelines.verification.checksum import BUCKETS, Checksum, buckets_of

LISTED: Final = 20
"""Keys named per kind of difference, if nobody asks for more; the counts go on."""
ROWS_AT_ONCE: Final = 500_000
"""Rows of both sides held as Python tuples in one pass: below 1 GB for rows of a few hundred bytes."""
PASSES: Final = 8
"""Passes over differing buckets; a table that differs nearly everywhere need not be listed to its end."""

Row = tuple[str | None, ...]
Rows = Callable[[], Iterator[pa.RecordBatch]]
"""Reads one side from its start: string columns in the shape's order, any batch size."""


@dataclass(frozen=True, slots=True)
class ComparedColumns:
    """What is compared: the columns in order and the places of the key among them (empty: keyless)."""

    columns: tuple[str, ...]
    key: tuple[int, ...]

    @property
    def identity(self) -> tuple[int, ...]:
        """The places that say which row it is: the key, or every column of a keyless table."""
        return self.key or tuple(range(len(self.columns)))


@dataclass(slots=True)
class Differences:
    """What differs; lists end somewhere, counts do not."""

    missing: list[list[str | None]] = field(default_factory=list)
    extra: list[list[str | None]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"missing": 0, "extra": 0, "differing": 0})
    complete: bool = True
    """False when PASSES ended before every differing bucket was read: counts are then lower bounds."""

    def note(self, kind: str, entry: Any, room: int) -> None:
        """Count one difference, and list it while there are fewer than that."""
        self.counts[kind] += 1
        listed = getattr(self, kind)
        if len(listed) < room:
            listed.append(entry)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for one table."""

    source_rows: int
    target_rows: int
    differences: Differences

    @property
    def equal(self) -> bool:
        """True when every row and column is the same on both sides."""
        return not any(self.differences.counts.values()) and self.differences.complete


def compare(
    source: Rows, target: Rows, shape: ComparedColumns, listed: int = LISTED, apart: Collection[Row] = frozenset()
) -> Comparison:
    """Compare both sides; each is read once, and again only where a bucket differs. Names so many keys of a kind.

    apart: keys, in the words that they are compared in, of which nothing is said.
    """
    of_source, of_target = _checksum(source, shape), _checksum(target, shape)
    buckets = of_source.differing(of_target)
    found = Differences()
    groups = _groups(buckets, of_source.counts + of_target.counts)
    for group in groups[:PASSES]:
        wanted = np.zeros(BUCKETS, np.bool_)
        wanted[group] = True
        sides = _rows_in(source, wanted, shape), _rows_in(target, wanted, shape)
        _compare_rows((_others(sides[0], shape, apart), _others(sides[1], shape, apart)), shape, found, listed)
    found.complete = len(groups) <= PASSES
    return Comparison(of_source.rows, of_target.rows, found)


def _checksum(side: Rows, shape: ComparedColumns) -> Checksum:
    total = Checksum()
    for batch in side():
        columns = batch.columns
        total.add(columns, [columns[place] for place in shape.identity])
    return total


def _groups(buckets: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    groups: list[list[int]] = []
    held = ROWS_AT_ONCE
    for bucket in buckets.tolist():
        rows = int(counts[bucket])
        if held + rows > ROWS_AT_ONCE:
            groups.append([])
            held = 0
        groups[-1].append(bucket)
        held += rows
    return groups


def _rows_in(side: Rows, wanted: np.ndarray, shape: ComparedColumns) -> Iterator[Row]:
    for batch in side():
        if not batch.num_rows:
            continue
        chosen = wanted[buckets_of([batch.columns[place] for place in shape.identity])]
        if chosen.any():
            kept = batch.filter(pa.array(chosen))
            yield from zip(*(column.to_pylist() for column in kept.columns), strict=True)


def _others(rows: Iterator[Row], shape: ComparedColumns, apart: Collection[Row]) -> Iterator[Row]:
    if not apart:
        return rows
    return (row for row in rows if tuple(row[place] for place in shape.identity) not in apart)


def _compare_rows(
    sides: tuple[Iterable[Row], Iterable[Row]], shape: ComparedColumns, found: Differences, listed: int
) -> None:
    """Add what differs between the rows of the source and those of the target."""
    by_key: defaultdict[Row, Counter[Row]] = defaultdict(Counter)
    # +1 for every source row, -1 for every target row: what is equal leaves nothing
    for rows, sign in zip(sides, (1, -1), strict=True):
        for row in rows:
            by_key[tuple(row[place] for place in shape.identity)][row] += sign
    for key, balance in by_key.items():
        lacking = [row for row, n in balance.items() for _ in range(n)]
        surplus = [row for row, n in balance.items() for _ in range(-n)]
        paired = min(len(lacking), len(surplus))
        for ours, theirs in zip(lacking[:paired], surplus[:paired], strict=True):
            columns = [name for name, a, b in zip(shape.columns, ours, theirs, strict=True) if a != b]
            found.note("differing", {"key": list(key), "columns": columns}, listed)
        for _ in lacking[paired:]:
            found.note("missing", list(key), listed)
        for _ in surplus[paired:]:
            found.note("extra", list(key), listed)
