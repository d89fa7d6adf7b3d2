"""Which indexes of a sink no search needs any more."""

from __future__ import annotations

from cdc.config.sinks import search_fingerprint
from cdc.stores.published_record import Published, TableRecord, TargetState
from cdc.stores.search_server.client import SearchClient
from cdc.stores.search_server.old_indexes import SinkIndex, indexes_of_sink, unused
from tests.contracts.folded import batch, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import LOG, merge, opened


def test_only_the_indexes_of_the_sink_are_found(opensearch):
    find, other = (
        search_sink(opensearch),
        search_sink(opensearch, {"name": "other"}, index=f"{opensearch.prefix}o-{{table}}"),
    )
    record = merge(opened(find), batch([put(1, "a", 10)], 0, 20))
    merge(opened(other), batch([put(1, "a", 10)], 0, 20))
    with SearchClient(find.access, "opensearch") as client:
        found = [index for index in indexes_of_sink(client, "find", LOG) if index.name.startswith(opensearch.prefix)]

    assert found == [
        SinkIndex(record.target, "shop.orders", record.relation, 1, search_fingerprint("shop.orders", find, ()))
    ]


def test_an_index_is_unused_if_the_published_record_does_not_name_it():
    indexes = [SinkIndex(f"orders.r1.{number}", "shop.orders", 1, number, "") for number in (1, 2, 3)]
    table = TableRecord(
        relation=1,
        topic="shop.orders",
        target="orders.r1.2",
        position=1,
        version=None,
        state=TargetState.STREAMING.value,
    )

    assert [index.number for index in unused(indexes, Published(1, 0, {1: table}))] == [1, 3]
