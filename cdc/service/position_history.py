"""PositionHistory: records the values of a growing position with their times, to compute the lag of a process.

A lag that a process reports about itself stays at its last value when the process hangs. A lag computed from this
history continues to grow.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Final

MAX_ENTRIES: Final = 512
"""Number of entries above which the history removes entries that are close to their predecessors."""
PRECISION: Final = 0.05
"""Minimum time between two entries after a removal, as a share of the later entry's age: 5 s if its age is 100 s."""


class PositionHistory:
    """The past values of one growing position, each with its time; not thread-safe."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, at: float, position: int) -> None:
        """Add a position that was reached at the time `at`; a position equal to the last one adds nothing.

        If the position is below the last one, as after a failover, all earlier entries are removed.
        """
        if self._seen and position < self._seen[-1][1]:
            self._seen = []
        if self._seen and position == self._seen[-1][1]:
            return
        self._seen.append((at, position))
        if len(self._seen) > MAX_ENTRIES:
            self._thin_out(at)

    def forget(self, upto: int) -> None:
        """Remove the entries up to `upto`; `seconds_behind` is then correct only for positions from `upto` on."""
        del self._seen[: bisect_right(self._seen, upto, key=itemgetter(1))]

    def _thin_out(self, now: float) -> None:
        kept = [self._seen[0]]
        for entry in self._seen[1:]:
            if entry[0] - kept[-1][0] >= PRECISION * (now - entry[0]):
                kept.append(entry)
        self._seen = kept

    def seconds_behind(self, position: int, now: float) -> float:
        """Return the seconds since the growing position first exceeded `position`; 0 if it has not exceeded it."""
        first = bisect_right(self._seen, position, key=itemgetter(1))
        return max(0.0, now - self._seen[first][0]) if first < len(self._seen) else 0.0
