"""replay: build a sink's target anew from the change log alone, and put it in the place of the old one in one step.

The source is not asked for anything. The new target is built beside the old one while the sink goes on; only for
the last stretch and the switch does a running driver let go of the sink, and goes on from the new target's position.
Killed at any moment, the old target is as it was or the new one is in place, and a second run does it all again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol, Self

from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, DeltaSinkDefinition, SearchSinkDefinition
from cdc.errors import ConfigError, SinkError
from cdc.failpoint import hit
from cdc.position import Position
from cdc.stores.published import Published, TableRecord, TargetState
from cdc.table import TableSchema
from pipelines.apply import SinkLoop
from pipelines.fold_range import RangeFolder
from pipelines.replaying.log_contents import TableContents
from pipelines.replaying.outcome import ReplayReport, erased_files_notes, estimate_report, final_report
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.request import LATEST, ReplayOptions, ReplayPlan, plan_replay
from pipelines.replaying.side_directory import absolute_path, check_directory, fill_directory, table_template
from pipelines.runtime.consumer_registration import registered_for_replay
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.progress import SinkFigures
from pipelines.runtime.replay_pause import driver_of, paused, sole_replay
from pipelines.runtime.session import SparkSettings, has_delta, spark_session
from pipelines.sink_factory import build_sink, delta_settings, keeps_history
from pipelines.sinks.contract import Sink, SparkAwaited
from pipelines.sinks.delta.merge import has_file_system
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.swap import StagedDelta
from pipelines.sinks.search.swap import StagedSearch
from pipelines.sinks.table_state import with_progress_state
from pipelines.source.data_source import register

MAX_ROWS: Final = 200_000
"""Rows of one batch of the last stretch, as in the apply process."""

ReportLine = Callable[[str], None]


class StagedTarget(Protocol):
    """A new target that is built beside the old one."""

    @property
    def sink(self) -> Sink:
        """Fills it, as any driver would."""

    @property
    def erased(self) -> Mapping[str, int]:
        """Target → files that were removed of it, for its rules hide what they contain; known once `put` returned."""

    def forget_earlier(self, schemas: dict[int, TableSchema]) -> None:
        """Remove what an earlier process staged and did not put in place."""

    def standing(self, log_id: str) -> Published | None:
        """Where the sink stands, which from here on no driver may change."""

    def put(self, built: Published, rest: dict[int, TableRecord]) -> Published:
        """Put the new targets in place and publish."""

    def discard(self) -> None:
        """Let go of what is open."""


def replay(
    definition: Definition, options: ReplayOptions, say: ReportLine = lambda _line: None, *, at_once: bool = False
) -> ReplayReport:
    """Build the target anew; raises ConfigError for what cannot be, before anything is started.

    at_once: the session is started although small tables do without; YARN ends a driver that has none in 100 s.
    Raises SinkInUse when another process does not let go of the sink, SinkError when a search index would lose a table.
    """
    began = time.monotonic()
    request = plan_replay(definition, options)
    owner = f"{request.log.log_id}/{options.sink}"
    if options.into is not None:
        check_directory(options.into, owner)
    if options.dry_run:
        return estimate_report(request)
    with Catalog.open(definition.catalog.url) as catalog, _LazySession(definition) as spark:
        if options.into is None and options.end != LATEST and driver_of(catalog, definition.name) is not None:
            raise ConfigError(
                "--to cannot replace a target while the apply process runs",
                remedy="omit --to, stop the apply process, or write --into PATH",
            )
        if at_once:
            spark()
        with (
            sole_replay(catalog, definition.name, options.sink),
            registered_for_replay(definition.log.root, request.log, request.wanted),
        ):
            run = _ReplayRun(definition, request, catalog, spark, say)
            published = run.in_place() if options.into is None else run.into(options.into, owner)
    return replace(final_report(request, published, run.seconds, time.monotonic() - began), notes=tuple(run.notes))


class _LazySession:
    """The session, started when it is first asked for."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self.session: SparkSession | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.session is not None:
            self.session.stop()

    def __call__(self) -> SparkSession:
        if self.session is None:
            self.session = spark_session(SparkSettings.of(self._definition, f"cdc-{self._definition.name}-replay"))
            register(self.session)
        return self.session


