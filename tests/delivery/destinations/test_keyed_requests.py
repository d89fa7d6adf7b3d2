"""Requests of which a service fails single entries: the order of a key survives."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from threading import Lock

import pytest

from cdc.delivery.destinations.contract import EventsRefused
from cdc.delivery.destinations.keyed_requests import KeyedLimits, KeyedRequests, RequestAnswer, RequestEntry
from cdc.errors import DestinationUnavailable, EventRefused
from tests.delivery.destinations.sending import event


class FailingServer:
    """Takes entries, fails a share of them, and refuses some."""

    def __init__(self, failing: float = 0.0, refused: frozenset[str] = frozenset()) -> None:
        self.taken: list[RequestEntry] = []
        self.requests: list[list[str]] = []
        self._failing, self._refused = failing, refused
        self._random, self._lock = Random(7), Lock()

    def post(self, _place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        with self._lock:
            self.requests.append([entry.lane for entry in entries])
            refused = {n: EventRefused("no") for n, one in enumerate(entries) if one.event.id in self._refused}
            failed = {
                n: DestinationUnavailable("Busy")
                for n in range(len(entries))
                if n not in refused and self._random.random() < self._failing
            }
            self.taken += [one for n, one in enumerate(entries) if n not in failed and n not in refused]
        return RequestAnswer(failed, refused)

    def _fails(self) -> bool:
        return self._random.random() < self._failing


def entries(count: int, keys: int) -> list[RequestEntry]:
    made = (event(number, "orders", b"%d" % (number % keys), b"x") for number in range(count))
    return [RequestEntry(one, "queue", (one.key or b"").decode(), 10, None) for one in made]


def test_no_event_overtakes_an_earlier_one_of_its_key_that_failed() -> None:
    service, sent = FailingServer(failing=0.3), entries(200, 7)
    requests = KeyedRequests(service.post, KeyedLimits(5, 1000, 3), 10)
    requests.add(sent[:50])
    requests.add(sent[50:])
    requests.finish()
    requests.close()

    for key in range(7):
        assert [one for one in service.taken if one.lane == str(key)] == sent[key::7]
    assert max(map(len, service.requests)) == 5
    assert all(len(set(lanes)) == len(lanes) for lanes in service.requests)


def test_a_request_has_no_more_bytes_than_the_service_takes() -> None:
    service = FailingServer()
    requests = KeyedRequests(service.post, KeyedLimits(10, 35, 1), 10)
    requests.add(entries(9, 9))
    requests.finish()
    requests.close()

    assert [len(lanes) for lanes in service.requests] == [3, 3, 3]


class AtomicServer:
    """Takes or fails whole requests; the one with the event `slow` fails once."""

    def __init__(self, slow: str = "") -> None:
        self.requests: list[list[str]] = []
        self._slow = slow

    def post(self, _place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        if self._slow in (ids := [entry.event.id for entry in entries]):
            self._slow = ""
            return RequestAnswer(dict.fromkeys(range(len(ids)), DestinationUnavailable("Busy")))
        self.requests.append(ids)
        return RequestAnswer()


def test_a_request_of_one_lane_has_its_next_events() -> None:
    service, sent = AtomicServer(), entries(12, 2)
    requests = KeyedRequests(service.post, KeyedLimits(4, 35, 1, one_lane=True), 10)
    requests.add(sent)
    requests.finish()
    requests.close()

    ids = [one.event.id for one in sent]
    assert service.requests == [ids[:6:2], ids[1:6:2], ids[6::2], ids[7::2]]


def test_requests_of_one_lane_that_fail_are_sent_again_before_later_ones() -> None:
    sent = entries(12, 2)
    service = AtomicServer(slow=sent[2].event.id)
    requests = KeyedRequests(service.post, KeyedLimits(2, 1000, 1, one_lane=True), 10)
    requests.add(sent)
    requests.finish()
    requests.close()

    ids = [one.event.id for one in sent]
    for lane in range(2):
        assert [one for request in service.requests for one in request if one in ids[lane::2]] == ids[lane::2]


def test_after_a_failure_no_other_request_of_the_round_begins() -> None:
    asked: list[str] = []

    def post(_place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        asked.append(entries[0].lane)
        return RequestAnswer({0: DestinationUnavailable("silent")})

    requests = KeyedRequests(post, KeyedLimits(10, 1000, 1, one_lane=True), 0)
    requests.add(entries(50, 50))
    with pytest.raises(DestinationUnavailable, match="silent"):
        requests.finish()
    requests.close()

    assert asked == ["0"]


def test_later_events_of_a_refused_one_are_not_sent_and_all_others_are() -> None:
    sent = entries(30, 3)
    service = FailingServer(refused=frozenset({sent[4].event.id}))
    requests = KeyedRequests(service.post, KeyedLimits(10, 1000, 2), 10)
    requests.add(sent)
    with pytest.raises(EventsRefused) as refused:
        requests.finish()

    assert list(refused.value.refused) == [sent[4].event.id]
    assert refused.value.others_acknowledged
    assert [one for one in service.taken if one.lane == "1"] == sent[1:2]
    assert len(service.taken) == 21
    requests.add(entries(3, 3))
    requests.finish()
    requests.close()
    assert len(service.taken) == 24


def test_events_that_fail_for_too_long_are_an_unavailable_destination() -> None:
    requests = KeyedRequests(FailingServer(failing=1.0).post, KeyedLimits(10, 1000, 2), 0.2)
    requests.add(entries(3, 3))
    with pytest.raises(DestinationUnavailable, match="Busy"):
        requests.finish()
    requests.close()
