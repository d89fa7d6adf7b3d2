"""Audit of transactions: each has all of its rows exactly once, across all files; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cdc.log.audit.finding import DamageKind
from cdc.position import Position


class Gap(NamedTuple):
    """Transactions that are not as they should be, as one file shows them."""

    damage: DamageKind
    """HOLE or DUPLICATE."""
    file: int
    """Which one has the rows behind the hole, or one of the two."""
    first: int
    """Position of the first of them."""
    ordinal: int
    """Where that one goes on (HOLE), or what it has twice."""
    last: int
    """Position of the last."""
    transactions: int


class Transactions:
    """Whether every transaction of `changes` has its ordinals from 0 without a hole, each once.

    Files come in order of their first position, so that what lies below the next one's first is complete: only
    transactions that spread over files are held, as runs of ordinals.
    """

    def __init__(self, after: Position) -> None:
        """Transactions at or below `after` were trimmed, maybe not all of their rows."""
        self._after = after
        self._open = np.empty((0, 4), np.int64)

    def add(self, file: int, found: np.ndarray) -> None:
        """Take the runs of a file."""
        numbered = np.column_stack((found, np.full(len(found), file, np.int64)))
        self._open = np.concatenate((self._open, numbered))

    def settled(self, below: int | None = None, unseen: Iterable[tuple[int, int]] = ()) -> list[Gap]:
        """What is wrong with the transactions below a position (default: all), which are then forgotten.

        unseen: (first, last) position of files that were not read; nothing is missing where they may have it.
        """
        done = np.ones(len(self._open), bool) if below is None else self._open[:, 0] < below
        own, self._open = self._open[done], self._open[~done]
        own = own[np.lexsort((own[:, 1], own[:, 0]))]
        if not len(own):
            return []
        position, start, end, _ = own.T
        begins = np.diff(position, prepend=-1) != 0
        expected = np.where(begins, 0, np.roll(end, 1) + 1)
        holes = (start > expected) & (position > self._after)
        for first, last in unseen if holes.any() else ():
            holes &= (position < first) | (position > last)
        gaps = [*_gaps(DamageKind.HOLE, own[holes]), *_gaps(DamageKind.DUPLICATE, own[start < expected])]
        return sorted(gaps, key=lambda gap: gap.first)


def runs(position: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
    """Rows in any order → (position, first ordinal, last ordinal) of each run without a hole, sorted."""
    order = np.lexsort((ordinal, position))
    position, ordinal = position[order], ordinal[order]
    goes_on = (np.diff(position) == 0) & (np.diff(ordinal) == 1)
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    ends = np.concatenate((starts[1:], [len(position)])) - 1
    return np.stack((position[starts], ordinal[starts], ordinal[ends]), axis=1)


def _gaps(damage: DamageKind, wrong: np.ndarray) -> Iterator[Gap]:
    for file in np.unique(wrong[:, 3]).tolist():
        own = wrong[wrong[:, 3] == file]
        yield Gap(damage, file, int(own[0, 0]), int(own[0, 1]), int(own[-1, 0]), len(own))
