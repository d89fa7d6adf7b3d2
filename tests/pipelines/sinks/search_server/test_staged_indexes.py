"""A replay builds new indexes while searches use the old ones, and moves all aliases in one step."""

from __future__ import annotations

from dataclasses import replace
from threading import Event, Thread

import pytest

from cdc.errors import SinkFenced
from cdc.targets.published_record import Published
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.sinks.search_server.sink import SearchServerSink
from pipelines.sinks.search_server.staged_indexes import StagedSearchServer
from tests.contracts.folded import ORDERS, batch, gone, part, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import LOG, Index, items, merge, opened, publish
from tests.pipelines.sinks.search_server.test_publisher import row


@pytest.fixture
def find(opensearch):
    return search_sink(opensearch)


def build(staged: StagedSearchServer, *rows, upto: int = 20) -> Published:
    """Build the orders in new indexes, as a replay does."""
    staged.forget_earlier({ORDERS.relation: ORDERS})
    staged.sink.open(LOG)
    record = staged.sink.apply(batch(list(rows), 0, upto, generation=5))
    built = Published(upto, 0, {record.relation: record})
    staged.sink.publish(built)
    return built


def test_searches_use_the_old_index_until_the_new_one_takes_its_place(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    staged, index = StagedSearchServer(find), Index(find)
    old = index.name
    built = build(staged, put(1, "new", 10))
    assert (index.name, items(find)) == (old, {"1": "old"})
    staged.open_published(LOG)
    staged.put(built, {})

    assert index.name != old
    assert ({key: row["item"] for key, row in index.search().items()}, items(find)) == ({"1": "new"}, {"1": "new"})
    assert index.status("HEAD", f"/{old}") == 200


def test_the_stream_continues_in_the_new_index(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    staged = StagedSearchServer(find)
    built = build(staged, put(1, "new", 10), put(2, "b", 11))
    staged.open_published(LOG)
    staged.put(built, {})
    merge(opened(find), batch([part(1, 30, {3: "2.00"}), gone(2, 31), put(3, "c", 32)], 20, 40))

    assert items(find) == {"1": "new", "3": "c"}
    assert Index(find).search().keys() == {"1", "3"}


def test_no_search_fails_or_finds_nothing_during_the_switch(find):
    merge(opened(find), batch([put(n, "old", 10, ordinal=n) for n in range(50)], 0, 20))
    done, found, index = Event(), set[int](), Index(find)

    def search() -> None:
        while not done.is_set():
            found.add(len(index.search()))

    searching = Thread(target=search)
    searching.start()
    try:
        for _ in range(3):
            staged = StagedSearchServer(find)
            built = build(staged, *(put(n, "new", 10, ordinal=n) for n in range(50)))
            staged.open_published(LOG)
            staged.put(built, {})
    finally:
        done.set()
        searching.join()

    assert found == {50}


def test_a_driver_that_published_meanwhile_keeps_its_indexes_and_aliases(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    staged, index = StagedSearchServer(find), Index(find)
    built, old = build(staged, put(1, "new", 10)), index.name
    staged.open_published(LOG)
    merge(opened(find), batch([put(2, "b", 30)], 20, 40))
    with pytest.raises(SinkFenced):
        staged.put(replace(built, position=40), {})

    assert (index.name, items(find)) == (old, {"1": "old", "2": "b"})


def test_tables_that_were_not_built_keep_their_records_and_parked_rows(find):
    sink, notes = opened(find), replace(ORDERS, relation=ORDERS.relation + 1, name="notes")
    orders = sink.apply(batch([put(1, "old", 10)], 0, 20))
    kept = replace(sink.apply(batch([put(1, "note", 10)], 0, 20, notes)), parked=(("9",),))
    sink.parked.confirm(notes.relation, {("9",): replace(row("9", 15), relation=notes.relation, topic=notes.topic)})
    publish(sink, orders, kept)
    staged = StagedSearchServer(find)
    built = build(staged, put(1, "new", 10))
    staged.open_published(LOG)
    published = staged.put(built, {notes.relation: kept})
    reader = SearchServerReader.open(find)

    assert (items(find), published.tables[notes.relation]) == ({"1": "new"}, kept)
    assert [(one.topic, one.key, one.message) for one in reader.parked()] == [("shop.notes", ("9",), "refused")]


def test_the_next_replay_removes_what_an_interrupted_one_left(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    interrupted = StagedSearchServer(find)
    build(interrupted, put(9, "left behind", 10))
    interrupted.discard()
    staged = StagedSearchServer(find)
    built = build(staged, put(1, "new", 10))
    staged.open_published(LOG)
    staged.put(built, {})

    assert items(find) == {"1": "new"}


def test_a_crash_after_the_switch_of_the_aliases_is_undone_by_the_next_driver(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    staged, index = StagedSearchServer(find), Index(find)
    built, old = build(staged, put(1, "new", 10)), index.name
    new = built.tables[ORDERS.relation].target
    actions = [{"remove": {"index": old, "alias": index.alias}}, {"add": {"index": new, "alias": index.alias}}]
    index.ask("POST", "/_aliases", {"actions": actions})
    sink = SearchServerSink(find)
    sink.open(LOG)

    assert index.name == old
    record = sink.apply(batch([put(2, "b", 30)], 20, 40))
    publish(sink, record)
    assert index.search().keys() == {"1", "2"}
