"""Kinds of sinks for the apply process and for replays: the only place in `pipelines` that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from cdc.config.sink_definition import SinkDefinition
from pipelines.sinks.contract import Sink
from pipelines.sinks.delta.kind import DeltaKind
from pipelines.sinks.search.kind import SearchKind
from pipelines.sinks.sink_kind import SinkKind


def _search_server_kind() -> SinkKind[Any]:
    # imported late: only sinks with a server need the HTTP client, whose import takes a tenth of a second
    kind: SinkKind[Any] = import_module("pipelines.sinks.search_server.kind").SearchServerKind()
    return kind


KINDS: Final[Mapping[str, Callable[[], SinkKind[Any]]]] = {
    "delta": DeltaKind,
    "search": SearchKind,
    "search_server": _search_server_kind,
}
"""Kind of sink (`SinkDefinition.kind`) → function that returns how its sinks are built and staged."""


def kind_of(sink: SinkDefinition) -> SinkKind[Any]:
    """Return how the targets of a sink are written."""
    return KINDS[sink.kind]()


def build_sink(sink: SinkDefinition, index_folder: str | None = None) -> Sink:
    """Build the sink that a definition describes; index_folder: as in SinkKind.build."""
    return kind_of(sink).build(sink, index_folder)
