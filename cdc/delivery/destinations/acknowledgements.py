"""Which events of a batch may be sent, and which are unacknowledged, for destinations at brokers that acknowledge.

Events are sent without waiting for each answer. Where a broker may refuse one event and accept the next, at most one
event of each topic and key is unacknowledged, so that no event passes an earlier one of its key.

The thread of the client library only puts answers into a queue. Everything else happens in the thread of the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.errors import CdcError, DestinationUnavailable

AT_ONCE: Final = 256
"""Events that are given to the client library in one call."""
LARGEST_IN_FLIGHT: Final = 32 << 20
"""Bytes of values above which the window waits for answers; a single larger event is sent alone."""


class BrokerAnswer(NamedTuple):
    """What the broker says about sent events."""

    tokens: Iterable[Hashable]
    """What `publish` returned for the events; unknown tokens are ignored."""
    error: CdcError | None = None
    """Reason for which it refuses them; None: it has them."""


Answers = SimpleQueue[BrokerAnswer | CdcError]
"""Answers from the thread of a client library; an error means that no more will come."""
_Unit = tuple[str, bytes | None] | None


class AcknowledgementWindow:
    """Sends events in order, with a bounded number of unacknowledged ones."""

    def __init__(
        self,
        publish: Callable[[Sequence[Event]], Sequence[Hashable]],
        limit: int,
        timeout: float,
        *,
        one_per_key: bool,
    ) -> None:
        """publish: gives events to the client library, and returns a token for each; timeout: of the next answer."""
        self._publish = publish
        self._limit = limit
        self._timeout = timeout
        self._one_per_key = one_per_key
        self.answers: Answers = SimpleQueue()
        self._in_flight: dict[Hashable, Event] = {}
        self._bytes = 0
        self._ready: deque[Event] = deque()
        self._waiting: dict[_Unit, deque[Event]] = {}
        self._number_waiting = 0
        self._refused: dict[str, CdcError] = {}

    def send(self, events: Iterable[Event]) -> None:
        """Return when every event is sent. Raises the first error among the answers, and EventsRefused."""
        for event in events:
            self._add(event)
        while self._ready or self._number_waiting:
            self._take_answers()
            if chosen := self._next():
                self._in_flight.update(zip(self._publish(chosen), chosen, strict=True))
            else:
                self._wait_for_answer()
        self._take_answers()

    def wait(self) -> None:
        """Return when every event that was sent is acknowledged. Raises what `send` raises."""
        self._take_answers()
        while self._in_flight:
            self._wait_for_answer()
        self._check_refused()

    def _add(self, event: Event) -> None:
        unit = self._unit(event)
        if unit is None:
            self._ready.append(event)
        elif unit in self._waiting:
            self._waiting[unit].append(event)
            self._number_waiting += 1
        else:
            self._waiting[unit] = deque()
            self._ready.append(event)

    def _unit(self, event: Event) -> _Unit:
        return (event.topic, event.key) if self._one_per_key and event.key is not None else None

    def _next(self) -> list[Event]:
        """Events that may be sent now."""
        chosen: list[Event] = []
        room = min(self._limit - len(self._in_flight), AT_ONCE)
        while self._ready and len(chosen) < room and (self._bytes < LARGEST_IN_FLIGHT or not self._in_flight):
            event = self._ready.popleft()
            self._bytes += len(event.value or b"")
            chosen.append(event)
            if self._bytes >= LARGEST_IN_FLIGHT:
                break
        return chosen

    def _take_answers(self) -> None:
        while not self.answers.empty():
            self._take(self.answers.get())

    def _wait_for_answer(self) -> None:
        self._check_refused()
        try:
            self._take(self.answers.get(timeout=self._timeout))
        except Empty:
            raise DestinationUnavailable(
                f"the broker has acknowledged none of {len(self._in_flight):,} events within {self._timeout:g} s"
            ) from None

    def _take(self, answer: BrokerAnswer | CdcError) -> None:
        if isinstance(answer, CdcError):
            raise answer
        for token in answer.tokens:
            event = self._in_flight.pop(token, None)
            if event is not None:
                self._bytes -= len(event.value or b"")
                self._record(event, answer.error)

    def _record(self, event: Event, error: CdcError | None) -> None:
        if error is not None:
            # later events of its key stay unsent
            self._refused[event.id] = error
            return
        unit = self._unit(event)
        if unit is not None:
            later = self._waiting[unit]
            if later:
                self._ready.append(later.popleft())
                self._number_waiting -= 1
            else:
                del self._waiting[unit]

    def _check_refused(self) -> None:
        """Raise EventsRefused if events were refused and no event is in flight that may still be sent."""
        if self._refused and not self._in_flight:
            raise EventsRefused(self._refused)
