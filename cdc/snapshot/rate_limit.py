"""Pace: how fast a copy may read, so that the source has time for those whom it is there for."""

from __future__ import annotations

import time
from threading import Event, Lock
from typing import Final

from cdc.config.definition import SourceLoad, StandbyLimit
from cdc.snapshot.chunk_sender import ChunkSender

CHECK_STANDBY_EVERY: Final = 1.0
"""Seconds between two questions how far a standby is."""


class CopyRateLimit:
    """Shared by the connections of one copy."""

    def __init__(self, rows: int | None, load: SourceLoad, stream: ChunkSender, stop: Event) -> None:
        """At most so many rows per second, besides what the load allows."""
        self._rows, self._load, self._stream, self._stop = rows, load, stream, stop
        self._lock = Lock()
        self._due = self._look_due = 0.0
        self._said: str | None = None

    def spend(self, rows: int, nbytes: int) -> None:
        """Rest for as long as so many rows, of so many bytes of text, have to take."""
        seconds = max(rows / (self._rows or float("inf")), nbytes / (self._load.bytes_per_second or float("inf")))
        with self._lock:
            self._due = max(self._due, time.monotonic()) + seconds
            due = self._due
        self._stop.wait(max(0.0, due - time.monotonic()))

    def holds(self) -> str | None:
        """Why nothing may be read now; None if it may."""
        standby = self._load.standby
        if standby is None:
            return None
        with self._lock:
            if time.monotonic() >= self._look_due:
                self._look_due = time.monotonic() + CHECK_STANDBY_EVERY
                self._said = _standby_problem(standby, self._stream.lag(standby.name))
            return self._said


def _standby_problem(limit: StandbyLimit, lag: int | None) -> str | None:
    if lag is None:
        return f"standby {limit.name!r} is not connected"
    return f"standby {limit.name!r} lags by {lag:,} bytes" if lag > limit.lag else None
