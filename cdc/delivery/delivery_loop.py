"""The delivery loop: window of the log → events → destination → progress, one window after another.

Order is kept for events of one topic and key: an event that the destination refuses becomes a dead letter, and later
events of its key wait in the log until a person retries or discards it. Other keys continue.

The loop continues from the stored progress. Everything after it is sent again after a crash: to a destination that
stores the progress with the events this happens at most zero times, to any other one with the same ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from cdc.config.deliveries import DeliverySettings, StartAt
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.destinations.contract import Destination, Event, EventsRefused
from cdc.delivery.event_source import EventPart, EventSource, EventWindow
from cdc.delivery.progress import ParkedKey, Progress, ProgressFile
from cdc.errors import CdcError, DeadLetterLimitExceeded
from cdc.failpoint import hit
from cdc.log.reader import LogReader
from cdc.position import Position

STORE_EVERY: Final = 5.0
"""Seconds between two stores of a progress that changed only because the log has rows without events."""


class DeliveryLoop:
    """Sends the events of one delivery; one thread uses it."""

    def __init__(
        self,
        log: LogReader,
        source: EventSource,
        destination: Destination,
        store: ProgressFile,
        figures: DeliveryFigures,
    ) -> None:
        self._log, self._source, self._destination, self._store = log, source, destination, store
        self._figures = figures
        self._progress = Progress(log_id=log.log_id)
        self._stored_at = 0.0

    @property
    def progress(self) -> Progress:
        """The progress; it is stored, apart from log rows without events."""
        return self._progress

    def open(self, settings: DeliverySettings) -> None:
        """Connect to the destination, and continue from the stored progress."""
        self._log.refresh()
        start = (self._log.durable or Position(0)) if settings.start is StartAt.LATEST else Position(0)
        initial = Progress(log_id=self._log.log_id, position=start)
        stored = self._destination.open()
        if self._destination.stores_progress:
            self._progress = initial if stored is None else Progress.from_json(stored)
        else:
            self._progress = self._store.open(initial)
        self._progress.check_log(self._log.log_id, settings.name)
        self._figures.record_opened(self._progress)

    def step(self) -> bool:
        """Send the next window of the log; return False if the log has nothing new.

        Raises an error with Reaction.RETRY if the destination is not available. The caller then closes and opens the
        loop again.
        """
        window = self._source.next(self._progress)
        if window is None:
            return False
        self._figures.begin_window(window)
        progress = replace(self._progress, position=window.upto, bootstrap=window.window.bootstrap)
        sent = 0
        try:
            for part in window.parts:
                progress = _with_refused(progress, part)
                events = _unparked(part, progress)
                self._destination.send(events)
                sent += len(events)
                progress = replace(progress, dropped=progress.dropped + part.dropped)
            hit("delivery_sent")
            if sent or self._is_store_due(progress):
                self._commit(progress)
        except EventsRefused as refused:
            self._park(window, refused, progress)
            return True
        self._progress = progress
        self._figures.record_window(window, progress, sent)
        return True

    def retry(self, letter: ParkedKey) -> None:
        """Send all events of a parked key, from the first one that was refused; raises the error of a new refusal."""
        progress = self._progress.without(letter.identity)
        try:
            for events in self._source.events_of_key(letter, self._progress.position):
                self._destination.send(events)
            self._commit(progress)
        except EventsRefused as refused:
            self._reopen()
            raise next(iter(refused.refused.values())) from refused
        self._progress = progress
        self._figures.record_parked(progress)

    def discard(self, letter: ParkedKey) -> None:
        """Remove a dead letter: events of its key are sent again, beginning after the present position."""
        progress = self._progress.without(letter.identity)
        self._commit(progress)
        self._progress = progress
        self._figures.record_parked(progress)

    def rewind(self, position: Position) -> None:
        """Continue after another position; events that were sent already are sent again with the same ids."""
        progress = replace(self._progress, position=position, bootstrap=None)
        self._commit(progress)
        self._progress = progress

    def close(self) -> None:
        """Disconnect from the destination."""
        self._destination.close()

    def _commit(self, progress: Progress) -> None:
        self._destination.commit(progress.to_json())
        hit("delivery_acknowledged")
        if not self._destination.stores_progress:
            self._store.write(progress)
        self._stored_at = time.monotonic()

    def _is_store_due(self, progress: Progress) -> bool:
        changed = progress.parked != self._progress.parked or progress.dropped != self._progress.dropped
        return changed or time.monotonic() - self._stored_at >= STORE_EVERY

    def _park(self, window: EventWindow, refused: EventsRefused, progress: Progress) -> None:
        """Make refused events dead letters. Unless the others are acknowledged, send the window again without them."""
        if refused.others_acknowledged:
            progress = _with_letters(progress, window.parts, refused)
            self._commit(progress)
            self._progress = progress
        else:
            self._source.again(window)
            again = self._source.next(self._progress)
            parts = window.parts if again is None else again.parts
            self._progress = _with_letters(self._progress, parts, refused)
            self._source.again(window)
            self._reopen()
        self._figures.record_parked(self._progress)

    def _reopen(self) -> None:
        """Open the destination again, after which nothing of the interrupted batch is there or will come."""
        self._destination.close()
        self._destination.open()


def check_limit(progress: Progress, settings: DeliverySettings) -> None:
    """Raise DeadLetterLimitExceeded if the delivery has more dead letters than it may have."""
    if len(progress.parked) > settings.stop_at:
        raise DeadLetterLimitExceeded(
            f"delivery {settings.name!r} has {len(progress.parked):,} dead-letter keys, but may have at most "
            f"{settings.stop_at:,}"
        )


def _unparked(part: EventPart, progress: Progress) -> Sequence[Event]:
    """Return the events whose keys are not parked, and the event that reports a gap."""
    events: list[Event] = part.events
    if progress.parked:
        events = [event for number, event in enumerate(events) if part.letters(number).identity not in progress.parked]
    return events if part.gap is None else [*events, part.gap]


def _with_refused(progress: Progress, part: EventPart) -> Progress:
    for letter, reason in part.refused:
        progress = progress.parking(letter, reason)
    return progress


def _with_letters(progress: Progress, parts: Iterable[EventPart], refused: EventsRefused) -> Progress:
    waiting: dict[str, CdcError] = dict(refused.refused)
    for part in parts:
        for number, event in enumerate(part.events if waiting else ()):
            if (reason := waiting.pop(event.id, None)) is not None:
                progress = progress.parking(part.letters(number), reason)
    return progress
