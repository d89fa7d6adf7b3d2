"""Kinds of sinks for the apply process: each kind that a definition can have is written in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition
from cdc.config.sinks import DefinedSink
from cdc.targets.sink_kinds import READINGS
from pipelines.sink_kinds import KINDS, build_sink, kind_of
from pipelines.sinks.delta.kind import DeltaKind
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.kind import SearchKind
from pipelines.sinks.search.sink import SearchSink
from pipelines.sinks.search_server.kind import SearchServerKind
from pipelines.sinks.search_server.sink import SearchServerSink

SERVER: dict[str, Any] = {"engine": "opensearch", "server": {"url": "http://127.0.0.1:9200"}}


def sinks(folder: Path) -> dict[str, DefinedSink]:
    """A sink of every kind."""
    path = f"{folder}/lake/{{table}}"
    defined: list[DefinedSink] = [
        DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": path}),
        SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": f"{folder}/find"}),
        SearchSinkDefinition.model_validate({"type": "search", "name": "far", **SERVER}),
    ]
    return {sink.kind: sink for sink in defined}


def test_every_kind_is_read_and_written(tmp_path: Path) -> None:
    assert sinks(tmp_path).keys() == KINDS.keys() == READINGS.keys()


@pytest.mark.parametrize(
    ("name", "kind", "sink"),
    [
        ("delta", DeltaKind, DeltaSink),
        ("search", SearchKind, SearchSink),
        ("search_server", SearchServerKind, SearchServerSink),
    ],
)
def test_a_sink_is_built_by_its_kind(tmp_path: Path, name: str, kind: type, sink: type) -> None:
    definition = sinks(tmp_path)[name]

    built = build_sink(definition)

    assert type(kind_of(definition)) is kind
    assert type(built) is sink
    assert built.name == definition.name
    built.close()
