"""Search indexes on a search server as a kind of sink."""

from __future__ import annotations

from cdc.config.search_sink import SearchSinkDefinition
from cdc.errors import ConfigError
from pipelines.sinks.contract import Sink
from pipelines.sinks.search.kind import SearchKind
from pipelines.sinks.search_server.sink import SearchServerSink
from pipelines.sinks.search_server.staged_indexes import StagedSearchServer
from pipelines.sinks.sink_kind import StagedTarget


class SearchServerKind(SearchKind):
    """How search indexes on a server are written; see SinkKind for the methods."""

    def build(self, sink: SearchSinkDefinition, index_folder: str | None = None) -> Sink:  # noqa: ARG002 - no key indexes
        """See SinkKind.build."""
        return SearchServerSink(sink)

    def build_at(self, sink: SearchSinkDefinition, path: str) -> Sink:  # noqa: ARG002 - a server is no directory
        """See SinkKind.build_at."""
        raise ConfigError(
            f"sink {sink.name!r} is on a search server, and --into names a directory",
            remedy="omit --into: the replay builds new indexes and keeps the old ones",
        )

    def stage(self, sink: SearchSinkDefinition) -> StagedTarget:
        """See SinkKind.stage."""
        return StagedSearchServer(sink)
