"""Position ranges: the files that a read needs, the end of a batch, and the split of files into tasks.

A range (a, b] excludes a and includes b. A position identifies a whole transaction, so no range can split one.
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
"""Column → (least, greatest) value in some rows; the values of missing columns are unknown."""

MAX_BYTES: Final = 64 << 20
"""Maximum bytes of files in a batch with a row limit. A merge needs ten to twenty times as much memory: a batch with
550 MB of files took 8 GB. Files of this size contain at least 200,000 rows below 1 kB."""
_SPECIAL: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSelection:
    """Filter of rows by relation and table name."""

    relations: tuple[int, int] | None = None
    """Least and greatest relation number, both included."""
    globs: tuple[str, ...] = ()
    """Globs over `schema.table`; empty selects all rows, including messages, which belong to no table."""

    def may_be_in(self, bounds: Bounds) -> bool:
        """Whether rows within these bounds may include a selected row."""
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
        """The files that may contain selected rows."""
        return [
            file for file in files if self.may_be_in({} if file.relations is None else {"relation": file.relations})
        ]


EVERY_ROW: Final = TableSelection()


def overlapping(files: Iterable[LogFile], after: Position, upto: Position) -> list[LogFile]:
    """The files with a position in (after, upto], in order of their first position."""
    return sorted((f for f in files if f.last > after and f.first <= upto), key=lambda f: (f.first, f.path))


def boundary(files: Iterable[LogFile], after: Position, durable: Position, max_rows: int | None) -> Position:
    """End of a batch that starts after `after`: durable, or earlier after about max_rows rows or MAX_BYTES.

    A batch contains at least one file, so it always makes progress. The first batch of all is the initial copy alone:
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
