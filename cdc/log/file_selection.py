"""Functions over position ranges: select the files of a range, find the end of a batch, split files into tasks.

A range (a, b] excludes a and includes b. A position identifies a whole transaction, so no range can split a
transaction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, Final

from cdc.log.disk_format import LogFile
from cdc.position import Position
from cdc.table import matches

Bounds = Mapping[str, tuple[Any, Any]]
"""Column → (least, greatest) value in a set of rows; a column without known bounds is missing."""

MAX_BYTES: Final = 64 << 20
"""Maximum total size in bytes of the files in a batch that has a row limit, unless the caller gives another.

A merge in one process needs ten to twenty times as much memory: a batch with 550 MB of files took 8 GB. Rows of up to
1 kB do not reach this limit before the default row limit, 200,000 rows, because the files are compressed.
"""
_SPECIAL: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSelection:
    """A filter that selects rows by relation number, table name and ordinal."""

    relations: tuple[int, int] | None = None
    """Least and greatest relation number, both included; None selects all relations."""
    globs: tuple[str, ...] = ()
    """Patterns for `schema.table`; an empty tuple selects all rows, including messages that belong to no table."""
    ordinals: tuple[int, int] | None = None
    """Least and greatest ordinal, both included; None selects all ordinals."""

    def may_be_in(self, bounds: Bounds) -> bool:
        """Return True if this filter may select rows with values inside these bounds."""
        for name, wanted in (("relation", self.relations), ("ordinal", self.ordinals)):
            if wanted is not None and name in bounds:
                least, greatest = bounds[name]
                if greatest < wanted[0] or least > wanted[1]:
                    return False
        if not self.globs or "topic" not in bounds:
            return True
        least, greatest = bounds["topic"]
        if least == greatest:
            return matches(least, self.globs)
        prefixes = (_SPECIAL.split(glob, maxsplit=1)[0] for glob in self.globs)
        return any(greatest >= prefix and least[: len(prefix)] <= prefix for prefix in prefixes)

    def narrowed(self, files: Iterable[LogFile]) -> list[LogFile]:
        """Return the files that may contain rows that this filter selects."""
        return [
            file for file in files if self.may_be_in({} if file.relations is None else {"relation": file.relations})
        ]


EVERY_ROW: Final = TableSelection()


def overlapping(files: Iterable[LogFile], after: Position, upto: Position) -> list[LogFile]:
    """Return the files with at least one position in (after, upto], sorted by first position."""
    return sorted((f for f in files if f.last > after and f.first <= upto), key=lambda f: (f.first, f.path))


def boundary(
    files: Iterable[LogFile], after: Position, durable: Position, max_rows: int | None, max_bytes: int = MAX_BYTES
) -> Position:
    """Return the position at which a batch that starts after `after` ends.

    The batch ends after about `max_rows` rows or `max_bytes` bytes, or at the durable position if this comes first.
    A batch contains at least one file. If `max_rows` is None, the batch ends at the durable position. Otherwise a batch
    from position 0 contains only the initial snapshot, if there is one, so that a new target gets its first rows soon.
    """
    if max_rows is None:
        return max(after, durable)
    ordered = overlapping(files, after, durable)
    if not after:
        first = min((file.last for file in ordered), default=durable)
        if not all(file.schemas_only for file in overlapping(ordered, after, first)):
            return first
    end, rows, size = after, 0, 0
    for file in ordered:
        rows, size = rows + file.rows, size + file.size
        if end > after and (rows > max_rows or size > max_bytes):
            return min(end, durable)
        end = max(end, file.last)
    return max(after, durable)


def split(files: Sequence[LogFile], limit: int) -> list[list[LogFile]]:
    """Divide the files, in the given order, into groups of about `limit` bytes each."""
    groups: list[list[LogFile]] = []
    size = limit
    for file in files:
        if size + file.size > limit or not groups:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def split_evenly(files: Sequence[LogFile], count: int) -> list[list[LogFile]]:
    """Divide the files into at most `count` groups of about equally many bytes, the largest group first.

    In a group the files have the given order. A group has at most the bytes of an even division, and of one more file.
    """
    by_size = sorted(range(len(files)), key=lambda number: files[number].size, reverse=True)
    groups: list[tuple[int, list[int]]] = [(0, []) for _ in range(min(count, len(files)))]
    for number in by_size:
        size, group = groups[0]  # the smallest one, because `groups` is a heap
        heapreplace(groups, (size + files[number].size, [*group, number]))
    return [[files[number] for number in sorted(group)] for _, group in sorted(groups, reverse=True)]
