"""Verification: compares every row and column of every sink with the source at one position, or with the change log.

The comparison is exact while changes continue. `consistent_cut.py` ends a batch of every sink at the position of a
snapshot of the source, and `compare_table.py` compares each table there. Against the log, each sink is compared at the
position that it has published. No code of the sinks converts the values, so a conversion error in a sink is not
repeated here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from cdc.catalog import Catalog, VerifiedRange
from cdc.config import Definition
from cdc.config.sinks import DefinedSink
from cdc.config.views import NAME_OF_VIEWS
from cdc.errors import ConfigError, LogError, PositionNotReached, SinkUnavailable
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.publication import published_schema
from cdc.postgres.tables import TableName, match_tables, readable_tables
from cdc.table import TableSchema, TableState, matches, matches_name
from cdc.targets.published_record import TableRecord, TargetState
from cdc.targets.sink_kinds import reading_of
from cdc.targets.sink_reading import refusal_reason
from cdc.verify_and_replay_options import Against, VerifyMode
from pipelines.verification.compare_rows import LISTED
from pipelines.verification.compare_table import TableComparison, TableVerdict, refused
from pipelines.verification.consistent_cut import ConsistentCut, CutRequest, consistent_cut
from pipelines.verification.expected_rows import ExpectedSchema, SourceRows
from pipelines.verification.log_rows import LARGE, FoldedLog, LogRows, SinkAtRest, open_at_rest, targets_at_rest
from pipelines.verification.target_rows import OpenedTargetRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT: Final = 60.0
"""Default maximum seconds to wait until the sinks reach the cut."""
_NO_RIGHT: Final = "the role of the source may not read the table, or row security hides rows: see 'cdc doctor --sql'"
UNREADABLE: Final = "unreadable"
"""State of a verdict whose table was not compared because the store of its sink cannot be read."""

SelectedTable = tuple[DefinedSink, int, str]
"""A table to compare, as (sink, OID at the source, topic)."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `cdc verify`. Without table globs all tables are compared, without sink names all sinks."""

    tables: tuple[str, ...] = ()
    """Globs over `schema.table`; a name without schema means that table in any schema."""
    sinks: tuple[str, ...] = ()
    timeout: float = TIMEOUT
    listed: int = LISTED
    """Maximum number of keys to list for each kind of mismatch, per table and sink."""
    mode: VerifyMode = VerifyMode.ROWS
    against: Against = Against.SOURCE
    large: int = LARGE
    """Maximum log rows of a table that are folded without Spark, in a comparison with the log."""
    pause: Callable[[float], None] = time.sleep
    """Function that waits for a number of seconds; an exception that it raises ends the verification."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdicts of one verification."""

    position: Position
    """The position of the cut; in a comparison with the log, the lowest published position of a compared sink."""
    tables: tuple[TableVerdict, ...]

    @property
    def equal(self) -> bool:
        """Whether every table is equal in every sink."""
        return all(verdict.equal for verdict in self.tables)

    @property
    def summary(self) -> str:
        """One line of text with the result of all tables."""
        equal = sum(verdict.equal for verdict in self.tables)
        rows = sum(verdict.rows for verdict in self.tables)
        parked = sum(verdict.parked for verdict in self.tables)
        not_compared = f", {parked:,} parked keys not compared" if parked else ""
        return f"{equal}/{len(self.tables)} tables equal, {rows:,} rows at {self.position}{not_compared}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON envelope."""
        return {"position": str(self.position), "tables": [asdict(verdict) for verdict in self.tables]}


def verify(definition: Definition, options: VerifyOptions) -> VerifyReport:
    """Compare the selected tables once, and return their verdicts.

    The catalog records every table that was compared with the source row by row or by digest.
    Raises PositionNotReached if the sinks do not reach a common position with the source.
    """
    views = compare_views(definition, options)
    if not _selects_tables(definition, options):
        return VerifyReport(LogReader(definition.log.root).durable or Position(0), views)
    report = (
        _verify_against_log(definition, options) if options.against is Against.LOG else _verify(definition, options)
    )
    return replace(report, tables=(*report.tables, *views))


def _verify(definition: Definition, options: VerifyOptions) -> VerifyReport:
    """Compare the selected tables with the source."""
    began = datetime.now(UTC)
    request = cut_request(definition, options)
    with Catalog.open(definition.catalog.url) as catalog, consistent_cut(catalog, request) as cut:
        selected = select_tables(cut, definition, options)
        forget_removed_tables(catalog, definition, options, selected)
        comparisons = [comparison_at(cut, sink, oid, topic) for sink, oid, topic in selected]
        verdicts = [
            found if isinstance(found, TableVerdict) else found(options.mode, listed=options.listed)
            for found in comparisons
        ]
        for verdict in verdicts:
            if verdict.compared and verdict.mode != VerifyMode.COUNT:
                catalog.verified.record(definition.name, whole_range(verdict, began, cut.position))
    return VerifyReport(cut.position, tuple(verdicts))


