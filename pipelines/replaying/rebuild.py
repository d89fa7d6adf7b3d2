"""Rebuild: fills an empty staged sink from the change log alone, table by table, in limited memory.

- Small tables are folded on the driver, several at a time.
- Spark folds a large table. If the executors can write the target, they do so in one append, or in bulk requests.
- Otherwise Spark sends the folded rows to the driver in parts, and each part is a batch of its own.
- A table with history is applied change by change.

A batch needs an end position, but all rows of a table may be of one transaction. Therefore the parts get the end
positions 1, 2, 3 and so on, which are below every position of a log. The last part gets the real end position.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from cdc.errors import CdcError, Reaction, ValueNotRepresentable
from cdc.failpoint import hit
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import TableState, matches
from cdc.targets.published_record import Published, TableRecord
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.folding.folded_batch import ControlEvents, fold_by_table
from pipelines.folding.history_changes import as_copied_rows
from pipelines.range_folder import RangeFolder
from pipelines.replaying.latest_rows import (
    LatestRowsQuery,
    fold_parts,
    fold_table,
    latest_rows_frame,
    write_latest_files,
)
from pipelines.replaying.table_sizes_in_log import TableContents
from pipelines.runtime.executor_code import worker_error
from pipelines.sinks.contract import ParkingSink, Sink, SparkAwaited, TableBatch
from pipelines.sinks.delta.bulk_load import BulkLoad
from pipelines.sinks.record_after_batch import check_captured, dropped_record, failed_record, with_progress_state
from pipelines.source.data_source import rows_between
from pipelines.table_threads import TableThreads

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LARGE: Final = 200_000
"""Maximum log rows of tables that the driver folds together: this takes a second and 200 MB. Spark folds the others."""
PART: Final = 200_000
"""Log rows of one part that Spark folds and sends to the driver; the fold can only reduce their number."""
PART_BYTES: Final = 32 << 20
"""Log bytes of one part that an executor writes; a worker needs several times as much memory."""
_SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""Exceptions that Spark raises if a task fails: the first for a query, the second for a write."""
_REFUSED: Final = re.compile(r"ValueNotRepresentable: ([^\n]+)")


@dataclass(frozen=True, slots=True)
class LogSource:
    """The log as the source of one sink: the tables of the sink, and which of them have a history."""

    log: LogReader
    sink: str
    """Name of the sink; rows of a backfill can be addressed to it."""
    globs: tuple[str, ...]
    keeps_history: Callable[[str], bool] | None = None
    """Function that says for a topic whether the sink keeps the history of the table; None: no table has a history."""

    def frame(self, spark: SparkSession, after: Position, upto: Position) -> DataFrame:
        """Return the log rows of the sink's tables in (after, upto]."""
        return rows_between(spark, self.log, self.globs, after, upto)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildContext:
    """The Spark session, the report of progress and the limits of a rebuild."""

    spark: Callable[[], SparkSession]
    """Function that returns the Spark session; its first call takes seconds. Small tables need no session."""
    executors_can_write: Callable[[], bool]
    """Function that returns whether executors can write the target; called for a large table."""
    report_table: Callable[[TableContents, float], None] = lambda _table, _seconds: None
    """Called with each built table and its seconds; small tables are built together and share their time."""
    large: int = LARGE
    part: int = PART


@runtime_checkable
class LoadableSink(Sink, Protocol):
    """A sink whose empty targets executors can fill without a fold, and that completes partial images itself."""

    def bulk_load(self) -> BulkLoad:
        """Return what fills the empty targets of the sink, which is open."""


