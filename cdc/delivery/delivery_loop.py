"""The delivery loop: window of the log → events → destination → progress, one window after another.

A destination may collect: while the delivery is behind, it gets several windows before they are committed together.

Order is kept for events of one topic and key: an event that the destination refuses becomes a dead letter, and later
events of its key wait in the log until a person retries or discards it. Other keys continue.

The loop continues from the stored progress. Everything after it is sent again after a crash, with the same ids. A
destination that stores the progress together with the events gets nothing twice: it has no event after its progress.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from cdc.config.deliveries import DeliverySettings, StartAt
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.destinations.contract import CollectsWindows, Destination, EventsRefused
from cdc.delivery.event_source import EventSource, EventWindow, WindowPart
from cdc.delivery.progress import ParkedKey, Progress, ProgressFile
from cdc.errors import CdcError, ProgressDamaged, ProgressLost, Reaction
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
        self._progress = self._stored = Progress(log_id=log.log_id)
        self._stored_at = 0.0
        self._doubt: CdcError | None = None
        """Why the stored progress cannot be used; a rewind replaces it."""
        self._window: EventWindow | None = None
        """Window that is sent, or sent again because the destination has refused events of it.

        None while several windows are sent together: the loop keeps the events of one only.
        """
        self._collects_for = destination.collect_seconds if isinstance(destination, CollectsWindows) else 0.0
        self._tried_upto = Position(0)
        """End of the window that was sent last."""
        self._alone_upto = Position(0)
        """Position up to which each window is committed alone, because one of several windows has failed.

        Then it is known which window has the refused events, and the windows before an error are delivered.
        """

    @property
    def progress(self) -> Progress:
        """The progress, also through log rows without events, which is not stored at once."""
        return self._progress

    @property
    def stored(self) -> Progress:
        """The progress that was stored last, from which a new process would continue."""
        return self._stored

    def open(self, settings: DeliverySettings) -> None:
        """Connect to the destination, and continue from the stored progress; `check_stored` must follow."""
        self._log.refresh()
        start = (self._log.durable or Position(0)) if settings.start is StartAt.LATEST else Position(0)
        initial = Progress(log_id=self._log.log_id, position=start)
        try:
            stored = self._read_stored()
        except (ProgressDamaged, ProgressLost) as exc:
            self._doubt, self._progress = self._with_position(exc), initial
            return
        if not self._destination.stores_progress:
            self._progress = self._stored = self._store.open(initial)
        elif stored is not None:
            self._progress = self._stored = stored
        else:
            # a process that dies before its first events must not begin at a later position
            self._progress = self._committed(initial)
        self._figures.record_opened(self._progress)

    def check_stored(self) -> None:
        """Raise an error if the stored progress is lost, damaged, or of another log; only a rewind helps then."""
        if self._doubt is not None:
            raise self._doubt
        self._progress.check_log(self._log.log_id, self._figures.name)

    def step(self) -> bool:
        """Send and commit the next batch; return False if the log has nothing new.

        Raises an error with Reaction.RETRY if the destination is not available. The caller then closes and opens the
        loop again.
        """
        self._window = self._window or self._source.next(self._progress)
        if self._window is None:
            if self._progress != self._stored and self._is_store_due(self._progress):
                self._committed(self._progress)
            return False
        try:
            self._send_batch(self._window)
        except EventsRefused as refused:
            if self._window is None:
                self._begin_again()
            else:
                self._reopen()
                self._progress = _with_letters(self._progress, self._window, refused)
                self._figures.record_parked(self._progress)
        except CdcError as exc:
            if self._window is not None or exc.reaction is Reaction.HALT:
                raise
            self._begin_again()
        return True

    def _begin_again(self) -> None:
        """After an error in one of several windows, continue from the stored progress, and commit each one alone."""
        if (content := self._reopen()) is not None:  # only now the outcome of a commit that failed is known
            self._progress = self._stored = self._parsed(content)
        self._alone_upto = self._tried_upto

    def _send_batch(self, window: EventWindow) -> None:
        """Send and commit a window, with windows after it if the delivery is behind and the destination collects."""
        began, progress, sent = time.monotonic(), self._progress, 0
        while True:
            self._tried_upto = window.upto
            self._figures.begin_window(window)
            progress, events = self._sent(window, progress)
            sent += events
            is_due = time.monotonic() - began >= self._collects_for or window.upto <= self._alone_upto
            following = None if is_due or window.window.is_last else self._following(progress)
            if following is None:
                break
            window, self._window = following, None
        if sent or self._is_store_due(progress):
            progress = self._committed(progress, window)
        self._window, self._progress = None, progress
        self._figures.record_window(window, progress, sent)

    def _following(self, progress: Progress) -> EventWindow | None:
        """Return the next window; None if it cannot be read, which the next step reports."""
        try:
            return self._source.next(progress)
        except CdcError:
            return None

    def retry(self, letter: ParkedKey) -> None:
        """Send all events of a parked key, from the first one that was refused; raises the error of a new refusal.

        If a TRUNCATE of the table was sent since, only the events after it are.
        """
        try:
            for events in self._source.events_of_key(letter, self._progress):
                self._destination.send(events)
            self._progress = self._committed(self._progress.without(letter.identity))
        except EventsRefused as refused:
            self._reopen()
            if refused.refused:
                raise next(iter(refused.refused.values())) from refused
            self.retry(letter)
        except CdcError as exc:
            if exc.reaction is not Reaction.RETRY:
                self._reopen()
            raise
        self._figures.record_parked(self._progress)

    def discard(self, letter: ParkedKey) -> None:
        """Remove a dead letter: events of its key are sent again, beginning after the present position."""
        self._progress = self._committed(self._progress.without(letter.identity))
        self._figures.record_parked(self._progress)

    def rewind(self, position: Position, request: str | None = None) -> None:
        """Continue after another position of this log; events that were sent already have the same ids again.

        request: name of a request, which is carried out once, also if the process dies before it is answered.
        """
        if request is not None and request == self._progress.rewind:
            return
        parked = self._progress.parked if self._progress.log_id == self._log.log_id else {}
        progress = replace(
            self._progress,
            log_id=self._log.log_id,
            position=position,
            bootstrap=None,
            parked=parked,
            rewind=request,
        )
        if self._doubt is not None and not self._destination.stores_progress:
            self._store.begin_again(progress)
        self._window, self._progress = None, self._committed(progress)
        self._doubt = None
        self._figures.record_opened(self._progress)

    def close(self) -> None:
        """Disconnect from the destination."""
        self._destination.close()

    def _sent(self, window: EventWindow, progress: Progress) -> tuple[Progress, int]:
        """Send the events of the window after a progress; return the progress after it, and the number of events."""
        progress, sent = replace(progress, position=window.upto, bootstrap=window.window.bootstrap), 0
        for part in window.parts:
            progress = _with_refused(progress, part)
            events = part.unparked(progress)
            try:
                self._destination.send(events)
            except EventsRefused as refused:
                if not refused.others_acknowledged:
                    raise
                progress = _with_letters(progress, window, refused)
            sent += len(events)
            progress = replace(progress, dropped=progress.dropped + part.selection.dropped)
        hit("delivery_sent")
        return progress, sent

    def _committed(self, progress: Progress, window: EventWindow | None = None) -> Progress:
        """Commit the batch and store the progress; return it with the dead letters of events that were refused.

        window: the window whose events the batch has.
        """
        try:
            self._destination.commit(progress.to_json())
        except EventsRefused as refused:
            if window is None or not refused.others_acknowledged:
                raise
            return self._committed(_with_letters(progress, window, refused))
        hit("delivery_acknowledged")
        if not self._destination.stores_progress:
            self._store.write(progress)
        self._stored, self._stored_at = progress, time.monotonic()
        return progress

    def _is_store_due(self, progress: Progress) -> bool:
        changed = progress.parked != self._stored.parked or progress.dropped != self._stored.dropped
        return changed or time.monotonic() - self._stored_at >= STORE_EVERY

    def _reopen(self) -> bytes | None:
        """Open the destination again, after which nothing of the interrupted batch will come; return its progress."""
        self._destination.close()
        return self._destination.open()

    def _read_stored(self) -> Progress | None:
        """Open the destination and return the stored progress; None if the delivery is new. Raises ProgressDamaged and
        ProgressLost if it was sent before, and nobody knows how far.
        """
        content = self._destination.open()
        if self._destination.stores_progress:
            stored = None if content is None else self._parsed(content)
        else:
            stored = self._store.read()
        if stored is None and self._store.registered() is not None:
            raise ProgressLost(
                f"delivery {self._figures.name!r} was sent before, but its progress is gone: it was removed, or the "
                "destination is another one"
            )
        return stored

    def _with_position(self, error: CdcError) -> CdcError:
        """Return the error with the position up to which the delivery was sent, if the log has it."""
        registered = self._store.registered()
        if registered is None:
            return error
        return type(error)(
            f"{error.message}; everything up to {registered!s} was sent, and perhaps more",
            remedy=f"run 'cdc deliveries rewind SINK --to {registered!s}' to send what follows, or 'cdc deliveries "
            "rewind SINK' to send everything again",
        )

    def _parsed(self, content: bytes) -> Progress:
        return Progress.parse(content, f"at the destination of {self._figures.name!r}")


def _with_refused(progress: Progress, part: WindowPart) -> Progress:
    for letter, reason in part.encoded.refused:
        progress = progress.parking(letter, reason)
    return progress


def _with_letters(progress: Progress, window: EventWindow, refused: EventsRefused) -> Progress:
    """Return the progress with the keys of refused events; raises the reason if an event has no key to park."""
    waiting: dict[str, CdcError] = dict(refused.refused)
    for part in window.parts:
        for number, event in enumerate(part.encoded.events if waiting else ()):
            if (reason := waiting.pop(event.id, None)) is not None:
                progress = progress.parking(part.encoded.letters(number), reason)
    for reason in waiting.values():
        raise reason
    return progress
