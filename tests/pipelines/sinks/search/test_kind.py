"""Search indexes in a local directory as a kind of sink: replays into another directory."""

from __future__ import annotations

from pathlib import Path

from cdc.config import SearchSinkDefinition
from pipelines.sinks.search.kind import SearchKind
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.sinks.search_server.server_sink import merge


def test_a_replay_into_a_directory_writes_the_index_there(tmp_path: Path) -> None:
    find = SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": f"{tmp_path}/find"})
    sink = SearchKind().build_at(find, f"{tmp_path}/new")
    sink.open("log-1")
    merge(sink, batch([put(1, "blue mug", 10)], 0, 20))  # type: ignore[arg-type] # of either engine
    sink.close()

    assert Path(tmp_path, "new", "meta.json").exists()
    assert not Path(tmp_path, "find").exists()


def test_only_the_driver_writes_a_local_index_and_its_tables_share_nothing_that_is_kept(tmp_path: Path) -> None:
    find = SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": f"{tmp_path}/find"})

    assert not SearchKind().executors_can_write(find, lambda: True)
    assert SearchKind().sharing(find, [], {}) == {}
    assert [*SearchKind().rule_refusals(find, ORDERS, lambda: None)] == []  # type: ignore[arg-type, return-value] # no session
