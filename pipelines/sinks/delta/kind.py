"""Delta tables as a kind of sink: how sinks are built and staged from their definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from cdc.config.delta_sink import DeltaSinkDefinition, WriterChoice, settings_with_rule
from cdc.config.field_types import placeholders
from cdc.config.sink_rules import KeyConflict
from cdc.table import TableSchema
from cdc.targets.published_record import TableRecord
from pipelines.sinks.delta.indexed.load_kernels import load_kernels
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.rule_checks import rule_refusals
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.staged_targets import StagedDelta
from pipelines.sinks.sink_kind import SessionProvider


class DeltaKind:
    """How Delta tables are written; see SinkKind for the methods."""

    replayed_rows_per_second = 200_000
    replaces_all_targets = False

    def build(self, sink: DeltaSinkDefinition, index_folder: str | None = None) -> DeltaSink:
        """See SinkKind.build."""
        return DeltaSink(replace(delta_settings(sink), index_folder=index_folder))

    def build_at(self, sink: DeltaSinkDefinition, path: str) -> DeltaSink:
        """See SinkKind.build_at. Targets whose path comes from a rule are below the directory as well."""
        rules = tuple(rule.model_copy(update={"path": None, "pattern": None}) for rule in sink.rules)
        template = path if "table" in placeholders(path) else f"{path}/{{schema}}/{{table}}"
        return self.build(sink.model_copy(update={"path": template, "rules": rules}))

    def stage(self, sink: DeltaSinkDefinition) -> StagedDelta:
        """See SinkKind.stage."""
        return StagedDelta(delta_settings(sink))

    def executors_can_write(self, sink: DeltaSinkDefinition, has_delta: Callable[[], bool]) -> bool:
        """See SinkKind.executors_can_write."""
        return sink.writer is not WriterChoice.COPY_ON_WRITE and has_delta()

    def sharing(
        self, sink: DeltaSinkDefinition, built: Iterable[TableRecord], before: Mapping[int, TableRecord]
    ) -> dict[int, TableRecord]:
        """See SinkKind.sharing."""
        settings = delta_settings(sink)
        rebuilt = {record.relation: settings.uri_of(TableSchema.from_json(record.schema or "")) for record in built}
        return {
            relation: record
            for relation, record in before.items()
            if relation not in rebuilt and record.target in rebuilt.values()
        }

    def rule_refusals(
        self, sink: DeltaSinkDefinition, schema: TableSchema, session: SessionProvider
    ) -> Iterator[KeyConflict]:
        """See SinkKind.rule_refusals."""
        return rule_refusals(sink, schema, session)

    def load_kernels(self) -> None:
        """See SinkKind.load_kernels."""
        load_kernels()


def delta_settings(sink: DeltaSinkDefinition) -> DeltaSettings:
    """Translate the definition of a Delta sink into the settings of its implementation."""
    return DeltaSettings(
        name=sink.name,
        path=sink.path,
        record=sink.record_uri,
        writer=Writer(sink.writer.value),
        table=settings_with_rule(sink, None),
        rules=sink.rules,
        upkeep=UpkeepSettings(sink.upkeep.every, sink.upkeep.vacuum_after, sink.cuts.retain, sink.upkeep.keep_commits),
        max_rewrite=sink.max_rewrite,
    )
