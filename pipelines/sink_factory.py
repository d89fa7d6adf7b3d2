"""Builds sinks from their definitions, and answers from a definition whether its sink needs Spark or keeps history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition, Transform, table_settings
from cdc.config.sinks import HistoryMode, WriterChoice, settings_with_rule
from pipelines.sinks.contract import Sink
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink as DeltaTarget
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.sink import SearchSink as SearchTarget


def build_sink(sink: DeltaSinkDefinition | SearchSinkDefinition, index_folder: str | None = None) -> Sink:
    """Build the sink that a definition describes.

    index_folder: local directory for the key indexes of a Delta sink; None: a temporary directory.
    """
    if isinstance(sink, DeltaSinkDefinition):
        return DeltaTarget(replace(delta_settings(sink), index_folder=index_folder))
    if sink.engine == "tantivy":
        return SearchTarget(sink.name, sink.path, DocumentShapes(sink, sink.rules), sink.dead_letters)
    # imported late: only sinks with a server need the HTTP client, whose import takes a tenth of a second
    built: Sink = import_module("pipelines.sinks.search_server.sink").SearchServerSink(sink)
    return built


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


def without_throttle(
    sink: DeltaSinkDefinition | SearchSinkDefinition,
) -> DeltaSinkDefinition | SearchSinkDefinition:
    """Return the definition of the sink without its limit on rewritten bytes, so that no batch waits."""
    return sink.model_copy(update={"max_rewrite": 0}) if isinstance(sink, DeltaSinkDefinition) else sink


def needs_spark(sink: DeltaSinkDefinition | SearchSinkDefinition) -> bool:
    """Whether opening the sink requires a Spark session, because Spark writes all of its tables."""
    return isinstance(sink, DeltaSinkDefinition) and Writer(sink.writer.value) is Writer.SPARK


def rules_need_spark(sink: DeltaSinkDefinition | SearchSinkDefinition) -> bool:
    """Whether a table of the sink needs Spark even for small ranges: its rule has expressions or writer `spark`."""
    rules = sink.rules if isinstance(sink, DeltaSinkDefinition) else ()
    return any(rule.writer is WriterChoice.SPARK or (rule.transform or Transform()).needs_spark for rule in rules)


def keeps_history(sink: DeltaSinkDefinition | SearchSinkDefinition) -> Callable[[str], bool] | None:
    """Return a function that says for a topic whether the sink keeps the history of the table.

    None if the sink keeps no history of any table.
    """
    if not isinstance(sink, DeltaSinkDefinition):
        return None
    only_latest = (settings_with_rule(sink, rule).history_mode is HistoryMode.LATEST for rule in (None, *sink.rules))
    if all(only_latest):
        return None
    return lambda topic: table_settings(topic, sink, sink.rules).history_mode is not HistoryMode.LATEST
