"""Events of a delivery from the log again, in pages, for receivers that have missed some.

A page begins after an event, so it may begin inside a transaction. The transaction is then read again, and what
precedes is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Self

from cdc.delivery.destinations.contract import Event, HistoryPage
from cdc.delivery.event_part import EventPart
from cdc.delivery.event_source import EventSource
from cdc.delivery.formats.contract import TOMBSTONE
from cdc.delivery.progress import Progress
from cdc.errors import DeliveryOfAnotherLog, MalformedPosition
from cdc.log.reader import LogReader
from cdc.position import Position

_ID: Final = re.compile(r"([^/]+)/((?:\d+:)?[0-9A-F]+/[0-9A-F]+)/(\d+)(/.*)?")
_AFTER_ALL: Final = 2**31
"""Ordinal of the end of a transaction."""
_PAGE: Final = re.compile(r"~(\d{1,19})\.(\d{1,10})\.([01])\.(\d{1,19})")


@dataclass(frozen=True, slots=True)
class _Start:
    """The event after which a page begins, and the compacted state that it belongs to, if any."""

    position: int = 0
    ordinal: int = -1
    is_tombstone: bool = False
    bootstrap: int = 0

    def precedes(self, event: Event) -> bool:
        """Return True if the event is in the page. The tombstone of a delete follows the delete."""
        own = event.position, event.ordinal, event.id.endswith(TOMBSTONE)
        return own > (self.position, self.ordinal, self.is_tombstone)

    def __str__(self) -> str:
        return f"~{self.position}.{self.ordinal}.{self.is_tombstone:d}.{self.bootstrap}"

    @classmethod
    def parse(cls, text: str, log_id: str) -> Self:
        """Raise MalformedPosition or DeliveryOfAnotherLog for a text that is no start in this log."""
        if not text:
            return cls()
        if page := _PAGE.fullmatch(text):
            return cls(int(page[1]), int(page[2]), page[3] == "1", int(page[4]))
        match = _ID.fullmatch(text)
        if match is None:
            raise MalformedPosition("malformed start: expected the id of an event, or the end of a page")
        if match[1] != log_id:
            raise DeliveryOfAnotherLog(f"the event {text!r} is of another log than {log_id!r}")
        return cls(int(Position.parse(match[2])), int(match[3]), (match[4] or "").endswith(TOMBSTONE))


class LoggedHistory:
    """The history of one delivery; see EventHistory."""

    def __init__(self, log: LogReader, source: EventSource, parked: Callable[[], Collection[str]]) -> None:
        """Log and source: of its own, because the loop uses another pair at the same time.

        parked: returns the keys with dead letters; a page has none of their events.
        """
        self._log = log
        self._source = source
        self._parked = parked
        self._lock = Lock()

    def page(self, after: str, most: int) -> HistoryPage:
        """Return the events after another one; see EventHistory."""
        with self._lock:
            return self._page(_Start.parse(after, self._log.log_id), most)

    def close(self) -> None:
        """End the thread of the source."""
        self._source.close()

    def _page(self, start: _Start, most: int) -> HistoryPage:
        position, bootstrap = Position(start.position), Position(start.bootstrap) if start.bootstrap else None
        if 0 <= start.ordinal < _AFTER_ALL:
            position = Position(max(0, start.position - 1))  # the rest of this transaction is in the page
        events: list[Event] = []
        parked = set(self._parked())
        while True:
            window = self._source.next(Progress(log_id=self._log.log_id, position=position, bootstrap=bootstrap))
            if window is None:
                return HistoryPage(events, str(_after_all(position, start, bootstrap)), is_last=True)
            for part in window.parts:
                parked |= {letter.identity for letter, _ in part.encoded.refused}
                events += [event for event in _without(part.encoded, parked) if start.precedes(event)]
                if len(events) >= most:
                    last = events[most - 1]
                    is_compacted = position < self._log.oldest
                    state = (window.window.bootstrap or window.upto) if is_compacted else 0
                    end = _Start(last.position, last.ordinal, last.id.endswith(TOMBSTONE), int(state))
                    return HistoryPage(events[:most], str(end), is_last=False)
            position, bootstrap = window.upto, window.window.bootstrap


def _without(part: EventPart, parked: Collection[str]) -> Sequence[Event]:
    if not parked:
        return part.events
    return [event for number, event in enumerate(part.events) if part.letters(number).identity not in parked]


def _after_all(position: Position, start: _Start, bootstrap: Position | None) -> _Start:
    """Return the start of the next page when every row up to a position was read."""
    if position < start.position:
        return start
    return _Start(int(position), _AFTER_ALL, is_tombstone=True, bootstrap=int(bootstrap or 0))
