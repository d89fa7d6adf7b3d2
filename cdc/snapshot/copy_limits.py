"""Limits of one copy: chunks in memory, rows and bytes per second, and pauses.

All connections of the copy share these limits. A copy pauses on command, or while a standby lags.
"""

from __future__ import annotations

import time
from threading import Condition, Event, Lock
from typing import Final

from cdc.config.source import SourceLoad, StandbyLimit
from cdc.errors import PreflightFailed
from cdc.snapshot.chunk_sender import ChunkSender

CHECK_STANDBY_EVERY: Final = 1.0
"""Seconds between two checks of a standby's lag."""


class ChunkBudget:
    """Limits the number of unfinished chunks of one table: chunks being read, or not yet recorded as durable.

    All connections of a copy share the budget.
    """

    def __init__(self, count: int) -> None:
        self._changed, self._count, self._taken = Condition(), count, 0

    def acquire(self, *, alone: bool) -> bool:
        """Reserve one chunk and return True, or return False if the budget is used up.

        If `alone` is true, only one chunk may be unfinished. Use this while the stream is busy, because pending chunks
        delay its changes.
        """
        with self._changed:
            if not self._is_free(alone=alone):
                return False
            self._taken += 1
            return True

    def wait_until_free(self, seconds: float, *, alone: bool) -> None:
        """Wait at most `seconds` until `acquire` can reserve a chunk."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_free(alone=alone), seconds)

    def release(self, count: int = 1) -> None:
        """Return `count` reserved chunks to the budget: chunks that are recorded as durable, or were never read."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()

    def _is_free(self, *, alone: bool) -> bool:
        return self._taken < (1 if alone else self._count)


class PauseGate:
    """A gate at which the connections of a copy wait while the backfill is paused."""

    def __init__(self) -> None:
        self._changed, self._open, self._ended = Condition(), True, False

    def set(self, *, is_open: bool) -> None:
        """Open the gate, or close it for a pause."""
        with self._changed:
            self._open = is_open
            self._changed.notify_all()

    def close(self) -> None:
        """End the copy; `wait_until_open` then returns False for all connections."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Reopen the gate for the next table."""
        with self._changed:
            self._open, self._ended = True, False

    def wait_until_open(self) -> bool:
        """Wait until the gate is open; return False if the copy has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._ended)
            return not self._ended


class CopyRateLimit:
    """Limits the rate of a copy, and reports when a lagging standby requires a pause."""

    def __init__(self, rows: int | None, load: SourceLoad, stream: ChunkSender, stop: Event) -> None:
        """`rows` is the maximum number of rows per second, or None for no maximum; `load` contains further limits."""
        self._rows, self._load, self._stream, self._stop = rows, load, stream, stop
        self._lock = Lock()
        self._due = self._standby_due = 0.0
        self._reason: str | None = None

    @property
    def bytes_per_second(self) -> int | None:
        """Maximum number of bytes of row text per second; None for no maximum."""
        return self._load.bytes_per_second

    def throttle(self, rows: int, nbytes: int) -> None:
        """Count the rows and bytes of a chunk that was read, and wait until the limits allow the next chunk."""
        seconds = max(rows / (self._rows or float("inf")), nbytes / (self._load.bytes_per_second or float("inf")))
        with self._lock:
            self._due = max(self._due, time.monotonic()) + seconds
            due = self._due
        self._stop.wait(max(0.0, due - time.monotonic()))

    def pause_reason(self) -> str | None:
        """Return the reason for which the copy must pause now, or None if it may continue."""
        standby = self._load.standby
        if standby is None:
            return None
        with self._lock:
            if time.monotonic() >= self._standby_due:
                self._standby_due = time.monotonic() + CHECK_STANDBY_EVERY
                self._reason = self._standby_problem(standby)
            return self._reason

    def _standby_problem(self, limit: StandbyLimit) -> str | None:
        try:
            lag = self._stream.standby_lag(limit.name)
        except PreflightFailed as exc:  # the copy continues once the right is granted
            return f"{exc.message}: {exc.fix}"
        return _lag_problem(limit, lag)


def _lag_problem(limit: StandbyLimit, lag: int | None) -> str | None:
    if lag is None:
        return f"standby {limit.name!r} is not connected"
    return f"standby {limit.name!r} lags by {lag:,} bytes" if lag > limit.lag else None
