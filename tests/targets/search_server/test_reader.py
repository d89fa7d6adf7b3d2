"""What `cdc search` and verification read from a search server."""

from __future__ import annotations

import pytest

from cdc.errors import PositionNotReached, SinkUnavailable
from cdc.position import Position
from cdc.targets.search_server.reader import SearchServerReader
from tests.contracts.folded import ORDERS, batch, gone, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import Index, merge, opened, publish


@pytest.fixture
def find(opensearch):
    find = search_sink(opensearch)
    rows = [put(1, "blue mug", 10), put(2, "red mug", 11), put(3, "blue plate", 12), put(4, "blue mug, old", 13)]
    merge(opened(find), batch(rows, 0, 20), batch([gone(4, 30)], 20, 40))
    return find


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("mug", {"1", "2"}),
        ("blue mug", {"1"}),
        ("item:blue", {"1", "3"}),
        ('"mug blue"', set()),
        ("nothing", set()),
        ('"unbalanced', set()),
        ("blue AND (", set()),
    ],
)
def test_rows_with_all_words_are_found(find, words, keys):
    found = SearchServerReader.open(find).search(ORDERS.topic, words)

    assert {row.key[0] for row in found} == keys


def test_a_row_is_found_with_its_position_and_its_texts(find):
    (row,) = SearchServerReader.open(find).search(None, "plate")

    assert (row.position, row.source) == (Position(12), {"id": "3", "item": "blue plate", "price": "1.00"})
    assert row.score > 0


def test_the_limit_is_kept(find):
    assert len(SearchServerReader.open(find).search(ORDERS.topic, "mug", limit=1)) == 1


def test_a_table_that_the_sink_does_not_have_has_no_rows(find):
    reader = SearchServerReader.open(find)

    assert (reader.search("shop.unknown", "mug"), list(reader.documents("shop.unknown"))) == ([], [])
    assert (reader.topics, reader.parked()) == ({ORDERS.topic: ORDERS.relation}, [])


def test_a_sink_that_has_written_nothing_is_unavailable(opensearch):
    with pytest.raises(SinkUnavailable, match="no indexes"):
        SearchServerReader.open(search_sink(opensearch))


def test_at_rest_rows_that_are_not_published_are_not_read(find):
    sink = opened(find)
    record = sink.apply(batch([put(1, "new", 50)], 40, 60))
    reader = SearchServerReader.open_at_rest(find)
    publish(sink, record)

    assert {row.key[0]: row.source["item"] for row in reader.documents(ORDERS.topic)}["1"] == "blue mug"
    assert position(SearchServerReader.open_at_rest(find)) == 60


def test_at_rest_the_reader_waits_while_visible_rows_are_newer_than_the_record(find):
    sink = opened(find)
    record = sink.apply(batch([put(1, "new", 50)], 40, 60))
    Index(find).ask("POST", f"/{record.target}/_refresh")
    with pytest.raises(PositionNotReached):
        SearchServerReader.open_at_rest(find, patience=0.2)
    publish(sink, record)

    assert position(SearchServerReader.open_at_rest(find)) == 60


def position(reader: SearchServerReader) -> int:
    assert reader.published is not None
    return reader.published.position