class Rebuild:
    """Builds tables from the log in a sink that is open and empty."""

    def __init__(self, source: LogSource, sink: Sink, context: RebuildContext) -> None:
        self._source, self._sink, self._context = source, sink, context
        self._quarantine = Quarantine(sink)
        self._records: dict[int, TableRecord] = {}
        self._end = 0
        """End position of the last part: the number of parts so far, as the top of this module explains."""

    def __call__(self, tables: Sequence[TableContents], upto: Position) -> Published:
        """Build every table up to `upto` and publish them; a table that cannot be built is published as failed."""
        latest = [table for table in tables if not self._keeps_history(table)]
        with_history = [[table] for table in tables if self._keeps_history(table)]
        for group in [*group_tables(latest, self._context.large), *with_history]:
            began = time.monotonic()
            if group in with_history:
                self._build(group[0], lambda table: self._apply_every_change(table, upto), upto)
            elif sum(table.rows for table in group) <= self._context.large:
                self._build_on_driver(group, upto)
            else:
                self._build(group[0], lambda large: self._build_in_spark(large, upto), upto)
            share = (time.monotonic() - began) / max(1, sum(table.rows for table in group))
            for table in group:
                self._context.report_table(table, share * table.rows)
            hit("replay_after_build")
        built = Published(upto, self._source.log.committed_at(upto), dict(self._records))
        self._sink.publish(built)
        return built

    def _build_on_driver(self, group: Sequence[TableContents], upto: Position) -> None:
        wanted = pa.array([table.relation for table in group])
        log, topics = self._source.log, self._source.globs
        found = [
            rows.filter(pc.is_in(rows["relation"], wanted))
            for rows in log.rows(Position(0), upto, topics=lambda topic: matches(topic, topics))
        ]
        batch = fold_by_table(pa.Table.from_batches(found, LOG_SCHEMA), sink=self._source.sink)
        table_of = {table.relation: table for table in group}

        def build(relation: int) -> None:
            self._build(table_of[relation], lambda own: self._apply_last(own, batch.rows_of(relation), upto), upto)

        with closing(TableThreads(self._sink)) as threads:
            threads.map(build, [*table_of], batch.images.num_rows)

    def _keeps_history(self, table: TableContents) -> bool:
        wanted = self._source.keeps_history
        return wanted is not None and wanted(table.topic)

    def _apply_every_change(self, table: TableContents, upto: Position) -> TableRecord:
        """Apply every change that the log has, for a target that stores every version or every change."""
        source, after = self._source, Position(0)
        trimmed = source.log.compacted if source.log.oldest > 0 else None
        if trimmed is not None and table.schema.key and table.rows > self._context.large:
            # history begins with the state at the horizon, which may not fit into the memory of the driver
            for part in self._folded_parts(self._context.spark(), table, trimmed.horizon):
                self._apply_part(table, as_copied_rows(part))
            after = trimmed.horizon
        fold = RangeFolder(source.log, source.sink, source.globs, source.keeps_history)
        record = self._apply_last(table, None, upto) if after == upto else None
        for batch, end in fold.slices(None, after, upto, table.relation):
            controls = batch.controls.get(table.relation, ControlEvents())
            changes = TableBatch(
                schema=table.schema,
                rows=batch.rows_of(table.relation),
                frame=None,
                after=min(self._end, end),
                upto=end,
                generation=table.generation if end == upto else controls.generation,
                endings=controls.endings,
                since=batch.since,
            )
            record = self._quarantine.apply(record or self._records.get(table.relation), changes)
        assert record is not None  # noqa: S101 - upto is after 0, so there is a batch
        return record

    def _build_in_spark(self, table: TableContents, upto: Position) -> TableRecord:
        spark = self._context.spark()
        parts = -(-table.rows // self._context.part)
        shuffled = spark.conf.get("spark.sql.shuffle.partitions")
        spark.conf.set("spark.sql.shuffle.partitions", str(max(parts, int(shuffled))))
        try:
            if self._executors_write(table, spark):
                try:
                    return self._write_by_executors(spark, table, upto)
                except (*_SPARK_ERRORS, ValueNotRepresentable) as exc:
                    # try again in parts, because only the driver can park refused rows
                    parks = isinstance(self._sink, ParkingSink) and self._sink.parking_limits(table.schema).stop_at
                    if _refused_value(exc) is None or not parks:
                        raise
            for part in self._folded_parts(spark, table, upto):
                self._apply_part(table, part)
            return self._apply_last(table, None, upto)
        finally:
            spark.conf.set("spark.sql.shuffle.partitions", shuffled)

    def _executors_write(self, table: TableContents, spark: SparkSession) -> bool:
        """Return whether executors write the table, and attach the session to the sink if they may.

        A partial image without a base row has to be parked by the driver. A Delta target gets the images and looks for
        the base rows itself. In an object store without a Hadoop file system, executors can write whole images only.
        """
        if not table.schema.key or (table.statistics.partial and not isinstance(self._sink, LoadableSink)):
            return False
        if not self._context.executors_can_write():
            return False
        self._sink.attach(spark)
        if not isinstance(self._sink, LoadableSink) or self._sink.bulk_load().merges_frames:
            return True
        load = self._load(table)
        return load is not None and load.folder(table.schema) is not None

    def _load(self, table: TableContents) -> BulkLoad | None:
        """Return what fills the target with rows that are made from the images alone, without a fold; None: nothing."""
        if not isinstance(self._sink, LoadableSink) or table.statistics.partial:
            return None
        load = self._sink.bulk_load()
        return load if load.takes_images(table.schema) else None

    def _write_by_executors(self, spark: SparkSession, table: TableContents, upto: Position) -> TableRecord:
        load = self._load(table)
        if load is not None:
            shape = load.shape(table.schema)
            wanted = LatestRowsQuery(table, self._source.sink, self._source.globs, int(upto), shape)
            files, whole = self._source.log.files(Position(0), upto), _whole_batch(table, None, None, upto)
            folder = load.folder(table.schema)
            try:
                if folder is None:
                    return load.fill(whole, latest_rows_frame(spark, files, wanted))
                parts = max(-(-table.rows // self._context.part), -(-table.size // PART_BYTES))
                return load.adopt(whole, write_latest_files(spark, files, wanted, folder, parts))
            except _SPARK_ERRORS as exc:
                # a later change may have replaced the value, so the fold decides
                if _refused_value(exc) is None or not load.merges_frames:
                    raise
        return self._sink.apply(_whole_batch(table, None, self._folded(spark, table, upto), upto))

    def _folded(self, spark: SparkSession, table: TableContents, upto: Position) -> DataFrame:
        return fold_table(self._source.frame(spark, Position(0), upto), table, self._source.sink)

    def _folded_parts(self, spark: SparkSession, table: TableContents, upto: Position) -> Iterator[pa.Table]:
        return fold_parts(self._source.frame(spark, Position(0), upto), table, self._source.sink)

    def _apply_part(self, table: TableContents, rows: pa.Table) -> None:
        self._end += 1
        part = TableBatch(schema=table.schema, rows=rows, frame=None, after=self._end - 1, upto=self._end)
        record = self._quarantine.apply(self._records.get(table.relation), part)
        self._sink.publish(Published(self._end, 0, {**self._records, table.relation: record}))
        self._records[table.relation] = record

    def _apply_last(self, table: TableContents, rows: pa.Table | None, upto: Position) -> TableRecord:
        whole = replace(_whole_batch(table, rows, None, upto), after=self._end)
        return self._quarantine.apply(self._records.get(table.relation), whole)

    def _build(self, table: TableContents, build: Callable[[TableContents], TableRecord], upto: Position) -> None:
        try:
            check_captured(table.schema)
            record = with_progress_state(self._attach_and_build(table, build), upto)
            is_dropped = table.schema.state is TableState.DROPPED
            self._records[table.relation] = dropped_record(record, table.schema, upto) if is_dropped else record
        except _SPARK_ERRORS as exc:
            if (error := worker_error(exc)) is not None:
                raise error from exc
            refused = _refused_value(exc)
            if refused is None:
                raise
            self._records[table.relation] = failed_record(None, table.schema, refused)
        except CdcError as exc:
            if exc.reaction is not Reaction.QUARANTINE:
                raise
            self._records[table.relation] = failed_record(None, table.schema, exc)

    def _attach_and_build(self, table: TableContents, build: Callable[[TableContents], TableRecord]) -> TableRecord:
        try:
            return build(table)
        except SparkAwaited:
            self._sink.attach(self._context.spark())
            return build(table)


def group_tables(tables: Sequence[TableContents], large: int) -> list[list[TableContents]]:
    """Divide tables into groups of at most `large` rows together; a larger table is a group of its own."""
    groups: list[list[TableContents]] = []
    rows = 0
    for table in tables:
        if not groups or rows + table.rows > large:
            groups.append([])
            rows = 0
        groups[-1].append(table)
        rows += table.rows
    return groups


def _whole_batch(table: TableContents, rows: pa.Table | None, frame: DataFrame | None, upto: Position) -> TableBatch:
    return TableBatch(schema=table.schema, rows=rows, frame=frame, after=0, upto=int(upto), generation=table.generation)


def _refused_value(exc: Exception) -> ValueNotRepresentable | None:
    """Return the error for a value that a task could not store, if necessary from the text of `exc`.

    Return None for another error.
    """
    if isinstance(exc, ValueNotRepresentable):
        return exc
    found = _REFUSED.search(str(exc))
    return None if found is None else ValueNotRepresentable(found[1])
