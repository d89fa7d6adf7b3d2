"""verify: is every row and column of every sink what the source holds at the same instant, or what the log says.

Exact while the workload runs: proof.cut brings source and sinks to one position, proof.inspection holds each table
against its source there. Against the log nothing is asked of either: a sink stands where it last published. Nothing of
the sinks' own conversion is used; what is equal here is equal twice told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Final

from cdc.catalog import Catalog, VerifiedRange
from cdc.config import Definition, DeltaSinkDefinition, SearchSinkDefinition
from cdc.config.job_options import Against, VerifyMode
from cdc.errors import ConfigError, PositionNotReached, SinkUnavailable
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.publication import published_schema
from cdc.postgres.tables import match_tables
from cdc.stores.published import TableRecord, TargetState
from cdc.stores.search_index import SearchIndex
from cdc.table import TableSchema, matches, matches_name
from pipelines.verification.compare_rows import LISTED
from pipelines.verification.compare_table import TableComparison, refused
from pipelines.verification.expected_schema import ExpectedSchema
from pipelines.verification.log_reference import LARGE, ExpectedState, LogTable, SinkState, standing, targets_at_rest
from pipelines.verification.reference import SourceTable
from pipelines.verification.source_cut import ConsistentCut, CutRequest, KeptCutAt, consistent_cut
from pipelines.verification.target_rows import SearchTargetRows, TargetRows, delta_target, why
from pipelines.verification.verdict import UNREADABLE, TableVerdict, VerifyReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT: Final = 60.0
"""Seconds until the sinks have to stand at the cut."""

Wanted = tuple[DeltaSinkDefinition | SearchSinkDefinition, int, str]
"""Sink, OID and topic of a table that is to be compared."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify; empty means all."""

    tables: tuple[str, ...] = ()
    """Globs over `schema.table`; a bare name means that table in any schema."""
    sinks: tuple[str, ...] = ()
    timeout: float = TIMEOUT
    listed: int = LISTED
    """Keys named per kind of difference, per table and sink."""
    mode: VerifyMode = VerifyMode.ROWS
    against: Against = Against.SOURCE
    large: int = LARGE
    """Against the log: rows of a table that are folded without Spark."""


def verify(definition: Definition, options: VerifyOptions) -> VerifyReport:
    """Compare; raises PositionNotReached when the sinks cannot be brought to one position with the source.

    What was compared with the source row by row, or by digest, is kept in the catalog.
    """
    if options.against is Against.LOG:
        return _with_log(definition, options)
    began = datetime.now(UTC)
    with Catalog.open(definition.catalog.url) as catalog, consistent_cut(catalog, cut_of(definition, options)) as cut:
        wanted = tables_at(cut, definition, options)
        forget_others(catalog, definition, options, wanted)
        inspections = [inspection_at(cut, sink, oid, topic) for sink, oid, topic in wanted]
        verdicts = [
            found if isinstance(found, TableVerdict) else found(options.mode, listed=options.listed)
            for found in inspections
        ]
        for verdict in verdicts:
            if verdict.compared and verdict.mode != VerifyMode.COUNT:
                catalog.verified.record(definition.name, whole_range(verdict, began, cut.position))
    return VerifyReport(cut.position, tuple(verdicts))


def chosen_sinks(definition: Definition, options: VerifyOptions) -> list[DeltaSinkDefinition | SearchSinkDefinition]:
    """The sinks that were asked for; raises ConfigError for one that the definition does not have, or for none."""
    sinks = [sink for sink in definition.sinks if not options.sinks or sink.name in options.sinks]
    if unknown := set(options.sinks) - {sink.name for sink in sinks}:
        names = [sink.name for sink in definition.sinks]
        raise ConfigError(f"unknown sink {min(unknown)!r}: expected one of {names!r}", remedy="name one of these")
    if not sinks:
        raise ConfigError("the definition has no sink", remedy="add a sink under 'sinks'")
    return sinks


def cut_of(definition: Definition, options: VerifyOptions) -> CutRequest:
    """The cut that the sinks are asked for; raises as chosen_sinks does, and PositionNotReached for an empty log."""
    sinks = chosen_sinks(definition, options)
    durable = LogReader(definition.log.root).durable
    if durable is None:
        raise PositionNotReached("the log is still empty: its initial snapshot has not ended")
    return CutRequest(
        pipeline=definition.name,
        dsn=definition.source.dsn.reveal(),
        sinks=[sink.name for sink in sinks],
        patterns=definition.patterns,
        exclude=definition.excludes,
        publication=definition.source.publication.name,
        epoch=durable.epoch,
        timeout=options.timeout,
    )


def tables_at(cut: ConsistentCut, definition: Definition, options: VerifyOptions) -> list[Wanted]:
    """Everything that is to be compared; raises ConfigError if that is nothing."""
    captured = match_tables(cut.source, definition.patterns, definition.excludes)
    found = [
        (sink, oid, str(name))
        for sink in chosen_sinks(definition, options)
        for oid, name in captured
        if _is_wanted(str(name), sink, options)
    ]
    if not found:
        raise _nothing(options)
    return found


def forget_others(catalog: Catalog, definition: Definition, options: VerifyOptions, wanted: Sequence[Wanted]) -> None:
    """Let what is known be of tables that there are; where only some were asked for, nothing is said of the others."""
    if options.tables:
        return
    for sink in {sink.name for sink, _, _ in wanted}:
        catalog.verified.retain(definition.name, sink, [topic for known, _, topic in wanted if known.name == sink])


