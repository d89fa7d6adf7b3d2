"""SourceSampler: queries the source for the state of the slot every few seconds, in a background thread.

The server process uses a SQL connection of its own, because a reader that hangs reports nothing about its slot. The
Postgres client is imported with the first query.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from threading import Event, Lock, Thread
from typing import Any, Final

from cdc.config import Definition
from cdc.errors import CdcError
from cdc.service.position_history import PositionHistory
from cdc.service.slot_risk import SourceObservation

SAMPLE_INTERVAL: Final = 3.0
"""Seconds from the start of one query to the start of the next query."""
ANSWER_TIMEOUT: Final = 3.0
"""Maximum seconds for a query; queries of the system catalogs of Postgres take milliseconds."""
SILENT_AFTER: Final = 6.0
"""Seconds after which a running query counts as unanswered; the time to connect is included."""
MAX_AGE: Final = 15.0
"""Maximum age in seconds of an answer that is shown: several times SAMPLE_INTERVAL, because a query may be late."""
RATE_SPAN: Final = 60.0
"""Seconds over which the WAL rate is computed.

Over a shorter time the rate jumps with every checkpoint; over a longer time it hides a rise.
"""
MIN_RATE_SPAN: Final = 0.5
"""Minimum seconds between the two samples from which a rate is computed."""
MEASURE_SECONDS: Final = 1.0
"""Seconds between the two samples from which a command computes the WAL rate."""
_STOP_TIMEOUT: Final = 2.0
"""Maximum seconds to wait for an open query when the server process stops."""


class SourceSampler:
    """Keeps the latest observation of one slot; safe to call from any thread."""

    def __init__(
        self, definition: Definition, clock: Callable[[], float] = time.monotonic, *, every: float = SAMPLE_INTERVAL
    ) -> None:
        """`clock` returns monotonic seconds; `every` is the number of seconds between two queries."""
        self._source = definition.source
        self._clock = clock
        self._every = every
        self._slot = definition.source.slot.name
        self._observed: SourceObservation | None = None
        self._observed_at = self._started_at = float("-inf")
        self._thread: Thread | None = None
        self._lock = Lock()
        self._connection: Any = None
        self._samples: deque[tuple[float, int]] = deque()
        self._wal = PositionHistory()
        self._reply: str | None = None
        self._heard_at: float | None = None

    def refresh(self) -> SourceObservation | None:
        """Start a query if one is due, and return the last observation at once; None before the first answer."""
        with self._lock:
            if self._thread is None and self._clock() - self._started_at >= self._every:
                self._started_at = self._clock()
                self._thread = Thread(target=self._run, name="source sampler", daemon=True)
                self._thread.start()
        return self.current

    @property
    def current(self) -> SourceObservation | None:
        """Return the last observation without starting a query; None before the first answer.

        An observation that is too old is replaced by one that reports an error.
        """
        now = self._clock()
        if self._thread is not None and now - self._started_at > SILENT_AFTER:
            return self._without(f"the source has not answered for {now - self._started_at:.0f} s")
        observed, age = self._observed, now - self._observed_at
        if observed is None or age <= 0 or not observed.up:
            return observed
        if age > MAX_AGE:
            return self._without(f"the source was not queried for {age:.0f} s")
        return _aged(observed, age)

    def wait(self, seconds: float) -> SourceObservation:
        """Start a query if one is due, wait for its answer, and return the observation.

        If no answer arrives within `seconds`, return the last observation. Without a last observation, return one that
        reports the timeout.
        """
        self.refresh()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return self.current or self._without(f"the source has not answered for {seconds:.0f} s")

    def wait_for_rate(self, seconds: float) -> SourceObservation:
        """Return an observation for a command, with the WAL rate if max_slot_wal_keep_size limits the slot.

        To measure the rate, the method waits MEASURE_SECONDS and queries the source a second time. `seconds` is the
        maximum time to wait for each answer.
        """
        first = self.wait(seconds)
        if first.safe_bytes is None:
            return first
        Event().wait(MEASURE_SECONDS)
        self._started_at = float("-inf")
        return self.wait(seconds)

    def stop(self) -> None:
        """Wait at most _STOP_TIMEOUT seconds for an open query to end; disconnect if it has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(_STOP_TIMEOUT)
        if self._thread is None:
            self._disconnect()

    def _run(self) -> None:
        try:
            observed = self._query()
            self._observed, self._observed_at = observed, self._clock()
        finally:
            self._thread = None

    def _query(self) -> SourceObservation:
        postgres, slots = (import_module(f"cdc.postgres.{name}") for name in ("connection", "slot"))
        try:
            if self._connection is None:
                self._connection = postgres.connect(
                    self._source.current_dsn(), application_name="cdc server", timeout=ANSWER_TIMEOUT
                )
            return self._observation(slots.read_slot_use(self._connection, self._slot))
        except CdcError as error:
            self._disconnect()
            return self._without(f"{error.code} {error.message}")

    def _disconnect(self) -> None:
        """Close the connection and clear the WAL samples, because a gap between samples makes rates wrong."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._samples.clear()

    def _observation(self, use: Any) -> SourceObservation:
        now = self._clock()
        slot = use.slot
        wal_end = int(use.wal_end)
        self._wal.add(now, wal_end)
        confirmed = None if slot is None or slot.confirmed_flush is None else int(slot.confirmed_flush)
        if confirmed is not None:
            self._wal.forget(confirmed)
        return SourceObservation(
            slot=self._slot,
            up=True,
            slot_exists=slot is not None,
            slot_active=None if slot is None else slot.active,
            wal_status=None if slot is None else slot.wal_status,
            wal_end=wal_end,
            confirmed=confirmed,
            retained_bytes=None if slot is None else slot.retained_bytes,
            safe_bytes=None if slot is None or slot.safe_wal_size is None else max(0, slot.safe_wal_size),
            wal_bytes_per_second=self._rate(now, wal_end),
            feedback_age_seconds=self._feedback_age(now, use),
            unconfirmed_seconds=None if confirmed is None else self._wal.seconds_behind(confirmed, now),
        )

    def _rate(self, now: float, wal_end: int) -> float | None:
        if self._samples and wal_end < self._samples[-1][1]:
            self._samples.clear()  # another server answered
        self._samples.append((now, wal_end))
        while now - self._samples[0][0] > RATE_SPAN:
            self._samples.popleft()
        since, first = self._samples[0]
        return (wal_end - first) / (now - since) if now - since >= MIN_RATE_SPAN else None

    def _feedback_age(self, now: float, use: Any) -> float | None:
        """Return the seconds since the reader's last status update, or since the last client disconnected.

        Postgres reports the time that the reader wrote into the update, and the reader's clock may differ. So the
        update counts as received between the previous answer and this answer of Postgres.
        """
        if use.slot is None:
            self._reply = self._heard_at = None
            return None
        if use.reply_at is not None and use.reply_at != self._reply:
            arrived_at = now - (use.reply_age or 0.0)
            # a new status update arrived after the previous answer, if there was one
            self._heard_at = min(now, arrived_at if self._reply is None else max(arrived_at, self._observed_at))
            self._reply = use.reply_at
        elif use.reply_at is None and use.inactive_seconds is not None:
            self._heard_at = now - use.inactive_seconds
        return None if self._heard_at is None else max(0.0, now - self._heard_at)

    def _without(self, error: str) -> SourceObservation:
        return SourceObservation(slot=self._slot, up=False, error=error)


def _aged(observed: SourceObservation, seconds: float) -> SourceObservation:
    """Return a copy of an observation whose ages are increased by `seconds`."""
    feedback, unconfirmed = observed.feedback_age_seconds, observed.unconfirmed_seconds
    return replace(
        observed,
        feedback_age_seconds=None if feedback is None else feedback + seconds,
        unconfirmed_seconds=unconfirmed + seconds if unconfirmed else unconfirmed,
    )
