"""A search sink is opened by its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import SearchSinkDefinition
from cdc.errors import SinkUnavailable
from cdc.targets.search_reader import open_search
from pipelines.sinks.search.sink import SearchSink
from tests.contracts.folded import ORDERS, batch, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import merge, opened


def test_every_engine_is_read_by_the_same_methods(tmp_path: Path, opensearch):
    local = SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": str(tmp_path / "find")})
    remote = search_sink(opensearch)
    with pytest.raises(SinkUnavailable):
        open_search(local)
    sink = SearchSink("find", local.path)
    sink.open("log-1")
    for one in (sink, opened(remote)):
        merge(one, batch([put(1, "blue mug", 10)], 0, 20))  # type: ignore[arg-type] # sinks of either engine
    for definition in (local, remote):
        reader = open_search(definition)

        assert reader.published is not None
        assert reader.topics == {ORDERS.topic: ORDERS.relation}
        assert [row.source["item"] for row in reader.search(ORDERS.topic, "mug")] == ["blue mug"]
        assert [row.key for row in reader.documents(ORDERS.topic)] == [("1",)]