def _is_wanted(topic: str, sink: DeltaSinkDefinition | SearchSinkDefinition, options: VerifyOptions) -> bool:
    return matches(topic, sink.tables) and (not options.tables or matches_name(topic, options.tables))


def _nothing(options: VerifyOptions) -> ConfigError:
    return ConfigError(f"no captured table matches {list(options.tables)!r}", remedy="'cdc status' lists the tables")


def inspection_at(
    cut: ConsistentCut, sink: DeltaSinkDefinition | SearchSinkDefinition, oid: int, topic: str
) -> TableComparison | TableVerdict:
    """How a table is held against the source at a cut, or why it cannot be."""
    kept = cut.sinks[sink.name]
    record = next((one for one in kept.record.tables.values() if _oid(one) == oid), None)
    if record is None:
        return refused(sink.name, topic, "absent", "the sink does not list the table")
    if record.state != TargetState.STREAMING or record.position != cut.position:
        return refused(sink.name, topic, record.state, record.reason or _unready(record))
    schema = published_schema(cut.source, oid, cut.publication, relation=record.relation)
    if schema is None:
        return refused(sink.name, topic, record.state, "the source has no such table")
    like = ExpectedSchema.of(sink, schema)
    return TableComparison(sink.name, record, like, SourceTable(cut), _target(sink, kept, record, like))


def whole_range(verdict: TableVerdict, began: datetime, position: Position) -> VerifiedRange:
    """A verdict over a whole table as the catalog keeps it: a pass of one range."""
    return VerifiedRange(
        sink=verdict.sink,
        topic=verdict.topic,
        began=began,
        rows=verdict.rows,
        mismatched=verdict.mismatched,
        position=position,
        verified_at=datetime.now(UTC),
    )


def _target(
    sink: DeltaSinkDefinition | SearchSinkDefinition, kept: KeptCutAt, record: TableRecord, like: ExpectedSchema
) -> TargetRows:
    if isinstance(sink, SearchSinkDefinition):
        return SearchTargetRows(SearchIndex.open(kept.handle), record.topic)
    version = json.loads(kept.handle).get(record.target, record.version)
    return delta_target(record, version, like.key)


def _unready(record: TableRecord) -> str:
    if record.state == TargetState.SNAPSHOTTING:
        return "a full copy of the table has not ended"
    return f"stands at {Position(record.position)}"


def _oid(record: TableRecord) -> int:
    """OID of now; without a schema that of the first sight, which is the same inside the first epoch."""
    return record.relation & 0xFFFFFFFF if record.schema is None else TableSchema.from_json(record.schema).oid


def _with_log(definition: Definition, options: VerifyOptions) -> VerifyReport:
    sinks = chosen_sinks(definition, options)
    log = LogReader(definition.log.root)
    with _sessions(definition) as spark:
        verdicts, positions = list[TableVerdict](), [log.durable or Position(0)]
        for sink in sinks:
            try:
                stand = standing(sink)
            except SinkUnavailable as exc:
                verdicts += _all_refused(log, sink, options, exc)
                continue
            verdicts += _sink_with_log(log, sink, stand, options, spark)
            positions.append(Position(stand.record.position))
    if not verdicts:
        raise _nothing(options)
    return VerifyReport(min(positions), tuple(verdicts))


def _all_refused(
    log: LogReader, sink: DeltaSinkDefinition | SearchSinkDefinition, options: VerifyOptions, exc: SinkUnavailable
) -> list[TableVerdict]:
    """The verdicts of a sink whose store cannot be read, so that the others are compared."""
    topics = sorted(schema.topic for schema in log.schemas().values() if not schema.removed)
    wanted = [topic for topic in topics if _is_wanted(topic, sink, options)]
    return [refused(sink.name, topic, UNREADABLE, why(exc)) for topic in wanted]


def _sink_with_log(
    log: LogReader,
    sink: DeltaSinkDefinition | SearchSinkDefinition,
    stand: SinkState,
    options: VerifyOptions,
    spark: Callable[[], SparkSession],
) -> Iterator[TableVerdict]:
    upto = Position(stand.record.position)
    state = ExpectedState(log, sink, upto, spark, options.large)
    targets = targets_at_rest(log, sink, stand)
    for table in state.tables():
        if table.schema.removed or not _is_wanted(table.topic, sink, options):
            continue
        record = stand.record.tables.get(table.relation)
        if record is None:
            yield refused(sink.name, table.topic, "absent", "the sink does not list the table")
        elif record.state != TargetState.STREAMING or record.position != upto:
            yield refused(sink.name, table.topic, record.state, record.reason or _unready(record))
        else:
            like = ExpectedSchema.of(sink, table.schema)
            found = TableComparison(sink.name, record, like, LogTable(state, table), targets[table.relation])
            yield found(options.mode, listed=options.listed)


@contextmanager
def _sessions(definition: Definition) -> Iterator[Callable[[], SparkSession]]:
    """Starts the session when it is first asked for, and ends it behind the block."""
    started: list[SparkSession] = []

    def session() -> SparkSession:
        # late: whoever compares with the source, or small tables, does without Spark
        starting = import_module("pipelines.runtime.session")
        if not started:
            settings = starting.SparkSettings.of(definition, f"cdc-{definition.name}-verify")
            started.append(starting.spark_session(settings))
        return started[0]

    try:
        yield session
    finally:
        for one in started:
            one.stop()
