"""Ranges of positions: which files a read needs, where a batch may end, how to split the work.

A range (a, b] excludes a and includes b. A position stands for a whole transaction, so no range can split one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cdc.log.layout import LogFile
from cdc.position import Position


def overlapping(files: Iterable[LogFile], after: Position, upto: Position) -> list[LogFile]:
    """The files with a position in (after, upto], in order of their first position."""
    return sorted((f for f in files if f.last > after and f.first <= upto), key=lambda f: (f.first, f.path))


def boundary(files: Iterable[LogFile], after: Position, durable: Position, max_rows: int | None) -> Position:
    """Where a batch that starts after `after` ends: durable, or earlier once about max_rows rows are in it.

    At least one file is taken, so that a batch always moves on. The first batch of all is the initial copy alone:
    it has no partial image, which makes it cheap, and it is what a new target waits for.
    """
    if max_rows is None:
        return max(after, durable)
    if not after:
        return min((file.last for file in overlapping(files, after, durable)), default=durable)
    end, taken = after, 0
    for file in overlapping(files, after, durable):
        if taken and taken + file.rows > max_rows:
            return min(end, durable)
        end, taken = max(end, file.last), taken + file.rows
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
