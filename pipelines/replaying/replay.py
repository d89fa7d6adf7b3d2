"""Replay: build a new target of a sink from the change log alone, then replace the old target in one step.

The source is not involved. The sink continues while the new target is built next to the old one. A running apply
process closes the sink only for the last changes and the switch, then continues from the position of the new target.
After a crash at any time each table has its old or its new target, and a second run repeats the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Self

from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.process_lease import sole_replay
from cdc.config import Definition
from cdc.errors import ConfigError, LogTrimmed
from cdc.failpoint import hit
from cdc.position import Position
from cdc.targets.published_record import Published
from pipelines.range_folder import RangeFolder
from pipelines.replaying.plan import LATEST, ReplayOptions, ReplayPlan, plan_replay
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.replay_destination import (
    absolute_path,
    check_directory,
    fill_directory,
    split_records,
)
from pipelines.replaying.report import ReplayReport, erased_files_notes, estimate_report, final_report
from pipelines.replaying.table_sizes_in_log import TableContents
from pipelines.runtime.consumer_registration import registered_for_replay
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import driver_of, paused
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.runtime.spark_session import SparkSettings, has_delta, spark_session
from pipelines.sink_kinds import kind_of
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink, SparkAwaited
from pipelines.sinks.sink_kind import StagedTarget
from pipelines.source.data_source import register

MAX_ROWS: Final = 200_000
"""Approximate maximum rows of one batch, when a replay applies the changes that were logged after it began."""

ReportLine = Callable[[str], None]
"""Function that prints one line about the progress of a replay."""


def replay(
    definition: Definition, options: ReplayOptions, report_line: ReportLine = lambda _: None, *, at_once: bool = False
) -> ReplayReport:
    """Carry out a replay: build the new target of a sink; then replace the old target, or keep both with `--into`.

    at_once: start the Spark session at the beginning, although small tables need none. YARN ends a driver that has no
    session after 100 s.

    Raises ConfigError for impossible options, before anything is started. Raises SinkInUse if another replay of the
    sink runs, or if the apply process does not close the sink. Raises SinkError if the switch would lose a table.
    """
    began = time.monotonic()
    plan = plan_replay(definition, options)
    owner = f"{plan.log.log_id}/{options.sink}"
    if options.into is not None:
        check_directory(options.into, owner)
    if options.dry_run:
        return estimate_report(plan)
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
            registered_for_replay(definition.log_of(plan.wanted), plan.log, plan.wanted),
        ):
            run = _ReplayRun(definition, plan, catalog, spark, report_line)
            published = run.replace_target() if options.into is None else run.write_into(options.into, owner)
    return replace(final_report(plan, published, run.seconds, time.monotonic() - began), notes=tuple(run.notes))


class _LazySession:
    """The Spark session of a replay: the first call starts it, and the end of the block stops it."""

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
    """Carries out one replay plan: builds the new target, and writes it to a directory or replaces the old target."""

    def __init__(
        self, definition: Definition, plan: ReplayPlan, catalog: Catalog, spark: _LazySession, report_line: ReportLine
    ) -> None:
        self._definition, self._plan, self._catalog = definition, plan, catalog
        self._spark, self._report_line = spark, report_line
        self._source = LogSource(plan.log, plan.wanted.name, plan.globs, plan.wanted.keeps_history)
        self.seconds: dict[int, float] = {}
        """Relation → seconds that its build took."""
        self.notes: list[str] = []

    def write_into(self, path: str, owner: str) -> Published:
        """Build the target in the directory `path`, and return the published record."""
        with fill_directory(path, owner):
            sink = kind_of(self._plan.wanted).build_at(self._plan.wanted, absolute_path(path))
            try:
                return self._build(sink)
            finally:
                sink.close()

    def replace_target(self) -> Published:
        """Build the target, replace the old target by it, and return the published record."""
        staged = kind_of(self._plan.wanted).stage(self._plan.wanted)
        staged.forget_earlier(self._plan.log.schemas())
        try:
            built = self._build(staged.sink)
            hit("replay_after_stage")
            # most changes are applied while the sink still runs, so that its pause is short
            built = self._catch_up(staged.sink, built, self._plan.published)
            published = self._switch(staged, built)
            self._report_line(f"replaced the old target; the sink is at {Position(published.position)}")
            self.notes = erased_files_notes(staged.erased, published.tables.values())
            return published
        finally:
            staged.discard()

    def _switch(self, staged: StagedTarget, built: Published) -> Published:
        """Apply the last changes and replace the old targets, while no apply process has the sink open."""
        self._report_line("built the new target; pausing the sink until the new target replaces the old one")
        with paused(self._catalog, self._definition.name, self._plan.wanted.name):
            current = staged.open_published(self._plan.log.log_id)
            built = self._catch_up(staged.sink, built, current)
            return staged.put(*split_records(self._plan.wanted, built, current, partial=self._plan.partial))

    def _build(self, sink: Sink) -> Published:
        tables, wanted = self._plan.tables, self._plan.wanted
        self._report_line(f"building {len(tables)} tables from the log up to {self._plan.upto}")
        if wanted.opens_with_spark:
            sink.attach(self._spark())
        sink.open(self._plan.log.log_id)
        context = RebuildContext(
            spark=self._spark, executors_can_write=self._executors_can_write, report_table=self._report_table
        )
        return Rebuild(self._source, sink, context)(tables, self._plan.upto)

    def _executors_can_write(self) -> bool:
        wanted = self._plan.wanted
        return kind_of(wanted).executors_can_write(wanted, lambda: has_delta(self._spark()))

    def _report_table(self, table: TableContents, seconds: float) -> None:
        self.seconds[table.relation] = seconds
        done, total = len(self.seconds), len(self._plan.tables)
        rate = table.rows / max(seconds, 1e-3)
        self._report_line(f"{done}/{total} {table.topic}: {table.rows:,} rows in {seconds:.1f} s, {rate:,.0f} rows/s")

    def _catch_up(self, sink: Sink, built: Published, current: Published | None) -> Published:
        """Apply later changes to the staged sink, and return its new published record.

        These changes end at the end of the log; with --tables or --to, at the published position of `current`.
        built: the record of the staged sink. current: the record of the sink itself.
        """
        log = self._plan.log
        log.refresh()
        newest = log.durable if self._to_latest else current and current.position
        end = Position(max(built.position, newest or 0))
        if end == built.position:
            return built
        fold = RangeFolder(log, self._plan.wanted.name, self._source.globs, self._source.keeps_history)
        loop = SinkLoop(
            sink,
            fold,
            CutRequests(self._catalog, self._definition.name),
            SinkFigures(self._definition.name, sink.name, metrics.Metrics()),
        )
        loop.open()
        while loop.position < end:
            self._apply_batch(sink, loop, fold, end)
        loop.drain()
        return sink.open(log.log_id) or built

    def _apply_batch(self, sink: Sink, loop: SinkLoop, fold: RangeFolder, end: Position) -> None:
        """Apply the next batch of about MAX_ROWS rows; with --tables or --to, the batch ends at `end` or earlier."""
        after, upto = loop.position, self._batch_end(loop.position, end)
        try:
            rows = None if fold.is_small(after, upto) else self._source.frame(self._spark(), after, upto)
            try:
                loop(rows, upto)
            except SparkAwaited:  # only Spark can write the target
                sink.attach(self._spark())
                loop(rows, upto)
        except LogTrimmed:
            # changes up to a position after `upto` may have been trimmed since the end of the batch was chosen
            self._plan.log.refresh()
            if self._batch_end(loop.position, end) == upto:
                raise

    def _batch_end(self, after: Position, end: Position) -> Position:
        boundary = self._plan.log.latest_boundary(after, MAX_ROWS)
        if boundary <= after:
            return end
        return boundary if self._to_latest else min(end, boundary)

    @property
    def _to_latest(self) -> bool:
        return not self._plan.partial and self._plan.options.end == LATEST
