"""Events of a delivery: reads windows of the log and encodes them.

While the loop waits for the destination, a thread reads and encodes the next window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings
from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.event_encoder import EventEncoder, Schemas
from cdc.delivery.event_part import EventPart
from cdc.delivery.formats.contract import Format
from cdc.delivery.log_windows import LogWindow, LogWindows, next_window
from cdc.delivery.overload import OverloadPolicy, Selection
from cdc.delivery.progress import ParkedKey, Progress
from cdc.delivery.transaction_boundaries import TransactionBoundaries, boundaries_for
from cdc.errors import EventRefused
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.position import ChangePosition, Position

_TRUNCATE: Final = Operation.TRUNCATE.value
_SCHEMA: Final = Operation.SCHEMA.value
_Start = tuple[Position, Position | None]
"""Position and bootstrap of a progress."""


class WindowPart(NamedTuple):
    """The events of one part of a window, and what the overload policy left out."""

    encoded: EventPart
    selection: Selection

    def unparked(self, progress: Progress) -> Sequence[Event]:
        """Return the events that do not wait behind a dead letter, and the event that reports a gap."""
        events: list[Event] = self.encoded.events
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
        self._overload = OverloadPolicy(settings, identity)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"encode {settings.name}")
        self._ahead: tuple[_Start, Future[EventWindow | None]] | None = None
        self._schemas: tuple[Position, Schemas] | None = None
        """Schemas in force at a position, which is usually the end of the window that was read last."""

    def next(self, progress: Progress) -> EventWindow | None:
        """Return the window after the position of a progress; None if the log has nothing after it.

        A window without events is returned too, so that the position advances.
        """
        start = (progress.position, progress.bootstrap)
        found = self._settled(start) or self._read(*start)
        if found is not None and isinstance(found.parts, list) and not found.window.is_last:
            following = (found.upto, found.window.bootstrap)
            self._ahead = following, self._thread.submit(self._read, *following)
        return found

    def events_of_key(self, letter: ParkedKey, progress: Progress) -> Iterator[list[Event]]:
        """Yield the events of one parked key from its first change up to the position of a progress.

        Events before the last TRUNCATE of the table that was sent are left out: sent now, they would restore a row
        that the consumer has removed. If changes of the key were trimmed from the log, its compacted state has replaced
        them. Raises the error of a change that cannot be encoded, and EventRefused for a TRUNCATE that comes too late.
        """
        self._settled(None)
        self._log.refresh()
        self._check_truncate(letter, progress)
        letter = self._after_truncate(letter, progress)
        schemas = self._log.schemas(Position(letter.first.position - 1))
        for window in self._windows_of(letter, progress.position):
            boundaries = self._boundaries()
            number = None if boundaries is None else boundaries.counter.number
            for rows in window.tables():
                selected = self._encoder.selected(rows.filter(pc.less_equal(rows["position"], int(progress.position))))
                part = self._encoder.encode(selected, schemas, number)
                yield _of_key(letter, part if boundaries is None else boundaries.added(part, selected))
            if boundaries is not None:
                yield _of_key(letter, boundaries.end())

    def _check_truncate(self, letter: ParkedKey, progress: Progress) -> None:
        """Raise EventRefused if the letter is a TRUNCATE, which would remove rows that were sent after it."""
        if letter.relation is None or not letter.key or any(part is not None for part in letter.key):
            return  # the truncates of a table without a key wait together with its rows
        is_truncate = False
        for window in self._windows_of(letter, progress.position):
            for rows in window.tables(self._encoder.tables):
                own = rows.filter(pc.equal(rows["relation"], letter.relation)).select(["position", "ordinal", "op"])
                for position, ordinal, operation in zip(*own.to_pydict().values(), strict=True):
                    if (position, ordinal) == letter.first:
                        is_truncate = operation == _TRUNCATE
                    elif is_truncate and operation in ROW_OPERATIONS and position <= progress.position:
                        raise EventRefused(
                            f"a TRUNCATE of table {letter.table!r} would remove rows that were sent after it",
                            remedy="discard the dead letter, then run 'cdc deliveries rewind SINK --to "
                            f"{Position(letter.first.position - 1)!s}' to send the TRUNCATE and the changes after it",
                        )

    def _after_truncate(self, letter: ParkedKey, progress: Progress) -> ParkedKey:
        """Return the letter as if its first change were after the last TRUNCATE of its table that was sent."""
        found, schemas = letter, self._log.schemas(Position(letter.first.position - 1))
        for window in self._windows_of(letter, progress.position) if letter.relation is not None else ():
            for rows in window.tables():
                of_table = pc.and_(pc.equal(rows["op"], _TRUNCATE), pc.equal(rows["relation"], letter.relation))
                wanted = pc.or_(of_table, pc.equal(rows["op"], _SCHEMA))
                part = self._encoder.encode(self._encoder.selected(rows.filter(wanted).combine_chunks()), schemas)
                for event, truncate in zip(part.events, map(part.letters, range(len(part.events))), strict=True):
                    parked = progress.parked.get(truncate.identity)
                    was_sent = parked is None or truncate.first < parked.first
                    if was_sent and letter.first <= truncate.first and event.position <= progress.position:
                        found = replace(letter, first=ChangePosition(truncate.first.position, event.ordinal + 1))
        return found

    def _windows_of(self, letter: ParkedKey, upto: Position) -> Iterator[LogWindow]:
        """Yield the windows from the first change of a parked key up to a position."""
        after = Position(letter.first.position - 1)
        while after < upto:
            self._log.refresh()
            horizon = None if self._log.compacted is None else self._log.compacted.horizon
            is_trimmed = after < self._log.oldest
            bootstrap = horizon if is_trimmed else None
            window = next_window(self._log, after, bootstrap, self._settings.batch, self._encoder.tables)
            if window is None:
                return
            yield window
            after = window.upto

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _settled(self, start: _Start | None) -> EventWindow | None:
        """Wait until the thread has read ahead, and return its window if it begins at `start`."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead[0] == start:
            return ahead[1].result()
        ahead[1].exception()
        return None

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
        found = list(parts)
        self._schemas = window.upto, parts.schemas_after
        return EventWindow(window, found, committed_at)


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
        self._window, self._encoder, self._schemas = window, encoder, schemas
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
            yield WindowPart(ending, Selection(LOG_SCHEMA.empty_table()))


def _of_key(letter: ParkedKey, part: EventPart) -> list[Event]:
    for parked, refusal in part.refused:
        if parked.identity == letter.identity and parked.first >= letter.first:
            raise refusal
    return [
        event
        for number, event in enumerate(part.events)
        if (event.position, event.ordinal) >= letter.first and part.letters(number).identity == letter.identity
    ]
