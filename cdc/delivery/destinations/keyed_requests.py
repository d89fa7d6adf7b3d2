"""Requests with several events, which may fail in part or as a whole: no event overtakes an earlier one of its key.

A lane has at most one request at any time. Where a service may fail single events of a request, a request has at most
one event of each lane. So when one fails, no later event of the lane is there yet. The failed event is sent again
before them. The price: a lane advances by one event in each round trip, so many keys are fast and one busy key is not.

Where a service takes or fails a request as a whole, a request has the next events of one lane (`one_lane`). The price:
every lane needs a request, so one busy key is fast and many keys are not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from threading import Event as Signal
from typing import Any, Final, NamedTuple

from cdc.back_off import BackOff
from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.errors import CdcError

MOST_WAITING: Final = 10_000
"""Events that wait before `add` sends them."""
MOST_WAITING_BYTES: Final = 32 << 20
FAILED: Final = BackOff(0.05, 2.0)
"""Pauses after a round in which the service failed events."""


class RequestEntry(NamedTuple):
    """One event, prepared for a request."""

    event: Event
    place: str
    """Queue, topic or stream; a request has one."""
    lane: str
    """Events of one place with equal lanes stay in order."""
    size: int
    content: Any
    """What the destination sends."""


@dataclass(frozen=True, slots=True)
class KeyedLimits:
    """What one request may contain."""

    entries: int
    size: int
    parallel: int
    """Requests at the same time."""
    one_lane: bool = False
    """Whether a request has the next events of one lane, instead of the next event of each of several lanes."""


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """What a service did with the entries of a request that are not acknowledged; each by its index."""

    failed: Mapping[int, CdcError] = field(default_factory=dict)
    """Entries that may succeed later → what is raised if they never do."""
    refused: Mapping[int, CdcError] = field(default_factory=dict)


class KeyedRequests:
    """Sends the entries of one batch after another; one thread uses it."""

    def __init__(
        self, post: Callable[[str, Sequence[RequestEntry]], RequestAnswer], limits: KeyedLimits, timeout: float
    ) -> None:
        """post: sends one request for a place, in any thread. timeout: seconds that a batch may fail without success"""
        self._post = post
        self._limits = limits
        self._timeout = timeout
        self._lanes: dict[tuple[str, str], deque[RequestEntry]] = {}
        self._waiting = 0
        self._bytes = 0
        self._refused: dict[str, CdcError] = {}
        self._blocked: set[tuple[str, bytes | None]] = set()
        """Topic and key of each refused event."""
        self._threads = ThreadPoolExecutor(limits.parallel, thread_name_prefix="send")

    def add(self, entries: Sequence[RequestEntry]) -> None:
        """Add entries after all earlier ones of the batch; sends when many wait."""
        for entry in entries:
            if (entry.event.topic, entry.event.key) not in self._blocked:
                self._lanes.setdefault((entry.place, entry.lane), deque()).append(entry)
                self._bytes += entry.size
                self._waiting += 1
        if self._waiting >= MOST_WAITING or self._bytes >= MOST_WAITING_BYTES:
            self._send()

    def finish(self) -> None:
        """Return when every entry of the batch is acknowledged; raises EventsRefused if all others are."""
        self._send()
        if refused := self._refused:
            self._refused, self._blocked = {}, set()
            raise EventsRefused(refused, others_acknowledged=True)

    def close(self) -> None:
        """Forget the batch. No request is running, because `add` and `finish` wait for all of theirs."""
        self._threads.shutdown(wait=False)

    def _send(self) -> None:
        failures, deadline = 0, time.monotonic() + self._timeout
        while self._lanes:
            before = self._waiting
            failed = self._round()
            if self._waiting < before:
                deadline = time.monotonic() + self._timeout
            if not failed:
                failures = 0
                continue
            if time.monotonic() >= deadline:
                raise failed
            failures = failures + 1 if self._waiting == before else 1
            time.sleep(FAILED.seconds(failures))

    def _round(self) -> CdcError | None:
        """Send the first entries of each lane until a request fails; return a failure, if there was one."""
        requests, halted = self._requests(), Signal()
        running = [self._threads.submit(self._post_unless, halted, request) for request in requests]
        wait(running)  # also after an error: a later request must not be overtaken by this one
        failed = None
        for request, future in zip(requests, running, strict=True):
            answer = future.result()
            if answer is None:
                continue
            for index, entry in enumerate(request):
                if index in answer.failed:
                    failed = answer.failed[index]
                else:
                    self._end(entry, answer.refused.get(index))
        return failed

    def _post_unless(self, halted: Signal, request: Sequence[RequestEntry]) -> RequestAnswer | None:
        """Send a request, and return its answer; None, without sending, if another one of the round has failed.

        A service that does not answer then costs one timeout, and not one for each of thousands of requests.
        """
        if halted.is_set():
            return None
        try:
            answer = self._post(request[0].place, request)
        except BaseException:
            halted.set()
            raise
        if answer.failed:
            halted.set()
        return answer

    def _requests(self) -> list[list[RequestEntry]]:
        if self._limits.one_lane:
            return [list(self._first(lane)) for lane in self._lanes.values()]
        found: list[list[RequestEntry]] = []
        last: dict[str, tuple[list[RequestEntry], int]] = {}
        for (place, _), lane in self._lanes.items():
            request, size = last.get(place, ([], 0))
            if not request or len(request) == self._limits.entries or size + lane[0].size > self._limits.size:
                request, size = [], 0
                found.append(request)
            request.append(lane[0])
            last[place] = request, size + lane[0].size
        return found

    def _first(self, lane: deque[RequestEntry]) -> Iterator[RequestEntry]:
        size = 0
        for entry in islice(lane, self._limits.entries):
            size += entry.size
            if size > self._limits.size and entry is not lane[0]:
                return
            yield entry

    def _end(self, entry: RequestEntry, refusal: CdcError | None) -> None:
        """Remove an entry that is acknowledged or refused, and after a refusal all later entries of its key."""
        name = entry.place, entry.lane
        lane = self._lanes[name]
        self._forget(lane.popleft())
        if refusal is not None:
            self._refused[entry.event.id] = refusal
            if entry.event.key is not None:
                key = entry.event.topic, entry.event.key
                self._blocked.add(key)
                for later in [one for one in lane if (one.event.topic, one.event.key) == key]:
                    lane.remove(later)
                    self._forget(later)
        if not lane:
            del self._lanes[name]

    def _forget(self, entry: RequestEntry) -> None:
        self._waiting -= 1
        self._bytes -= entry.size
