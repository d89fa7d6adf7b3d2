"""Compares the expected rows of a table with the rows of a target, as multisets: which keys and columns differ.

The first pass over both sides computes checksums per bucket of keys. Further passes read the differing buckets again,
a limited number of rows at a time, and compare them row by row.
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
"""Default number of keys that a result lists for each kind of mismatch; the counts have no limit."""
ROWS_AT_ONCE: Final = 500_000
"""Rows of source and target that one pass keeps as Python tuples: below 1 GB for rows of a few hundred bytes."""
PASSES: Final = 8
"""Maximum passes that compare differing buckets row by row; if more are needed, some buckets are not compared."""

Row = tuple[str | None, ...]
Rows = Callable[[], Iterator[pa.RecordBatch]]
"""Function that reads all rows of source or target, as batches of the string columns of `ComparedColumns`."""


@dataclass(frozen=True, slots=True)
class ComparedColumns:
    """The names of the compared columns, and which of them are key columns.

    key: indices of the key columns; empty for a table without a key.
    """

    columns: tuple[str, ...]
    key: tuple[int, ...]

    @property
    def identity(self) -> tuple[int, ...]:
        """Indices of the columns that identify a row: the key columns, or all columns if the table has no key."""
        return self.key or tuple(range(len(self.columns)))


@dataclass(slots=True)
class Mismatches:
    """The mismatches of one table. The lists are limited, but the counts include every mismatch that was found."""

    missing: list[list[str | None]] = field(default_factory=list)
    extra: list[list[str | None]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"missing": 0, "extra": 0, "differing": 0})
    complete: bool = True
    """Whether every differing bucket was read; if not, the counts are lower bounds."""

    def add(self, kind: str, entry: Any, limit: int) -> None:
        """Count one mismatch; also add it to the list of its kind, unless that list already has `limit` entries."""
        self.counts[kind] += 1
        listed = getattr(self, kind)
        if len(listed) < limit:
            listed.append(entry)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing the rows of one table: the row counts of source and target, and the mismatches."""

    source_rows: int
    target_rows: int
    mismatches: Mismatches

    @property
    def equal(self) -> bool:
        """Whether source and target have the same rows."""
        return not any(self.mismatches.counts.values()) and self.mismatches.complete


def compare(
    source: Rows, target: Rows, shape: ComparedColumns, listed: int = LISTED, excluded: Collection[Row] = frozenset()
) -> Comparison:
    """Compare the rows of a source with those of a target.

    Both are read once for checksums per bucket of keys. The buckets that differ are then read again, row by row.
    listed: maximum number of keys to list for each kind of mismatch. excluded: keys, as canonical text, whose rows are
    not compared.
    """
    of_source, of_target = _checksum(source, shape), _checksum(target, shape)
    buckets = of_source.differing(of_target)
    found = Mismatches()
    groups = _groups(buckets, of_source.counts + of_target.counts)
    for group in groups[:PASSES]:
        wanted = np.zeros(BUCKETS, np.bool_)
        wanted[group] = True
        sides = _rows_in(source, wanted, shape), _rows_in(target, wanted, shape)
        _compare_rows((_without(sides[0], shape, excluded), _without(sides[1], shape, excluded)), shape, found, listed)
    found.complete = len(groups) <= PASSES
    return Comparison(of_source.rows, of_target.rows, found)


def _checksum(side: Rows, shape: ComparedColumns) -> Checksum:
    total = Checksum()
    for batch in side():
        columns = batch.columns
        total.add(columns, [columns[index] for index in shape.identity])
    return total


def _groups(buckets: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    groups: list[list[int]] = []
    rows_of_group = ROWS_AT_ONCE
    for bucket in buckets.tolist():
        rows = int(counts[bucket])
        if rows_of_group + rows > ROWS_AT_ONCE:
            groups.append([])
            rows_of_group = 0
        groups[-1].append(bucket)
        rows_of_group += rows
    return groups


def _rows_in(side: Rows, wanted: np.ndarray, shape: ComparedColumns) -> Iterator[Row]:
    for batch in side():
        if not batch.num_rows:
            continue
        chosen = wanted[buckets_of([batch.columns[index] for index in shape.identity])]
        if chosen.any():
            kept = batch.filter(pa.array(chosen))
            yield from zip(*(column.to_pylist() for column in kept.columns), strict=True)


def _without(rows: Iterator[Row], shape: ComparedColumns, excluded: Collection[Row]) -> Iterator[Row]:
    if not excluded:
        return rows
    return (row for row in rows if tuple(row[index] for index in shape.identity) not in excluded)


def _compare_rows(
    sides: tuple[Iterable[Row], Iterable[Row]], shape: ComparedColumns, found: Mismatches, listed: int
) -> None:
    """Add the mismatches between the rows of the source and those of the target to `found`."""
    by_key: defaultdict[Row, Counter[Row]] = defaultdict(Counter)
    # +1 for every source row, -1 for every target row: equal rows add up to 0
    for rows, sign in zip(sides, (1, -1), strict=True):
        for row in rows:
            by_key[tuple(row[index] for index in shape.identity)][row] += sign
    for key, balance in by_key.items():
        missing = [row for row, n in balance.items() for _ in range(n)]
        extra = [row for row, n in balance.items() for _ in range(-n)]
        paired = min(len(missing), len(extra))
        for ours, theirs in zip(missing[:paired], extra[:paired], strict=True):
            columns = [name for name, a, b in zip(shape.columns, ours, theirs, strict=True) if a != b]
            found.add("differing", {"key": list(key), "columns": columns}, listed)
        for _ in missing[paired:]:
            found.add("missing", list(key), listed)
        for _ in extra[paired:]:
            found.add("extra", list(key), listed)