class _ReplayRun:
    """One replay that was found possible."""

    def __init__(
        self, definition: Definition, request: ReplayPlan, catalog: Catalog, spark: _LazySession, say: ReportLine
    ) -> None:
        self._definition, self._request, self._catalog = definition, request, catalog
        self._spark, self._say = spark, say
        history = keeps_history(request.wanted)
        self._source = LogSource(request.log, request.wanted.name, request.globs, history)
        self.seconds: dict[int, float] = {}
        """By relation: how long it took to build."""
        self.notes: list[str] = []

    def into(self, path: str, owner: str) -> Published:
        """Build the target and keep it at path."""
        with fill_directory(path, owner):
            sink = _build_sink_at(self._request.wanted, path)
            try:
                return self._build(sink)
            finally:
                sink.close()

    def in_place(self) -> Published:
        """Build the target and put it in the place of the old one."""
        log, name = self._request.log, self._request.wanted.name
        staged = _create_staged_target(self._request.wanted)
        staged.forget_earlier(log.schemas())
        try:
            built = self._build(staged.sink)
            hit("replay_after_stage")
            # once while the sink still goes on, so that it stands still for as short as can be
            built = self._caught_up(staged.sink, built, self._request.standing)
            self._say("the new target is built: taking the sink over")
            with paused(self._catalog, self._definition.name, name):
                kept = staged.standing(log.log_id)
                built = self._caught_up(staged.sink, built, kept)
                published = staged.put(*self._parted(built, kept))
            self._say(f"in place at {Position(published.position)}")
            self.notes = erased_files_notes(staged.erased, published.tables.values())
            return published
        finally:
            staged.discard()

    def _build(self, sink: Sink) -> Published:
        tables = self._request.tables
        self._say(f"building {len(tables)} tables from the log up to {self._request.upto}")
        if isinstance(self._request.wanted, DeltaSinkDefinition) and self._request.wanted.writer.value == Writer.SPARK:
            sink.attach(self._spark())
        sink.open(self._request.log.log_id)
        means = RebuildContext(spark=self._spark, frames=self._frames, say=self._table_done)
        return Rebuild(self._source, sink, means)(tables, self._request.upto)

    def _frames(self) -> bool:
        wanted = self._request.wanted
        if not isinstance(wanted, DeltaSinkDefinition) or wanted.writer.value == Writer.DELTA_RS:
            return False
        return has_delta(self._spark()) and has_file_system(self._spark(), wanted.path)

    def _table_done(self, table: TableContents, seconds: float) -> None:
        self.seconds[table.relation] = seconds
        done, of = len(self.seconds), len(self._request.tables)
        rate = table.rows / max(seconds, 1e-3)
        self._say(f"{done}/{of} {table.topic}: {table.rows:,} rows in {seconds:.1f} s, {rate:,.0f} rows/s")

    def _caught_up(self, sink: Sink, built: Published, standing: Published | None) -> Published:
        """The staged sink brought to where the switch has to find it: the others' position, or the log's end."""
        log = self._request.log
        log.refresh()
        if self._request.partial or self._request.options.end != LATEST:
            end = Position(max(built.position, standing.position if standing else 0))
        else:
            end = Position(max(built.position, log.durable or 0))
        if end == built.position:
            return built
        fold = RangeFolder(log, self._request.wanted.name, self._source.globs, self._source.keeps_history)
        loop = SinkLoop(
            sink,
            fold,
            CutRequests(self._catalog, self._definition.name),
            SinkFigures(self._definition.name, sink.name, metrics.Metrics()),
        )
        loop.open()
        while loop.position < end:
            self._step(sink, loop, fold, end)
        loop.drain()
        return sink.open(log.log_id) or built

    def _step(self, sink: Sink, loop: SinkLoop, fold: RangeFolder, end: Position) -> None:
        after = loop.position
        upto = min(end, fold.log.latest_boundary(after, MAX_ROWS))
        upto = upto if upto > after else end
        small = fold.is_small(after, upto)
        rows = None if small else self._source.frame(self._spark(), after, upto)
        try:
            loop(rows, upto)
        except SparkAwaited:  # the batch or its target is more than delta-rs should merge
            sink.attach(self._spark())
            loop(rows, upto)

    def _parted(self, built: Published, kept: Published | None) -> tuple[Published, dict[int, TableRecord]]:
        """(what is put in place, the records of the sink's other tables at the same cut)."""
        good = {r: record for r, record in built.tables.items() if record.state != TargetState.FAILED}
        held = {} if kept is None else kept.tables
        if not isinstance(self._request.wanted, DeltaSinkDefinition):
            _check_no_table_lost(built, held, ", or write --into PATH")
            return replace(built, tables=good), {r: built.tables[r] for r in built.tables.keys() - good.keys()}
        # what shares its target with tables that were built goes with the old one
        gone = _records_in_replaced_targets(self._request.wanted, good.values(), held)
        _check_no_table_lost(built, gone, ", or exclude the table from its rule")
        stay = held.keys() - good.keys() - gone.keys()
        rest = {r: record for r, record in built.tables.items() if r not in good and r not in stay}
        rest |= {r: self._beside(held[r], built) for r in stay}
        return replace(built, tables=good), rest

    def _beside(self, record: TableRecord, built: Published) -> TableRecord:
        """The record of a table that stays: one without changes moves along, one that could not be built lags."""
        touched = record.relation in built.tables or record.state == TargetState.FAILED
        position = record.position if touched else max(record.position, built.position)
        return with_progress_state(replace(record, position=position), built.position)