def _selects_tables(definition: Definition, options: VerifyOptions) -> bool:
    """Return whether the options select anything but views."""
    views = {NAME_OF_VIEWS, *(sink.name for sink in definition.sinks if sink.views)}
    by_sink = not options.sinks or bool({*options.sinks} - views)
    names = [view.name for view in definition.views]
    return by_sink and not (options.tables and all(any(matches_name(n, [t]) for n in names) for t in options.tables))


def compare_views(definition: Definition, options: VerifyOptions) -> tuple[TableVerdict, ...]:
    """Compare the selected views with their SQL, and the selected sinks of views with the log of views."""
    found: list[TableVerdict] = []
    if not definition.views:
        return ()
    with lazy_session(definition) as spark:
        if not options.sinks or NAME_OF_VIEWS in options.sinks:
            views = import_module("pipelines.verification.views")  # imported late: it needs the analysis of SQL
            found += views.compare_views(definition, options.tables, spark, options.listed)
        of_views = [
            sink for sink in definition.sinks if sink.views and (not options.sinks or sink.name in options.sinks)
        ]
        for sink in of_views:
            try:
                log, at_rest = LogReader(definition.log.of_views), open_at_rest(sink)
            except (LogError, SinkUnavailable, PositionNotReached) as exc:
                selected = [view.name for view in definition.views if _is_selected(view.name, sink, options)]
                found += [refused(sink.name, name, UNREADABLE, refusal_reason(exc)) for name in selected]
                continue
            found += _compare_sink_with_log(log, sink, at_rest, options, spark)
    return tuple(found)


def select_sinks(definition: Definition, options: VerifyOptions) -> list[DefinedSink]:
    """Return the sinks that the options name, or all sinks if they name none.

    Raises ConfigError for an unknown sink, and for a definition without sinks.
    """
    sinks = [sink for sink in definition.sinks_of_tables if not options.sinks or sink.name in options.sinks]
    of_views = {NAME_OF_VIEWS, *(sink.name for sink in definition.sinks if sink.views)} if definition.views else set()
    if unknown := set(options.sinks) - {sink.name for sink in sinks} - of_views:
        names = [sink.name for sink in definition.sinks_of_tables]
        raise ConfigError(f"unknown sink {min(unknown)!r}: expected one of {names!r}", remedy="name one of these sinks")
    if not sinks:
        raise ConfigError("the definition has no sink", remedy="add a sink under 'sinks'")
    return sinks


def cut_request(definition: Definition, options: VerifyOptions) -> CutRequest:
    """Return the request for a consistent cut of the selected sinks. Raises PositionNotReached for an empty log.

    Also raises ConfigError as `select_sinks` does.
    """
    sinks = select_sinks(definition, options)
    durable = LogReader(definition.log.root).durable
    if durable is None:
        raise PositionNotReached("the log is still empty: the initial snapshot has not ended")
    return CutRequest(
        pipeline=definition.name,
        dsn=definition.source.dsn.reveal(),
        primary=definition.source.current_primary() if definition.source.primary else None,
        sinks=[sink.name for sink in sinks],
        patterns=definition.patterns,
        exclude=definition.excludes,
        publication=definition.source.publication.name,
        epoch=durable.epoch,
        timeout=options.timeout,
        pause=options.pause,
    )


def select_tables(cut: ConsistentCut, definition: Definition, options: VerifyOptions) -> list[SelectedTable]:
    """Return the tables to compare, for each sink. Raises ConfigError if no table is selected."""
    selected = find_tables(cut, definition, options)
    if not selected:
        raise _no_table_error(options)
    return selected


def find_tables(cut: ConsistentCut, definition: Definition, options: VerifyOptions) -> list[SelectedTable]:
    """Return the tables to compare, for each sink; there may be none."""
    captured = match_tables(cut.source, definition.patterns, definition.excludes)
    return [
        (sink, oid, str(name))
        for sink in select_sinks(definition, options)
        for oid, name in captured
        if _is_selected(str(name), sink, options)
    ]


def forget_removed_tables(
    catalog: Catalog, definition: Definition, options: VerifyOptions, selected: Sequence[SelectedTable]
) -> None:
    """Delete the recorded results of tables that are no longer selected. Does nothing if the options select tables by
    name.
    """
    if options.tables:
        return
    for name in {sink.name for sink, _, _ in selected}:
        catalog.verified.retain(definition.name, name, [topic for sink, _, topic in selected if sink.name == name])


def _is_selected(topic: str, sink: DefinedSink, options: VerifyOptions) -> bool:
    return matches(topic, sink.tables) and (not options.tables or matches_name(topic, options.tables))


def _no_table_error(options: VerifyOptions) -> ConfigError:
    if not options.tables:
        return ConfigError(
            "no captured table belongs to a selected sink, so no table can be compared",
            remedy="run 'cdc status' to list the tables",
        )
    return ConfigError(
        f"no captured table of a selected sink matches {list(options.tables)!r}",
        remedy="run 'cdc status' to list the tables",
    )


