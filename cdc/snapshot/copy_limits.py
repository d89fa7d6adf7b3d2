"""Limits of one copy: chunks in memory, rows and bytes per second, and pauses.

All connections of the copy share these limits. A copy pauses on command, or while a standby lags.
"""

from __future__ import annotations

import time
from threading import Condition, Event, Lock
from typing import Final

from cdc.config.source import SourceLoad, StandbyLimit
from cdc.snapshot.chunk_sender import ChunkSender

CHECK_STANDBY_EVERY: Final = 1.0
"""Seconds between two checks of a standby's lag."""


class ChunkBudget:
    """Maximum number of chunks of a table that are being read or are not yet recorded as durable.

    All connections of a copy share the budget.
    """

    def __init__(self, count: int) -> None:
        self._changed, self._count, self._taken = Condition(), count, 0

    def acquire(self, *, alone: bool) -> bool:
        """Reserve one chunk, and return False if none is free.

        With `alone` a chunk is free only if no other is reserved, because each pending chunk delays the stream.
        """
        with self._changed:
            if not self._is_free(alone=alone):
                return False
            self._taken += 1
            return True

    def wait_until_free(self, seconds: float, *, alone: bool) -> None:
        """Wait at most `seconds` until `acquire` could reserve a chunk."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_free(alone=alone), seconds)

    def release(self, count: int = 1) -> None:
        """Release the reservation of chunks that are recorded as durable, or were not read."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()

    def _is_free(self, *, alone: bool) -> bool:
        return self._taken < (1 if alone else self._count)


class PauseGate:
    """Makes the connections of a copy wait while the backfill is paused."""

    def __init__(self) -> None:
        self._changed, self._open, self._ended = Condition(), True, False

    def set(self, *, is_open: bool) -> None:
        """Open the gate, or close it for a pause."""
        with self._changed:
            self._open = is_open
            self._changed.notify_all()

    def close(self) -> None:
        """End the copy, so that waiting connections return."""
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
    """Limits the load of a copy on the source, and says when the copy must pause."""

    def __init__(self, rows: int | None, load: SourceLoad, stream: ChunkSender, stop: Event) -> None:
        """`rows` is the maximum number of rows per second, in addition to the limits in `load`; None for no maximum."""
        self._rows, self._load, self._stream, self._stop = rows, load, stream, stop
        self._lock = Lock()
        self._due = self._standby_due = 0.0
        self._reason: str | None = None

    def throttle(self, rows: int, nbytes: int) -> None:
        """Wait after a chunk with this many rows and bytes of text, until the limits allow another one."""
        seconds = max(rows / (self._rows or float("inf")), nbytes / (self._load.bytes_per_second or float("inf")))
        with self._lock:
            self._due = max(self._due, time.monotonic()) + seconds
            due = self._due
        self._stop.wait(max(0.0, due - time.monotonic()))

    def pause_reason(self) -> str | None:
        """Return why the copy must pause now; None if it may read."""
        standby = self._load.standby
        if standby is None:
            return None
        with self._lock:
            if time.monotonic() >= self._standby_due:
                self._standby_due = time.monotonic() + CHECK_STANDBY_EVERY
                self._reason = _standby_problem(standby, self._stream.standby_lag(standby.name))
            return self._reason


def _standby_problem(limit: StandbyLimit, lag: int | None) -> str | None:
    if lag is None:
        return f"standby {limit.name!r} is not connected"
    return f"standby {limit.name!r} lags by {lag:,} bytes" if lag > limit.lag else None
