"""The delivery loop: window of the log → events → destination → progress, one window after another.

A destination may collect: while the delivery is behind, it gets several windows before they are committed together.
`batch_state` has the states of such a batch, and what follows from a commit, a refusal and an error in each.

Order is kept for events of one topic and key: an event that the destination refuses becomes a dead letter, and later
events of its key wait in the log until a person retries or discards it. Other keys continue.

The loop continues from the stored progress. Everything after it is sent again after a crash, with the same ids. A
destination that stores the progress together with the events gets nothing twice: it has no event after its progress.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cdc.config.deliveries import DeliverySettings, StartAt
from cdc.delivery.batch_state import BatchState, Idle, OneWindow, SentBatch, unnamed_refusal
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
KEY_ATTEMPTS: Final = 5
"""Maximum number of times that `retry` sends a key: Kafka names a refused event at the second one."""


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
        self._log = log
        self._source = source
        self._destination = destination
        self._store = store
        self._figures = figures
        self._progress = self._stored = Progress(log_id=log.log_id)
        self._stored_at = 0.0
        self._doubt: CdcError | None = None
        """Why the stored progress cannot be used; a rewind replaces it."""
        self._state: BatchState = Idle()
        self._collects_for = destination.collect_seconds if isinstance(destination, CollectsWindows) else 0.0

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
        if isinstance(self._state, Idle):
            window = self._source.next(self._progress)
            if window is None:
                if self._progress != self._stored and self._is_store_due(self._progress):
                    self._committed(self._progress)
                return False
            self._state = self._state.begin(window)
        try:
            self._send_batch(self._state)
        except (EventsRefused, CdcError) as error:
            self._recover(self._state, error)
        return True

    def _send_batch(self, state: SentBatch) -> None:
        """Send and commit a window, with windows after it if the delivery is behind and the destination collects."""
        progress = self._progress
        sent = 0
        ends_at = time.monotonic() + self._collects_for
        while True:
            self._figures.begin_window(state.window)
            progress, events = self._send_window(state.window, progress)
            sent += events
            following = self._following(progress) if state.may_grow and time.monotonic() < ends_at else None
            if following is None:
                break
            self._state = state = state.add(following)
        if sent or self._is_store_due(progress):
            progress = self._committed(progress, state.window)
        self._state = state.commit()
        self._progress = progress
        self._figures.record_window(state.window, progress, sent)

    def _recover(self, failed: SentBatch, error: EventsRefused | CdcError) -> None:
        """After an error in a batch, open the destination again and make the dead letters; raises what ends the loop.

        failed: the state in which the error came.
        """
        self._state = Idle()
        following = failed.recover(error)
        content = self._reopen()  # only now the outcome of a commit that failed is known
        if isinstance(following, OneWindow):
            self._progress = _with_letters(self._progress, following.window, following.refused)
            self._figures.record_parked(self._progress)
        elif content is not None:
            self._progress = self._stored = self._parsed(content)
        self._state = following

    def _following(self, progress: Progress) -> EventWindow | None:
        """Return the next window; None if it cannot be read, which the next step reports."""
        try:
            return self._source.next(progress)
        except CdcError:
            return None

    def retry(self, letter: ParkedKey) -> None:
        """Send all events of a parked key, from the first one that was refused; raises the error of a new refusal.

        If a TRUNCATE of the table was sent since, only the events after it are. Raises DestinationUnavailable if the
        destination refuses them and names none.
        """
        for _ in range(KEY_ATTEMPTS):
            try:
                for events in self._source.events_of_key(letter, self._progress):
                    self._destination.send(events)
                self._progress = self._committed(self._progress.without(letter.identity))
            except EventsRefused as refused:
                self._reopen()
                if refused.refused:
                    raise next(iter(refused.refused.values())) from refused
            except CdcError as exc:
                if exc.reaction is not Reaction.RETRY:
                    self._reopen()
                raise
            else:
                self._figures.record_parked(self._progress)
                return
        raise unnamed_refusal(f"events of a parked key of topic {letter.topic!r}")

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
        self._progress = self._committed(progress)
        self._state = Idle()
        self._doubt = None
        self._figures.record_opened(self._progress)

    def close(self) -> None:
        """Disconnect from the destination."""
        self._destination.close()

    def _send_window(self, window: EventWindow, progress: Progress) -> tuple[Progress, int]:
        """Send the window's events; return the new progress and the number sent."""
        progress = replace(progress, position=window.upto, bootstrap=window.window.bootstrap)
        sent = 0
        for part in window.parts:
            progress = _with_refused(progress, part)
            events = part.sendable(progress)
            try:
                self._destination.send(events)
            except EventsRefused as refused:
                if not refused.others_acknowledged:
                    raise
                progress = _with_letters(progress, window, refused.refused)
            sent += len(events)
            progress = replace(progress, dropped=progress.dropped + part.selection.dropped)
        hit("delivery_sent")
        return progress, sent

    def _committed(self, progress: Progress, window: EventWindow | None = None) -> Progress:
        """Commit the batch and store the progress; return it with the dead letters of events that were refused.

        window: the window whose events the batch has.
        """
        while True:
            try:
                self._destination.commit(progress.to_json())
            except EventsRefused as refused:
                # each of these repetitions makes a dead letter of an event at least
                if window is None or not refused.others_acknowledged or not refused.refused:
                    raise
                progress = _with_letters(progress, window, refused.refused)
            else:
                break
        hit("delivery_acknowledged")
        if not self._destination.stores_progress:
            self._store.write(progress)
        self._stored = progress
        self._stored_at = time.monotonic()
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


def _with_letters(progress: Progress, window: EventWindow, refused: Mapping[str, CdcError]) -> Progress:
    """Return the progress with the keys of refused events as dead letters.

    refused: id of each event → the reason, which is raised for an event without a key.
    """
    reasons = dict(refused)
    for part in window.parts if reasons else ():
        for number, event in enumerate(part.encoded.events):
            if (reason := reasons.pop(event.id, None)) is not None:
                progress = progress.parking(part.encoded.letters(number), reason)
    for reason in reasons.values():
        raise reason
    return progress
