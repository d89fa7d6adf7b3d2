"""The apply loop: range → fold → rows → sink → publish, one batch after another, for one sink.

The sink continues from its published record, not from Spark's checkpoint. A Spark query starts at the position of this
record, and its checkpoint is deleted when the query stops. So after a crash the sink repeats the interrupted batch.
Each target stores the position of its last merge, so the repeated batch skips the targets that already contain it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

import structlog
from pyspark.sql import DataFrame, SparkSession

from cdc.config import EngineChoice
from cdc.errors import BatchTooLarge, CdcError, LogTrimmed, Reaction
from cdc.failpoint import hit
from cdc.position import Position
from cdc.table import TableSchema, TableState
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.engine_decision import (
    ONE_MACHINE,
    TAKEN_HERE,
    Cores,
    Decision,
    Engine,
    RangeSize,
    Waiting,
    decide,
)
from pipelines.folding.folded_batch import NO_CHANGES, Boundary, ControlEvents, FoldedBatch
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests, PendingCut
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sinks.contract import ExecutorSink, Sink, TableBatch
from pipelines.sinks.record_after_batch import (
    WHOLE,
    at_cut,
    check_captured,
    dropped_record,
    failed_record,
    is_left_out,
    lag_since,
    log_trimmed_error,
    with_progress_state,
)
from pipelines.table_threads import TableThreads

log = structlog.get_logger("apply")


class SinkLoop:
    """Applies ranges of the log to one sink, one batch at a time; any thread may call it."""

    def __init__(self, sink: Sink, fold: RangeFolder, cuts: CutRequests, progress: SinkFigures) -> None:
        self._sink = sink
        self._fold = fold
        self._cuts = cuts
        self._progress = progress
        self._log = fold.log
        if isinstance(sink, ExecutorSink):
            fold.takes_parts = sink.takes_parts
        self.quarantine = Quarantine(sink)
        self._threads = TableThreads(sink)
        self._published = Published(0, 0, {})
        self._schemas: dict[int, TableSchema] = {}
        self._lock = RLock()
        self._drained = False
        self.decision = TAKEN_HERE
        """What the last call of `advance` decided about the next batch."""
        self.has_caught_up = False
        """Whether `catch_up_all` is not due: no table was behind when the sink was opened, or it has been called."""
        self.batch_began = 0.0
        self.batch_seconds = 0.0
        self.batch_tables = 0
        """When the last batch began, on the monotonic clock; how many seconds it took; how many tables it had."""
        self.needs_reopen = False
        """Whether a stopped table can continue. If so, the runner reopens the sink, and the table catches up."""

    @property
    def position(self) -> Position:
        """The position of the sink's published record."""
        return Position(self._published.position)

    @property
    def record(self) -> Published:
        """The record of the last published cut; its position is 0 before the first one."""
        return self._published

    @property
    def consumed_position(self) -> Position:
        """The lowest position of the sink and its tables; the loop never again reads the log before this position."""
        return Position(min((self.position, *(table.position for table in self._published.tables.values()))))

    @property
    def lagging_tables(self) -> list[TableRecord]:
        """The tables whose position is below the sink's position; `catch_up` applies the missing range to each."""
        return [table for table in self._published.tables.values() if table.position < self.position]

    def open(self) -> None:
        """Open the sink and read its published record."""
        self._log.refresh()
        opened = self._sink.open(self._log.log_id, self._schemas_at) or self._published
        self._published = replace(opened, tables=self.quarantine.with_parked_keys(opened.tables))
        self._schemas = self._log.schemas(self.position)
        self._published = replace(self._published, tables=dict(self._with_dropped_tables()))
        self.has_caught_up = not self.lagging_tables
        self._progress.record_published(self._published, lag=None, rows={})

    def _schemas_at(self, position: int) -> dict[int, TableSchema]:
        return self._log.schemas(Position(position))

    def advance(self, rows: int = 0, cores: Callable[[], Cores] = lambda: ONE_MACHINE) -> bool:
        """Apply about `rows` changes at most in this process; return False, and apply nothing, if they are for Spark.

        A range is never divided below `EngineLimits.small_rows`. It also returns False while `catch_up_all` is due, and
        does nothing while another thread applies a batch.
        cores: returns the cores that Spark has at present.
        """
        if not self._lock.acquire(blocking=False):
            self.decision = TAKEN_HERE
            return True
        try:
            self._log.refresh()
            end, size = self._next_slice(rows)
            self.decision = self._decide(end, size, cores())
            is_taken = self.decision.engine is Engine.HERE and self.has_caught_up
            if is_taken:
                self(None, end)
            return is_taken
        finally:
            self._lock.release()

    @property
    def last_engine(self) -> Engine:
        """What applied the last batch."""
        return self._fold.last_engine

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """Wait until no other thread applies a batch, and let none begin one inside the `with` block."""
        with self._lock:
            yield

    def __call__(self, rows: DataFrame | SparkSession | None, end: Position) -> None:
        """Apply the rows of the log from the sink's position to `end`, usually as one batch.

        rows: a Spark session, or a frame of one, for a large range. It may be None if the range is small.
        """
        with self._lock:
            if self._drained or end <= self.position:
                return
            self._log.refresh()
            cuts = self._answer(self._cuts.open(self._sink.name))
            while self.position < end:
                # both are rare: a requested cut, and the position of a table that is ahead of the others after a crash
                positions = {cut.position for cut in cuts} | {
                    record.position for record in self._published.tables.values()
                }
                stops = (stop for stop in positions if self._log.leads(self.position, Position(stop)))
                upto = Position(min([end, *stops]))
                self.batch_began = time.monotonic()
                self._progress.start_batch(upto)
                batch = self._fold(rows, self.position, upto)
                try:
                    self._apply(batch, Boundary(upto, self._log.committed_at(upto)))
                finally:
                    batch.release()
                cuts = self._answer(cuts)

    def apply_micro_batch(self, rows: DataFrame, end: Position) -> bool:
        """Apply the next part of a micro-batch that ends at `end`; return whether there is another part.

        There are several parts if the folded rows come to the driver, and are too many for it at once.
        """
        before = self.position
        if before < end:
            self._log.refresh()
            self(rows, self._fold.end_of_micro_batch(before, end))
        return before < self.position < end

    def catch_up_all(self, session: SparkSession | None) -> None:
        """Catch up every lagging table after `open`; a table that fails again stays behind.

        session: None before Spark has started. Raises SparkAwaited if a table needs it.
        """
        for table in self.lagging_tables:
            self.catch_up(table, session)
        self.has_caught_up = True

    def catch_up(self, table: TableRecord, session: SparkSession | None) -> None:
        """Apply to one lagging table the range of the log from the table's position to the sink's position.

        Spark reads a large range with `session`. Raises SparkAwaited if that is needed and `session` is None. If the
        range was trimmed from the log, or does not fit this process and may not go to Spark, the published record marks
        the table as failed.
        """
        with self._lock:
            self._log.refresh()
            try:
                for batch, upto in self._fold.slices(session, Position(table.position), self.position, table.relation):
                    record = self._apply_slice(table.relation, batch, upto)
                    if record.state == TargetState.FAILED:
                        break
            except (LogTrimmed, BatchTooLarge) as exc:
                error = log_trimmed_error(exc, self._sink.name) if isinstance(exc, LogTrimmed) else exc
                batch = NO_CHANGES
                record = failed_record(table, self._schemas[table.relation], error)
            record = self._ended_if_dropped(record, self.position)
            self._publish({table.relation: record}, Boundary(self.position, self._published.committed_at), batch)

    def drain(self) -> None:
        """Wait for the running batch to end; after this, the loop applies no further batch."""
        with self._lock:
            self._drained = True
        self._threads.close()

    def _apply(self, batch: FoldedBatch, boundary: Boundary) -> None:
        concerned = sorted({*batch.relations, *self.quarantine.requested_relations})
        waiting = {r for r in concerned if self._is_failed(r) or self._is_behind(r)}
        affected = [r for r in concerned if r not in waiting and not self._is_left_out(r, batch)]
        self.needs_reopen = self.needs_reopen or any(self._can_resume(r, batch.controls[r]) for r in batch.controls)
        records = self._threads.map(
            lambda r: self._ended_if_dropped(self._apply_table(r, batch, boundary.position), boundary.position),
            affected,
            batch.rows,
        )
        self._publish(records, boundary, batch)
        self.batch_seconds, self.batch_tables = time.monotonic() - self.batch_began, len(affected)
        self._progress.record_duration(self.batch_seconds, self.last_engine)

    def _apply_table(self, relation: int, batch: FoldedBatch, upto: int) -> TableRecord:
        controls = batch.controls.get(relation, ControlEvents())
        before = self._published.tables.get(relation)
        earlier = self._schemas.get(relation)
        schema = self._schemas[relation] if controls.schema is None else controls.schema.following(earlier)
        self._schemas[relation] = schema
        try:
            check_captured(schema)
            record = self.quarantine.apply(
                before,
                TableBatch(
                    schema=schema,
                    rows=None if relation in batch.parts else batch.rows_of(relation),
                    frame=None,
                    parts=batch.parts.get(relation),
                    after=min(before.position, self.position, upto) if before else 0,
                    upto=upto,
                    truncated=controls.truncated,
                    generation=controls.generation,
                    endings=controls.endings,
                    since=batch.since,
                ),
            )
        except CdcError as exc:
            if exc.reaction is not Reaction.QUARANTINE:
                raise
            record = failed_record(before, schema, exc)
        hit("after_table_merge")
        if record.state == TargetState.FAILED and schema.state is not TableState.DROPPED:
            log.error(
                "a table stopped; the other tables of the sink continue",
                sink=self._sink.name,
                table=record.topic,
                reason=record.reason,
            )
        return with_progress_state(record, upto)

    def _apply_slice(self, relation: int, batch: FoldedBatch, upto: int) -> TableRecord:
        try:
            return self._apply_table(relation, batch, upto)
        finally:
            batch.release()

    def _with_dropped_tables(self) -> Iterator[tuple[int, TableRecord]]:
        """Yield the records of the sink; a dropped table that was stopped by its rules may have continued."""
        for relation, record in self._published.tables.items():
            has_all = record.state in WHOLE and record.position >= self.position and relation in self._schemas
            yield relation, self._ended_if_dropped(record, record.position) if has_all else record

    def _ended_if_dropped(self, record: TableRecord, upto: int) -> TableRecord:
        """Return the final record of a table that was dropped, which does not fail any longer; other records as is."""
        schema = self._schemas[record.relation]
        if schema.state is not TableState.DROPPED:
            return record
        dropped = dropped_record(record, schema, upto)
        log.info(
            "a table was dropped; its target keeps the rows",
            sink=self._sink.name,
            table=dropped.topic,
            reason=dropped.reason,
        )
        return dropped

    def _publish(self, changed: dict[int, TableRecord], boundary: Boundary, batch: FoldedBatch) -> None:
        untouched = {
            relation: at_cut(record, boundary.position)
            for relation, record in self._published.tables.items()
            if relation not in changed and record.state != TargetState.FAILED and not self._is_behind(relation)
        }
        tables = {**self._published.tables, **untouched, **changed}
        committed_at = boundary.committed_at or self._published.committed_at
        record = Published(boundary.position, committed_at, tables)
        hit("before_publish")
        if record != self._published:
            self._sink.publish(record)
        self._published = record
        self.quarantine.confirm_published()
        self._progress.record_published(
            record, lag=lag_since(batch.committed_at), rows=batch.count_rows(changed), engine=self.last_engine
        )

    def _next_slice(self, rows: int) -> tuple[Position, RangeSize]:
        """Return end and size of the next batch that this process would apply.

        It has about `rows` rows, or as many as always fit, or one transaction or compacted state.
        """
        small_rows = self._fold.limits.small_rows
        end = self._log.latest_boundary(self.position, max(rows, small_rows))
        size = self._fold.size(self.position, end)
        if not self._fold.limits.fits_here(size):
            end = self._log.latest_boundary(self.position, small_rows)
            size = self._fold.size(self.position, end)
        return end, size

    def _decide(self, end: Position, size: RangeSize, cores: Cores) -> Decision:
        """Return what applies the range of the next slice, which ends at `end`, or all that waits."""
        backlog = size
        if cores.is_cluster and self._fold.choice is EngineChoice.AUTO and self._log.durable not in (None, end):
            backlog = self._fold.size(self.position, self._log.latest_boundary(self.position))
        is_compacted = self.position < self._log.oldest
        return decide(
            Waiting(size, backlog, is_compacted), self._fold.choice, self._fold.limits, cores, self._fold.last_engine
        )

    def _answer(self, cuts: Sequence[PendingCut]) -> list[PendingCut]:
        """Answer the requests for the present position, refuse those for earlier ones, and return the others."""
        for cut in cuts:
            if cut.position < self.position:
                self._cuts.refuse(cut, "passed")
            elif cut.position == self.position:
                handle = self._sink.pin(self._published)
                if not self._cuts.answer(cut, self._published, handle):
                    self._sink.release(handle)
        return [cut for cut in cuts if cut.position > self.position]

    def _can_resume(self, relation: int, controls: ControlEvents) -> bool:
        """Return True if a failed table can continue: a full copy of it ended, or its schema changed after the failure.

        A schema version in state `snapshotting` does not count: the table continues when its full copy ends.
        """
        schema = controls.schema
        copying = schema is not None and schema.state is TableState.SNAPSHOTTING
        changed = schema is not None and schema != self._schemas.get(relation) and not copying
        return self._is_failed(relation) and (controls.generation is not None or changed)

    def _is_left_out(self, relation: int, batch: FoldedBatch) -> bool:
        """Return True for a dropped table that the sink does not have and does not get."""
        controls = batch.controls.get(relation)
        schema = (controls and controls.schema) or self._schemas[relation]
        if relation in self._published.tables or schema.state is not TableState.DROPPED:
            return False
        now = {**self._schemas, **{r: events.schema for r, events in batch.controls.items() if events.schema}}
        return is_left_out(schema, now.values()) or not batch.count_rows([relation])[relation]

    def _is_behind(self, relation: int) -> bool:
        """Return True for a table that still has to be caught up: batches must neither merge into it nor move it on."""
        record = self._published.tables.get(relation)
        return record is not None and record.position < self.position

    def _is_failed(self, relation: int) -> bool:
        record = self._published.tables.get(relation)
        return record is not None and record.state == TargetState.FAILED
