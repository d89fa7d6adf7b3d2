"""Search indexes in a local directory as a kind of sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from cdc.config.search_sink import SearchSinkDefinition
from cdc.config.sink_rules import KeyConflict
from cdc.table import TableSchema
from cdc.targets.published_record import TableRecord
from pipelines.sinks.contract import Sink
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.sink import SearchSink
from pipelines.sinks.search.staged_index import StagedSearch
from pipelines.sinks.sink_kind import SessionProvider, StagedTarget


class SearchKind:
    """How a search index in a local directory is written; see SinkKind for the methods."""

    replayed_rows_per_second = 8_000
    replaces_all_targets = True

    def build(self, sink: SearchSinkDefinition, index_folder: str | None = None) -> Sink:  # noqa: ARG002 - no key indexes
        """See SinkKind.build."""
        return SearchSink(sink.name, sink.path, DocumentShapes(sink, sink.rules), sink.dead_letters)

    def build_at(self, sink: SearchSinkDefinition, path: str) -> Sink:
        """See SinkKind.build_at."""
        return self.build(sink.model_copy(update={"path": path}))

    def stage(self, sink: SearchSinkDefinition) -> StagedTarget:
        """See SinkKind.stage."""
        return StagedSearch(sink.name, sink.path, DocumentShapes(sink, sink.rules), sink.dead_letters)

    def executors_can_write(self, sink: SearchSinkDefinition, has_delta: Callable[[], bool]) -> bool:  # noqa: ARG002 - no Delta
        """See SinkKind.executors_can_write."""
        return not sink.only_the_driver_writes

    def sharing(
        self,
        sink: SearchSinkDefinition,  # noqa: ARG002 - a replay of single tables replaces only their own indexes
        built: Iterable[TableRecord],  # noqa: ARG002 - as above
        before: Mapping[int, TableRecord],  # noqa: ARG002 - as above
    ) -> dict[int, TableRecord]:
        """See SinkKind.sharing."""
        return {}

    def rule_refusals(
        self,
        sink: SearchSinkDefinition,  # noqa: ARG002 - no rule needs Spark
        schema: TableSchema,  # noqa: ARG002 - as above
        session: SessionProvider,  # noqa: ARG002 - as above
    ) -> Iterator[KeyConflict]:
        """See SinkKind.rule_refusals."""
        return iter(())

    def load_kernels(self) -> None:
        """See SinkKind.load_kernels. An index needs no compiled functions."""
