"""Reading of search sinks on a server, which is as that of a local index."""

from __future__ import annotations

from cdc.targets.search_server.reading import SearchServerReading
from tests.contracts.folded import ORDERS, batch, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import merge, opened


def test_the_published_state_of_a_server_has_its_documents_as_text(opensearch):
    far, reading = search_sink(opensearch), SearchServerReading()
    merge(opened(far), batch([put(1, "blue mug", 10)], 0, 20))
    state = reading.published_state(far)
    assert state.record is not None

    (documents,) = state.table(state.record.tables[ORDERS.relation], ["id"], newest=False).rows(["id", "item"])

    assert documents.to_pylist() == [{"id": "1", "item": "blue mug"}]
    assert reading.published(far) == state.record
    assert not reading.is_begun(far)  # the server is not asked, so the rules are checked at each start
