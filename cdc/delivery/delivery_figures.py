"""Figures of one delivery: its loop writes them, the reporter of the process reads them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Lock

from cdc import metrics
from cdc.catalog import DeadLetter, SinkProgress
from cdc.delivery.event_source import EventWindow
from cdc.delivery.progress import ParkedKey, Progress
from cdc.errors import CdcError, complete_remedy
from cdc.position import Position


class DeliveryFigures:
    """Position, lag, errors and dead letters of one delivery; thread-safe."""

    def __init__(
        self, pipeline: str, name: str, figures: metrics.Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self.name = name
        self._labels = (pipeline, name)
        self._figures = figures
        self._clock = clock
        self._lock = Lock()
        self._position: Position | None = None
        self._committed_at = 0
        self._lag = 0.0
        self._waiting_since: float | None = None
        """When the window that is not acknowledged yet was begun first; None if there is none."""
        self._error: CdcError | None = None
        self._notice: str | None = None
        self._letters: tuple[DeadLetter, ...] = ()
        figures.add(metrics.DELIVERY_EVENTS, 0, *self._labels)

    def record_opened(self, progress: Progress) -> None:
        """Record that the destination was opened."""
        with self._lock:
            self._position = progress.position
            self._error = None
            self._notice = None
        self.record_parked(progress)

    def begin_window(self, window: EventWindow) -> None:
        """Record that a window is being sent; the lag grows until it is acknowledged."""
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = window.committed_at / 1e6 if window.committed_at else self._clock()

    def record_window(self, window: EventWindow, progress: Progress, events: int) -> None:
        """Record that a window was acknowledged."""
        with self._lock:
            since = window.committed_at / 1e6 if window.committed_at else self._clock()
            self._lag = max(0.0, self._clock() - since)
            self._position = progress.position
            self._committed_at = window.committed_at
            self._waiting_since = None
            self._error = None
        self._figures.add(metrics.DELIVERY_EVENTS, events, *self._labels)
        self._figures.set(metrics.SINK_POSITION, progress.position, *self._labels)
        self._figures.set(metrics.SINK_LAG_SECONDS, self._lag, *self._labels)
        self._figures.set(metrics.DELIVERY_DROPPED, progress.dropped, *self._labels)
        if events:
            self._figures.observe(metrics.SINK_LATENCY, self._lag, *self._labels)
        self.record_parked(progress)

    def record_parked(self, progress: Progress) -> None:
        """Record the dead letters of a progress."""
        letters = tuple(dead_letter(self.name, key) for key in progress.parked.values())
        with self._lock:
            self._letters = letters
        self._figures.set(metrics.DLQ_RECORDS, len(letters), *self._labels)

    def record_failure(self, error: CdcError) -> None:
        """Record the error that interrupted the delivery."""
        with self._lock:
            self._error = error
        self._figures.add(metrics.ERRORS, 1, self._labels[0], "deliver", error.code)

    def record_notice(self, notice: str | None) -> None:
        """Record why the delivery does nothing at present, for example that it is paused."""
        with self._lock:
            self._notice = notice

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Return the dead letters for the catalog."""
        with self._lock:
            return self._letters

    def progress(self) -> SinkProgress | None:
        """Return the state of the delivery for the catalog; None until it was opened or failed for the first time."""
        with self._lock:
            error = self._error
            if self._position is None and error is None and self._notice is None:
                return None
            waits = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
            reason = self._notice
            if error is not None:
                reason = f"{error.code} {error.message} → {complete_remedy(error.fix, sink=self.name)}"
            return SinkProgress(
                sink=self.name,
                position=self._position or 0,
                committed_at=datetime.fromtimestamp(self._committed_at / 1e6, UTC) if self._committed_at else None,
                lag_seconds=max(self._lag, waits),
                state="failed" if error is not None else "paused" if reason is not None else "running",
                reason=reason,
            )


def dead_letter(delivery: str, key: ParkedKey) -> DeadLetter:
    """Return a parked key as the dead letter that commands, page and API show."""
    return DeadLetter(
        sink=delivery,
        topic=key.table,
        key=tuple("" if text is None else text for text in key.key),
        position=int(key.first.position),
        ordinal=key.first.ordinal,
        code=key.code,
        message=key.message,
        added_at=datetime.fromtimestamp(key.parked_at / 1e6, UTC),
    )
