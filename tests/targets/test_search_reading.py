"""Reading of search sinks with a local index: documents as columns of text."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from cdc.config import SearchSinkDefinition
from cdc.targets.search_reading import SearchReading
from pipelines.sinks.search.sink import SearchSink
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.sinks.search_server.server_sink import merge


def filled(folder: Path) -> SearchSinkDefinition:
    """The definition of a sink with two rows."""
    find = SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": str(folder / "find")})
    sink = SearchSink(find.name, find.path)
    sink.open("log-1")
    merge(sink, batch([put(1, "blue mug", 10), put(2, "cup", 10)], 0, 20))  # type: ignore[arg-type] # of either engine
    sink.close()
    return find


def test_the_published_state_of_an_index_has_the_documents_as_text(tmp_path: Path) -> None:
    find, reading = filled(tmp_path), SearchReading()
    state = reading.published_state(find)
    assert state.record is not None
    table = state.table(state.record.tables[ORDERS.relation], ["id"], newest=False)

    (documents,) = table.rows(["item", "nothing"])

    assert reading.is_begun(find)
    assert not state.has_newer_versions
    assert sorted(documents["item"].to_pylist()) == ["blue mug", "cup"]
    assert documents["nothing"].to_pylist() == [None, None]
    assert (table.kind("item"), table.kind("nothing"), table.count(["id"])) == (pa.string(), None, 2)


def test_a_cut_that_was_not_kept_apart_is_the_present_index(tmp_path: Path) -> None:
    find, reading = filled(tmp_path), SearchReading()
    record = reading.published(find)
    assert record is not None

    assert reading.table_at_cut(find, "", record.tables[ORDERS.relation], ["id"]).count(["id"]) == 2
    assert reading.parked(find) == (record, [])
