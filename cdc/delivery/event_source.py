"""Events of a delivery: reads windows of the log and encodes them.

While the loop waits for the destination, a thread reads and encodes the next windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.event_encoder import EventEncoder, Schemas
from cdc.delivery.event_part import EventPart
from cdc.delivery.formats.contract import Format
from cdc.delivery.log_windows import MOST_BYTES, LogWindow, LogWindows
from cdc.delivery.overload import NO_ROWS, OverloadPolicy, Selection
from cdc.delivery.progress import ParkedKey, Progress
from cdc.delivery.retried_events import ParkedEvents
from cdc.delivery.transaction_boundaries import TransactionBoundaries, boundaries_for
from cdc.log.reader import LogReader
from cdc.position import Position

AHEAD: Final = 2
"""Number of windows that are read ahead: the thread also has work while several windows are committed together."""
LARGE: Final = MOST_BYTES // 4
"""Bytes of the rows of a window from which only one is read ahead, so that it needs no more memory."""
_Start = tuple[Position, Position | None]
"""Position and bootstrap of a progress."""


class WindowPart(NamedTuple):
    """The events of one part of a window, and what the overload policy left out."""

    encoded: EventPart
    selection: Selection

    def sendable(self, progress: Progress) -> Sequence[Event]:
        """Return the events whose key has no dead letter, and the event that reports a gap."""
        events = self.encoded.events
        if progress.parked:
            events = [event for number, event in enumerate(events) if not self._waits(number, progress)]
        return events if self.selection.gap is None else [*events, self.selection.gap]

    def _waits(self, number: int, progress: Progress) -> bool:
        parked = progress.parked.get(self.encoded.letters(number).identity)
        event = self.encoded.events[number]
        return parked is not None and (event.position, event.ordinal) >= parked.first


@dataclass(frozen=True, slots=True)
class EventWindow:
    """The events of one window of the log."""

    window: LogWindow
    parts: Iterable[WindowPart]
    """The parts, which can be iterated several times; those of a transaction that is larger than a window are read
    from the log each time.
    """
    committed_at: int
    """Commit time of the last transaction of the window, in microseconds UTC; 0 if unknown."""

    @property
    def upto(self) -> Position:
        """The last position of the window."""
        return self.window.upto


class EventSource:
    """Reads the events of one delivery from the log, in order. One thread calls it."""

    def __init__(
        self, log: LogReader, settings: DeliverySettings, identity: DeliveryIdentity, encoding: Format
    ) -> None:
        self._log, self._settings = log, settings
        self._encoder = EventEncoder(settings, identity, encoding)
        self._windows = LogWindows(log, self._encoder.tables)
        self._boundaries = partial(boundaries_for, settings, identity, encoding)
        self._parked = ParkedEvents(log, self._encoder, self._boundaries, settings.batch)
        self._overload = OverloadPolicy(settings, identity)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"encode {settings.name}")
        self._ahead = deque[Future[EventWindow | None]]()
        """Windows after the one that was returned last, each None if there is none, or it has to be read again."""
        self._end: _Start | None = None
        """End of the window that was returned last."""
        self._schemas: tuple[Position, Schemas] | None = None
        """Schemas in force at a position, which is usually the end of the window that was read last."""

    def next(self, progress: Progress) -> EventWindow | None:
        """Return the window after the position of a progress; None if the log has nothing after it.

        A window without events is returned too, so that the position advances.
        """
        start = (progress.position, progress.bootstrap)
        window = self._read_ahead() if self._end == start else None
        if window is None:
            self._settle()
            window = self._read(*start)
        if window is not None:
            self._end = (window.upto, window.window.bootstrap)
            while len(self._ahead) < _ahead(window):
                self._ahead.append(self._thread.submit(self._read_after, self._ahead[-1] if self._ahead else window))
        return window

    def events_of_key(self, letter: ParkedKey, progress: Progress) -> Iterator[list[Event]]:
        """Yield the events of one parked key from its first change up to the position of a progress.

        Raises what `ParkedEvents.of` raises.
        """
        self._settle()
        yield from self._parked.of(letter, progress)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self) -> EventWindow | None:
        """Return the window that the thread has read first; None if there is none, or it has failed."""
        if not self._ahead:
            return None
        first = self._ahead.popleft()
        return None if first.exception() else first.result()

    def _settle(self) -> None:
        """Wait until the thread has read ahead, and forget what it has read."""
        while self._ahead:
            self._ahead.popleft().exception()

    def _read_after(self, before: EventWindow | Future[EventWindow | None]) -> EventWindow | None:
        """Return the window after another one; None if that one was not read, or is not to be continued."""
        window = before if isinstance(before, EventWindow) else before.result()
        return self._read(window.upto, window.window.bootstrap) if window is not None and _ahead(window) else None

    def _read(self, after: Position, bootstrap: Position | None) -> EventWindow | None:
        window = self._windows.next(after, bootstrap, self._overload.most(self._settings.batch))
        if window is None:
            return None
        schemas = dict(self._schemas[1]) if self._schemas is not None and self._schemas[0] == after else None
        schemas = self._log.schemas(after) if schemas is None else schemas
        parts = _Parts(window, self._encoder, self._overload, schemas, self._boundaries)
        committed_at = self._log.committed_at(window.upto)
        if window.is_large:
            return EventWindow(window, parts, committed_at)
        encoded_parts = list(parts)
        self._schemas = window.upto, parts.schemas_after
        return EventWindow(window, encoded_parts, committed_at)


def _ahead(window: EventWindow) -> int:
    """Return how many windows to read ahead after one; none if its events are not in memory, or the log has no more."""
    rows = window.window.rows
    if rows is None or not isinstance(window.parts, list) or window.window.is_last:
        return 0
    return AHEAD if rows.nbytes < LARGE else 1


class _Parts:
    """The parts of a window, encoded each time that they are iterated."""

    def __init__(
        self,
        window: LogWindow,
        encoder: EventEncoder,
        overload: OverloadPolicy,
        schemas: Schemas,
        boundaries: Callable[[], TransactionBoundaries | None],
    ) -> None:
        self._boundaries = boundaries
        self._window = window
        self._encoder = encoder
        self._schemas = schemas
        self._select = overload.for_window(is_behind=not window.is_last)
        self.schemas_after = schemas

    def __iter__(self) -> Iterator[WindowPart]:
        self.schemas_after = dict(self._schemas)
        boundaries = self._boundaries()
        number = None if boundaries is None else boundaries.counter.number
        for rows in self._window.tables():
            selection = self._select(self._encoder.selected(rows))
            part = self._encoder.encode(selection.rows, self.schemas_after, number)
            yield WindowPart(part if boundaries is None else boundaries.added(part, selection.rows), selection)
        if boundaries is not None and (ending := boundaries.end()).events:
            yield WindowPart(ending, NO_ROWS)
