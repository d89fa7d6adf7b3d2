"""Ranges of positions: which files a read needs, where a batch may end, how to split the work.

A range (a, b] excludes a and includes b. A position stands for a whole transaction, so no range can split one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cdc.log.layout import LogFile
from cdc.position import Position
from cdc.table import matches

Bounds = Mapping[str, tuple[Any, Any]]
"""Column → its least and greatest value in some rows; of a column that is not in it nothing is known."""

MAX_BYTES: Final = 64 << 20
"""Of the files of a batch of limited rows. A merge takes ten to twenty times as much memory for a while: documents of
90 kB, 550 MB of files in one batch, took 8 GB. Of rows below 1 kB there are 200,000 in less."""
_SPECIAL: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSelection:
    """Which rows of a range a reader wants."""

    relations: tuple[int, int] | None = None
    """From the first number to the second."""
    globs: tuple[str, ...] = ()
    """Over `schema.table`, all when empty; rows without a table, the messages, pass only then."""

    def may_be_in(self, bounds: Bounds) -> bool:
        """Whether rows within these bounds may have one that is wanted."""
        if self.relations is not None and "relation" in bounds:
            least, greatest = bounds["relation"]
            if greatest < self.relations[0] or least > self.relations[1]:
                return False
        if not self.globs or "topic" not in bounds:
            return True
        least, greatest = bounds["topic"]
        if least == greatest:
            return matches(least, self.globs)
        prefixes = (_SPECIAL.split(glob, maxsplit=1)[0] for glob in self.globs)
        return any(greatest >= prefix and least[: len(prefix)] <= prefix for prefix in prefixes)

    def narrowed(self, files: Iterable[LogFile]) -> list[LogFile]:
        """The files that may have such rows."""
        return [
            file for file in files if self.may_be_in({} if file.relations is None else {"relation": file.relations})
        ]


EVERY_ROW: Final = TableSelection()


def overlapping(files: Iterable[LogFile], after: Position, upto: Position) -> list[LogFile]:
    """The files with a position in (after, upto], in order of their first position."""
    return sorted((f for f in files if f.last > after and f.first <= upto), key=lambda f: (f.first, f.path))


def boundary(files: Iterable[LogFile], after: Position, durable: Position, max_rows: int | None) -> Position:
    """Where a batch that starts after `after` ends: durable, or earlier with about max_rows rows or MAX_BYTES in it.

    At least one file is taken, so that a batch always moves on. The first batch of all is the initial copy alone:
    it has no partial image, which makes it cheap, and it is what a new target waits for.
    """
    if max_rows is None:
        return max(after, durable)
    if not after:
        return min((file.last for file in overlapping(files, after, durable)), default=durable)
    end, rows, size = after, 0, 0
    for file in overlapping(files, after, durable):
        rows, size = rows + file.rows, size + file.size
        if end > after and (rows > max_rows or size > MAX_BYTES):
            return min(end, durable)
        end = max(end, file.last)
    return max(after, durable)


def split(files: Sequence[LogFile], limit: int) -> list[list[LogFile]]:
    """Groups of neighbouring files of about limit bytes each; a small range is one group."""
    groups: list[list[LogFile]] = []
    size = limit
    for file in files:
        if size + file.size > limit or not groups:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups
