"""Search indexes on a search server as a kind of sink: what a replay may do with them."""

from __future__ import annotations

import pytest

from cdc.config import SearchSinkDefinition
from cdc.errors import ConfigError
from pipelines.sinks.search_server.kind import SearchServerKind

FAR = SearchSinkDefinition.model_validate(
    {"type": "search", "name": "far", "engine": "opensearch", "server": {"url": "http://127.0.0.1:9200"}}
)


def test_executors_write_indexes_on_a_server_also_without_delta() -> None:
    assert SearchServerKind().executors_can_write(FAR, lambda: False)


def test_a_replay_into_a_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match="is on a search server, and --into names a directory"):
        SearchServerKind().build_at(FAR, "/new")
