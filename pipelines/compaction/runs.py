"""Runs: which part of the log is cold, and which runs of the compacted table are merged with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdc.log.layout import LogFile
from cdc.position import Position

MOST_RUNS: Final = 64
"""Runs beside the oldest: a read opens each of them. Beyond, the small ones are merged with one another."""
SMALLER: Final = 4
"""A run is small when those after it are so many times as large together: so few bytes are written again."""


def cold_end(files: Sequence[LogFile], upto: Position | None = None) -> Position | None:
    """Where the last whole segment that is closed ends, at most `upto`; None if there is none.

    files: those behind the horizon. The segment with the highest number may still grow. Segments close between two
    files, also inside a transaction: one that goes on in a later segment is left for later as a whole.
    """
    closed = [file for file in files if file.segment < max(f.segment for f in files)]
    late = [file.segment for file in closed if upto is not None and file.last > upto]
    whole = [file for file in closed if not late or file.segment < min(late)]
    if not whole:
        return None
    last_segment = max(file.segment for file in whole)
    ahead = min(file.first for file in files if file.segment > last_segment)
    return Position(min(max(file.last for file in whole), ahead - 1))


def due(sizes: Sequence[int], most: int = MOST_RUNS) -> int | None:
    """From which run on, counted from the oldest, all are to become one; None while they may stay.

    sizes: bytes of the runs, oldest first. The oldest holds most keys and is written again only when the others are
    larger together. So a byte is written two or three times in the long run; four to five where nothing is ever
    replaced, in thousands of runs.
    """
    if len(sizes) < 2:  # noqa: PLR2004 - it takes two
        return None
    if sum(sizes[1:]) > sizes[0]:
        return 0
    if len(sizes) - 1 <= most:
        return None
    small = (n for n in range(1, len(sizes) - 1) if SMALLER * sizes[n] <= sum(sizes[n + 1 :]))
    return next(small, len(sizes) - 2)