def comparison_at(cut: ConsistentCut, sink: DefinedSink, oid: int, topic: str) -> TableComparison | TableVerdict:
    """Return the comparison of a sink's table with the source at a cut, or the verdict that it cannot be compared.

    oid: OID of the table at the source. topic: `schema.table`.
    """
    kept = cut.sinks[sink.name]
    record = next((one for one in kept.record.tables.values() if _oid(one) == oid), None)
    if record is None:
        return refused(sink.name, topic, "absent", "the sink has not published the table")
    if record.state != TargetState.STREAMING or record.position != cut.position:
        return refused(sink.name, topic, record.state, record.reason or _not_at_cut(record))
    schema = published_schema(cut.source, oid, cut.publication, relation=record.relation)
    if schema is not None and not readable_tables(cut.source, [(oid, TableName(schema.schema, schema.name))]):
        return refused(sink.name, topic, record.state, _NO_RIGHT)
    if schema is None:
        return refused(sink.name, topic, record.state, "the table does not exist at the source")
    expected = ExpectedSchema.of(sink, schema)
    target = OpenedTargetRows(reading_of(sink).table_at_cut(sink, kept.handle, record, expected.key))
    return TableComparison(sink.name, record, expected, SourceRows(cut), target)


def whole_range(verdict: TableVerdict, began: datetime, position: Position) -> VerifiedRange:
    """Return the verdict of a whole table as a catalog record: a pass that has a single range."""
    return VerifiedRange(
        sink=verdict.sink,
        topic=verdict.topic,
        began=began,
        rows=verdict.rows,
        mismatched=verdict.mismatched,
        position=position,
        verified_at=datetime.now(UTC),
    )


def _not_at_cut(record: TableRecord) -> str:
    if record.state == TargetState.SNAPSHOTTING:
        return "a full copy of the table has not ended"
    return f"the target is at position {Position(record.position)}, not at the common position"


def _oid(record: TableRecord) -> int:
    """Return the OID of the table at the source, from the schema in the record.

    If the record has no schema, return the low 32 bits of the relation: the OID of the table in its first epoch.
    """
    return record.relation & 0xFFFFFFFF if record.schema is None else TableSchema.from_json(record.schema).oid


def _verify_against_log(definition: Definition, options: VerifyOptions) -> VerifyReport:
    sinks = select_sinks(definition, options)
    log = LogReader(definition.log.root)
    with lazy_session(definition) as spark:
        verdicts, positions = list[TableVerdict](), [log.durable or Position(0)]
        for sink in sinks:
            try:
                at_rest = open_at_rest(sink)
            except SinkUnavailable as exc:
                verdicts += _unreadable_sink(log, sink, options, exc)
                continue
            verdicts += _compare_sink_with_log(log, sink, at_rest, options, spark)
            positions.append(Position(at_rest.record.position))
    if not verdicts:
        raise _no_table_error(options)
    return VerifyReport(min(positions), tuple(verdicts))


def _unreadable_sink(
    log: LogReader, sink: DefinedSink, options: VerifyOptions, exc: SinkUnavailable
) -> list[TableVerdict]:
    """Return the verdicts of the selected tables of a sink whose store cannot be read; exc: the reason."""
    topics = sorted(schema.topic for schema in log.schemas().values() if schema.state is not TableState.DROPPED)
    selected = [topic for topic in topics if _is_selected(topic, sink, options)]
    return [refused(sink.name, topic, UNREADABLE, refusal_reason(exc)) for topic in selected]


def _compare_sink_with_log(
    log: LogReader,
    sink: DefinedSink,
    at_rest: SinkAtRest,
    options: VerifyOptions,
    spark: Callable[[], SparkSession],
) -> Iterator[TableVerdict]:
    upto = Position(at_rest.record.position)
    state = FoldedLog(log, sink.name, sink.tables, upto, spark, options.large)
    targets = targets_at_rest(log, sink, at_rest)
    for table in state.tables():
        if table.schema.state is TableState.DROPPED or not _is_selected(table.topic, sink, options):
            continue
        record = at_rest.record.tables.get(table.relation)
        if record is None:
            yield refused(sink.name, table.topic, "absent", "the sink has not published the table")
        elif record.state != TargetState.STREAMING or record.position != upto:
            yield refused(sink.name, table.topic, record.state, record.reason or _not_at_cut(record))
        else:
            expected = ExpectedSchema.of(sink, table.schema)
            found = TableComparison(sink.name, record, expected, LogRows(state, table), targets[table.relation])
            yield found(options.mode, listed=options.listed)


@contextmanager
def lazy_session(definition: Definition) -> Iterator[Callable[[], SparkSession]]:
    """Yield a function that starts the Spark session at its first call; the session stops at the end of the block."""
    started: list[SparkSession] = []

    def session() -> SparkSession:
        # imported late: a comparison with the source, or of small tables, needs no Spark
        starting = import_module("pipelines.runtime.spark_session")
        if not started:
            settings = starting.SparkSettings.of(definition, f"cdc-{definition.name}-verify")
            started.append(starting.spark_session(settings))
        return started[0]

    try:
        yield session
    finally:
        for one in started:
            one.stop()
