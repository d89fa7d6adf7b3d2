"""Cadence: the next batch of a sink begins no sooner than what its tables had to write again allows.

Theory. A merge writes every file anew in which one of its keys stands, so a huge table with scattered keys is written
again with each batch, however small that is. Fewer and larger batches write less. Batches are the sink's and not a
table's, for all its tables stand at one cut; so a table that is over the bound makes all of them wait. Waiting lies
between two batches, where nothing is half done: killed there, the sink goes on from its published record as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Final

LONGEST: Final = 60.0
"""Seconds between the beginnings of two batches at most, whatever they write again."""
ASK_EVERY: Final = 0.5
"""Seconds between two questions whether somebody waits for the next batch; they go to the catalog and to the log."""
_STEP: Final = 0.1


@dataclass(frozen=True, slots=True)
class BatchThrottle:
    """How a sink is slowed down, and by which of its tables."""

    seconds: float
    """From the beginning of a batch to that of the next."""
    table: str
    """The one of which most was written again."""
    rewritten: int
    """Bytes of it, by the last batch."""

    def __str__(self) -> str:
        size = self.rewritten / 1e6
        return f"a batch every {self.seconds:.1f} s: {self.table} is written again at {size:,.1f} MB a batch"


class CommitRate:
    """When the next batch may begin, counted by the sink from what its commits did."""

    def __init__(self, bound: int, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `bound` bytes a second and table are written again; 0: as many as there are."""
        self._bound, self._clock = bound, clock
        self._began: float | None = None
        self._due = 0.0
        self._tables: dict[str, int] = {}
        self.rewritten = 0
        """Bytes that the last batch wrote again, of all tables."""
        self.cadence: BatchThrottle | None = None
        """None while no batch has to wait."""

    def begins(self) -> None:
        """A batch is at its first table, or at a further one."""
        if self._began is None:
            self._began = self._clock()

    def rewrote(self, table: str, nbytes: int) -> None:
        """The batch wrote so many bytes of a table again; called from a thread of the table's own."""
        self._tables[table] = self._tables.get(table, 0) + nbytes

    def ends(self) -> None:
        """The batch is published."""
        now = self._clock()
        began, tables = now if self._began is None else self._began, self._tables
        self._began, self._tables, self.rewritten, self.cadence = None, {}, sum(tables.values()), None
        table = max(tables, key=lambda name: tables[name], default=None)
        if table is None or not self._bound:
            return
        seconds = min(tables[table] / self._bound, LONGEST)
        self._due = began + seconds
        if self._due > now:
            self.cadence = BatchThrottle(seconds, table, tables[table])

    @property
    def left(self) -> float:
        """Seconds until the next batch may begin, 0 if it may."""
        return max(0.0, self._due - self._clock()) if self._bound else 0.0


class ThrottleState:
    """The wait of one sink between two batches, until its pace allows the next, somebody wants it, or the sink ends."""

    def __init__(self, pace: CommitRate, wanted: Callable[[], bool]) -> None:
        """wanted: whether the next batch is not to wait; asked now and then while it does."""
        self._pace, self._wanted = pace, wanted
        self._asked, self._of = -ASK_EVERY, pace.cadence
        self._is_wanted = False
        self._ended = Event()

    @property
    def rests(self) -> bool:
        """Whether the next batch has to wait still."""
        if self._ended.is_set() or not self._pace.left:
            return False
        if self._of is not self._pace.cadence or time.monotonic() - self._asked >= ASK_EVERY:
            self._of, self._is_wanted = self._pace.cadence, self._wanted()
            self._asked = time.monotonic()
        return not self._is_wanted

    def rest(self) -> None:
        """Wait for as long as the next batch has to."""
        while self.rests:
            self._ended.wait(min(_STEP, self._pace.left))

    def end(self) -> None:
        """Wait no more, now or later; from any thread."""
        self._ended.set()
