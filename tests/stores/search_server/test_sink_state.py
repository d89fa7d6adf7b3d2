"""The documents of a sink's state, and the marks by which tombstones get old."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.stores.published_record import Published
from cdc.stores.search_server.client import SearchClient
from cdc.stores.search_server.sink_state import PublishedState, SinkState, published_indexes, with_mark
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
