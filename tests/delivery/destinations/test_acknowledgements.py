"""Bookkeeping of unacknowledged events: limits, order of a key, refused events, and answers that do not come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

import pytest

from cdc.delivery.destinations.acknowledgements import LARGEST_IN_FLIGHT, AcknowledgementWindow, BrokerAnswer
from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.errors import DestinationUnavailable, EventRefused
from tests.delivery.destinations.sending import event


class Library:
    """A client library that acknowledges the oldest event when the newest is published, or nothing."""

    def __init__(self, limit: int, *, one_per_key: bool = True, answers: bool = True, refused: str = "") -> None:
        self.window = AcknowledgementWindow(self.publish, limit, 0.05, one_per_key=one_per_key)
        self.published: list[Event] = []
        self.most_in_flight = 0
        self.most_bytes = 0
        self._numbers = count()
        self._waiting: list[tuple[int, Event]] = []
        self._answers, self._refused = answers, refused

    def publish(self, events: Sequence[Event]) -> Sequence[Hashable]:
        numbers = [next(self._numbers) for _ in events]
        self.published += events
        self._waiting += zip(numbers, events, strict=True)
        keys = [(one.topic, one.key) for _, one in self._waiting if one.key is not None]
        self.most_in_flight = max(self.most_in_flight, len(self._waiting))
        self.most_bytes = max(self.most_bytes, sum(len(one.value or b"") for _, one in self._waiting))
        assert len(set(keys)) == len(keys) or not self.window._one_per_key
        if self._answers:
            for number, one in self._waiting:
                error = EventRefused("refused") if one.id == self._refused else None
                self.window.answers.put(BrokerAnswer((number,), error))
            self._waiting.clear()
        return numbers


def events(number: int, keys: int) -> list[Event]:
    return [event(one, "t", b"%d" % (one % keys), b"x") for one in range(number)]


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_events_of_a_key_are_published_one_after_the_other(limit: int) -> None:
    library = Library(limit)
    sent = events(100, 7)
    library.window.send(sent[:50])
    library.window.send(sent[50:])
    library.window.wait()

    assert sorted(library.published) == sorted(sent)
    for key in {one.key for one in sent}:
        assert [one for one in library.published if one.key == key] == [one for one in sent if one.key == key]
    assert library.most_in_flight <= limit


def test_events_without_key_do_not_wait_for_each_other() -> None:
    library = Library(1000)
    library.window.send([event(number, "t", None, b"x") for number in range(100)])

    assert library.most_in_flight == 100


def test_events_of_other_topics_do_not_wait_for_each_other() -> None:
    library = Library(1000)
    library.window.send([event(number, f"t{number}", b"k", b"x") for number in range(100)])

    assert library.most_in_flight == 100


def test_large_events_wait_for_answers() -> None:
    library = Library(1000)
    library.window.send([event(number, "t", None, b"x" * (LARGEST_IN_FLIGHT // 3)) for number in range(30)])
    library.window.wait()

    assert len(library.published) == 30
    assert library.most_bytes <= LARGEST_IN_FLIGHT * 4 // 3


def test_a_refused_event_stops_its_key_and_no_other() -> None:
    sent = events(20, 4)
    library = Library(1000, refused=sent[5].id)
    with pytest.raises(EventsRefused) as caught:
        library.window.send(sent)

    key = sent[5].key
    assert set(caught.value.refused) == {sent[5].id}
    assert [one.id for one in library.published if one.key == key] == [sent[1].id, sent[5].id]
    assert [one for one in library.published if one.key != key] == [one for one in sent if one.key != key]


def test_the_last_event_that_is_refused_shows_in_the_commit() -> None:
    sent = events(4, 4)
    library = Library(1000, refused=sent[3].id)
    library.window.send(sent)
    with pytest.raises(EventsRefused):
        library.window.wait()


def test_answers_that_do_not_come_are_an_error() -> None:
    library = Library(1000, answers=False)
    library.window.send(events(4, 4))
    with pytest.raises(DestinationUnavailable, match="none of 4 events"):
        library.window.wait()


def test_a_lost_connection_shows_in_the_next_call() -> None:
    library = Library(1000)
    library.window.send(events(4, 4))
    library.window.answers.put(DestinationUnavailable("lost"))
    with pytest.raises(DestinationUnavailable, match="lost"):
        library.window.wait()
