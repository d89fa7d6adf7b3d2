"""Rate limit of a copy: bounds its load on the source, and pauses it while a standby lags."""

from __future__ import annotations

import time
from threading import Event, Lock
from typing import Final

from cdc.config.source import SourceLoad, StandbyLimit
from cdc.snapshot.chunk_sender import ChunkSender

CHECK_STANDBY_EVERY: Final = 1.0
"""Seconds between two checks of a standby's lag."""


class CopyRateLimit:
    """Shared by the connections of one copy."""

    def __init__(self, rows: int | None, load: SourceLoad, stream: ChunkSender, stop: Event) -> None:
        """rows: maximum per second, in addition to the limits in load; None for no limit."""
        self._rows, self._load, self._stream, self._stop = rows, load, stream, stop
        self._lock = Lock()
        self._due = self._standby_due = 0.0
        self._reason: str | None = None

    def throttle(self, rows: int, nbytes: int) -> None:
        """Wait until the limits allow another chunk after one with this many rows and bytes of text."""
        seconds = max(rows / (self._rows or float("inf")), nbytes / (self._load.bytes_per_second or float("inf")))
        with self._lock:
            self._due = max(self._due, time.monotonic()) + seconds
            due = self._due
        self._stop.wait(max(0.0, due - time.monotonic()))

    def pause_reason(self) -> str | None:
        """Why the copy must pause now; None if it may read."""
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
