"""A destination in memory that refuses events and fails by plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from cdc.delivery.destinations.contract import Event, EventsRefused, Promise
from cdc.errors import CdcError, DestinationUnavailable, EventRefused

Refusal = Callable[[Event], bool]


def nothing(_event: Event) -> bool:
    """Refuse no event."""
    return False


class PlannedDestination:
    """Keeps acknowledged events. `delivered` is what a consumer sees, `stored` what a restart finds."""

    promise: ClassVar = Promise.EXACTLY_ONCE
    stores_progress: ClassVar = True

    def __init__(self, *, others_acknowledged: bool = False, refuse_at_commit: bool = False) -> None:
        self._others, self._at_commit = others_acknowledged, refuse_at_commit
        self.refused: Refusal = nothing
        self.delivered: list[Event] = []
        self.stored: bytes | None = None
        self.sends = self.commits = 0
        self.fail_at_send: int | None = None
        """Number of the call of `send` that fails, from 1."""
        self.lose_answer: int | None = None
        """Number of the commit that succeeds and reports an error, from 1."""
        self._batch: list[Event] = []
        self._blocked: dict[tuple[str, bytes | None], str] = {}
        self._reasons: dict[str, CdcError] = {}

    def open(self) -> bytes | None:
        """Forget what was not committed."""
        self._batch, self._reasons, self._blocked = [], {}, {}
        return self.stored

    def send(self, events: Sequence[Event]) -> None:
        """Take the events, apart from those that the plan refuses and later ones of their keys."""
        self.sends += 1
        if self.sends == self.fail_at_send:
            raise DestinationUnavailable("the plan says so")
        for event in events:
            place = event.topic, event.key
            if self.refused(event) and place not in self._blocked:
                self._reasons[event.id] = EventRefused(f"refused {event.id}")
                self._blocked[place] = event.id
            elif place not in self._blocked:
                self._batch.append(event)
        if not self._at_commit:
            self._refuse()

    def commit(self, progress: bytes) -> None:
        """Make the batch visible."""
        self._refuse()
        self.commits += 1
        self.delivered += self._batch
        self._batch, self._blocked = [], {}
        if self.stores_progress:
            self.stored = progress
        if self.commits == self.lose_answer:
            raise DestinationUnavailable("the answer is lost")

    def close(self) -> None:
        """Forget what was not committed."""
        self._batch = []

    def _refuse(self) -> None:
        if not self._reasons:
            return
        reasons, self._reasons = self._reasons, {}
        if self._others:
            self.delivered += self._batch
            self._batch = []
        raise EventsRefused(reasons, others_acknowledged=self._others)


class ForgetfulDestination(PlannedDestination):
    """Stores no progress."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False


class CollectingDestination(PlannedDestination):
    """Gets several windows before they are committed."""

    collect_seconds: ClassVar = 0.25


def planned(*, stores_progress: bool = True, collects: bool = False, **plan: bool) -> PlannedDestination:
    """A destination of one of the kinds."""
    if collects:
        return CollectingDestination(**plan)
    return PlannedDestination(**plan) if stores_progress else ForgetfulDestination(**plan)
