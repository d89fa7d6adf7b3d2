"""PositionHistory: when a position that grows was first seen, and so since when another one is behind it.

A lag that a process reports of itself stays at its last value when that process hangs. What is computed here needs
nothing from it but the position that it reached last: it grows as long as that position does not pass what was there.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Final

MAX_ENTRIES: Final = 512
"""Entries above which some are left out."""
PRECISION: Final = 0.05
"""Share of an age: of entries that are closer to each other than that one is enough."""


class PositionHistory:
    """One position over time; for one thread at a time."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, at: float, position: int) -> None:
        """Add what was seen; a position that went back, as after a failover, begins a new history."""
        if self._seen and position < self._seen[-1][1]:
            self._seen = []
        if self._seen and position == self._seen[-1][1]:
            return
        self._seen.append((at, position))
        if len(self._seen) > MAX_ENTRIES:
            self._thin_out(at)

    def forget(self, upto: int) -> None:
        """Drop entries that nobody is behind any more."""
        del self._seen[: bisect_right(self._seen, upto, key=itemgetter(1))]

    def _thin_out(self, now: float) -> None:
        kept = [self._seen[0]]
        for entry in self._seen[1:]:
            if entry[0] - kept[-1][0] >= PRECISION * (now - entry[0]):
                kept.append(entry)
        self._seen = kept

    def seconds_behind(self, position: int, now: float) -> float:
        """How long there has been something beyond position; 0 while there is nothing."""
        first = bisect_right(self._seen, position, key=itemgetter(1))
        return max(0.0, now - self._seen[first][0]) if first < len(self._seen) else 0.0
