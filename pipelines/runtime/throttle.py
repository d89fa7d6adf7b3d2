"""Throttle: the delay between two batches of a sink, computed from the bytes that its tables had to rewrite.

Theory. A merge rewrites every file that contains one of its keys. If the keys of a batch are scattered over a huge
table, even a small batch rewrites most of the table. So fewer and larger batches write less. A batch covers all tables
of a sink, because they are published at one position. So one table above the limit delays all of them. The sink waits
only between two batches. If it is killed while it waits, it continues from its published record as usual.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Final

LONGEST: Final = 60.0
"""Maximum seconds between the starts of two batches, however much the batches rewrite."""
ASK_EVERY: Final = 0.5
"""Seconds between two checks whether the next batch is urgent; each check reads the catalog and the log."""
_STEP: Final = 0.1


@dataclass(frozen=True, slots=True)
class BatchThrottle:
    """The delay between batches of a sink, and the table that causes it."""

    seconds: float
    """Minimum seconds between the starts of two batches."""
    table: str
    """Topic of the table with the most rewritten bytes."""
    rewritten: int
    """Bytes of this table that the last batch rewrote."""

    def __str__(self) -> str:
        size = self.rewritten / 1e6
        return f"a batch begins every {self.seconds:.1f} s, because each batch rewrites {size:,.1f} MB of {self.table}"


class CommitRate:
    """Computes when the next batch may begin, from the bytes that the commits of a sink rewrote."""

    def __init__(self, bound: int, clock: Callable[[], float] = time.monotonic) -> None:
        """bound: maximum of rewritten bytes per second and table; 0: no limit."""
        self._bound, self._clock = bound, clock
        self._began: float | None = None
        self._due = 0.0
        self._tables: dict[str, int] = {}
        self.rewritten = 0
        """Bytes of all tables that the last batch rewrote."""
        self.throttle: BatchThrottle | None = None
        """The current delay; None if no batch has to wait."""

    def start_batch(self) -> None:
        """Record that a batch begins to apply a table; the first call in a batch sets the start time of the batch."""
        if self._began is None:
            self._began = self._clock()

    def add_rewritten(self, table: str, nbytes: int) -> None:
        """Add bytes that the batch rewrote in a table; each table calls it from its own thread."""
        self._tables[table] = self._tables.get(table, 0) + nbytes

    def end_batch(self) -> None:
        """Record that the batch is published, and compute the delay of the next batch."""
        now = self._clock()
        began, tables = now if self._began is None else self._began, self._tables
        self._began = None
        self._tables = {}
        self.rewritten = sum(tables.values())
        self.throttle = None
        table = max(tables, key=lambda name: tables[name], default=None)
        if table is None or not self._bound:
            return
        seconds = min(tables[table] / self._bound, LONGEST)
        self._due = began + seconds
        if self._due > now:
            self.throttle = BatchThrottle(seconds, table, tables[table])

    @property
    def seconds_left(self) -> float:
        """Seconds until the next batch may begin; 0: now."""
        return max(0.0, self._due - self._clock()) if self._bound else 0.0


class ThrottleState:
    """Decides how long a sink waits between two batches.

    The wait ends when the commit rate allows the next batch, when the next batch is urgent, or when the sink stops.
    """

    def __init__(self, commit_rate: CommitRate, is_urgent: Callable[[], bool]) -> None:
        """is_urgent: whether the next batch must not wait; called every ASK_EVERY seconds during a wait."""
        self._commit_rate, self._check_urgent = commit_rate, is_urgent
        self._checked_at, self._checked_for = -ASK_EVERY, commit_rate.throttle
        self._is_urgent = False
        self._stopped = Event()

    @property
    def is_waiting(self) -> bool:
        """Whether the next batch still has to wait."""
        if self._stopped.is_set() or not self._commit_rate.seconds_left:
            return False
        if self._checked_for is not self._commit_rate.throttle or time.monotonic() - self._checked_at >= ASK_EVERY:
            self._checked_for, self._is_urgent = self._commit_rate.throttle, self._check_urgent()
            self._checked_at = time.monotonic()
        return not self._is_urgent

    def wait(self) -> None:
        """Wait until the next batch may begin."""
        while self.is_waiting:
            self._stopped.wait(min(_STEP, self._commit_rate.seconds_left))

    def stop(self) -> None:
        """End the current wait and prevent later waits; any thread may call this."""
        self._stopped.set()