def _records_in_replaced_targets(
    wanted: DeltaSinkDefinition, good: Iterable[TableRecord], held: Mapping[int, TableRecord]
) -> dict[int, TableRecord]:
    """The records of a sink whose rows lie in a target that will be replaced by one without them."""
    settings = delta_settings(wanted)
    anew = {record.relation: settings.uri_of(TableSchema.from_json(record.schema or "")) for record in good}
    return {r: record for r, record in held.items() if r not in anew and record.target in anew.values()}


def _check_no_table_lost(built: Published, held: Mapping[int, TableRecord], instead: str) -> None:
    for relation, record in built.tables.items():
        before = held.get(relation)
        if record.state == TargetState.FAILED and before is not None and before.state != TargetState.FAILED:
            raise SinkError(
                f"table {record.topic!r} cannot be rebuilt, and it shares its target with other tables: "
                f"{record.reason}",
                remedy=f"the old target is unchanged; correct what the reason names{instead}",
            )


def _build_sink_at(wanted: DeltaSinkDefinition | SearchSinkDefinition, path: str) -> Sink:
    if not isinstance(wanted, DeltaSinkDefinition):
        return build_sink(wanted.model_copy(update={"path": absolute_path(path)}))
    # all of it goes below the directory that was named, also what a rule puts elsewhere
    rules = tuple(rule.model_copy(update={"path": None, "pattern": None}) for rule in wanted.rules)
    return build_sink(wanted.model_copy(update={"path": table_template(path), "rules": rules}))


def _create_staged_target(wanted: DeltaSinkDefinition | SearchSinkDefinition) -> StagedTarget:
    if isinstance(wanted, DeltaSinkDefinition):
        return StagedDelta(delta_settings(wanted))
    return StagedSearch(wanted.name, wanted.path, wanted.fields, wanted.dead_letters)
