"""What a sink has on its server: the documents of its state, and the marks by which tombstones get old."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cdc.errors import DocumentTooLarge
from cdc.targets.published_record import Published
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.sink_state import (
    PublishedState,
    SinkState,
    published_indexes,
    with_mark,
)
from tests.fixtures.http_relay import Forward, HttpRelay, Reply
from tests.fixtures.search_sinks import search_sink


@pytest.fixture
def state(opensearch) -> Iterator[SinkState]:
    with SearchClient(search_sink(opensearch).access, "opensearch") as client:
        state = SinkState(client, "find")
        state.create()
        state.create()
        yield state


def test_a_document_is_replaced_only_if_nobody_else_replaced_it(state):
    first = state.replace("a", {"n": 1}, None)
    assert first is not None
    second = state.replace("a", {"n": 2}, first)

    assert state.replace("a", {"n": 3}, first) is None
    assert state.replace("a", {"n": 3}, None) is None
    assert state.get("a") == ({"n": 2}, second)


def test_a_document_with_odd_characters_in_its_id(state):
    state.put("bases-a/b?c#d", {"n": 1})
    found = state.get("bases-a/b?c#d")
    assert found is not None
    state.delete("bases-a/b?c#d")
    state.delete("bases-a/b?c#d")

    assert (found[0], state.get("bases-a/b?c#d")) == ({"n": 1}, None)


@dataclass(frozen=True)
class _UpTo:
    """Requests with a larger body are refused."""

    size: int

    def reply(self, body: bytes, forward: Forward, /) -> Reply:
        return forward(body) if len(body) <= self.size else Reply(413, {}, b"")


@pytest.mark.parametrize("characters", [400, 9_000, 100_000])
def test_a_document_larger_than_a_request_is_stored_in_parts(opensearch, opensearch_relay: HttpRelay, characters):
    opensearch_relay.fault(r"^PUT ", _UpTo(5_000), times=None)
    source = {"text": 'é"' * (characters // 2)}
    with SearchClient(search_sink(opensearch, url=opensearch_relay.url).access, "opensearch") as client:
        state = SinkState(client, "find")
        state.create()
        state.put_whole("a", source)
        stored = state.get_whole("a")
        state.delete("a")
        client.ask("POST", f"/{state.index}/_refresh")
        left = client.ask("POST", f"/{state.index}/_count").body["count"]

    assert (stored, left) == (source, 0)


def test_a_document_that_no_part_is_small_enough_for_is_refused(opensearch, opensearch_relay: HttpRelay):
    opensearch_relay.fault(r"^PUT .*/_doc/", _UpTo(100), times=None)
    with SearchClient(search_sink(opensearch, url=opensearch_relay.url).access, "opensearch") as client:
        state = SinkState(client, "find")
        state.create()

        with pytest.raises(DocumentTooLarge):
            state.put_whole("a", {"text": "x" * 9_000})


def test_nothing_is_published_in_a_new_state(opensearch, state):
    with SearchClient(search_sink(opensearch).access, "opensearch") as client:
        assert (state.published(), published_indexes(client, "find")) == (None, {})


def test_a_removed_state_is_empty(state):
    state.put("a", {"n": 1})
    state.remove()
    state.create()

    assert state.get("a") is None


def test_the_oldest_mark_is_the_newest_one_that_is_old_enough():
    state, marks = PublishedState(Published(0, 0)), []
    for now in range(0, 100, 5):
        state = with_mark(PublishedState(Published(now, 0), marks=state.marks), now, every=10, kept=30)
        marks.append(state.marks[0][0])

    assert [list(mark) for mark in state.marks] == [[60, 60], [70, 70], [80, 80], [90, 90]]
    assert marks[-1] == 60
    assert all(now - mark <= 45 for now, mark in zip(range(0, 100, 5), marks, strict=True))
