"""Nulled counts: how many values of each table a sink wrote as NULL, because their types cannot represent them."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class NulledCounts:
    """The number of nulled values of each table since the sink was created; any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._total, self._new = Counter[str](), Counter[str]()

    def add(self, topic: str, count: int) -> None:
        """Add nulled values of a table."""
        with self._lock:
            self._total[topic] += count
            self._new[topic] += count

    def total(self, topic: str) -> int:
        """Return the number of nulled values of a table."""
        with self._lock:
            return self._total[topic]

    def pop_counts(self) -> dict[str, int]:
        """Return topic → number of nulled values since the last call."""
        with self._lock:
            counts, self._new = dict(self._new), Counter()
        return counts
