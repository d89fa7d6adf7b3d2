"""The Spark data source `cdc`: ranges of the change log as frames, batch and streaming.

An offset is `{"position": int}`, the last position that a batch includes. A batch is a range (a, b] of positions, so
admission control never splits a transaction. If a batch begins before the oldest position of the log, its offset also
names the version of `compacted` that it reads. So the batch is the same after a restart. Spark plans batches in one
Python worker process, which keeps the log open between triggers. Executors read the Parquet files and send Arrow to the
JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from cdc.errors import InvalidDefinition, SchemaNotApplicable
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.source.options import LATEST, PushedFilters, SourceOptions
from pipelines.source.read_tasks import SCHEMA, Frame, LogPartition, group_files, plan_tasks, read_task

REST_SHARE: Final = 4
"""Divisor of `maxRowsPerTrigger`: the last rows that wait, up to this share, are added to the batch before them.

A batch has a fixed cost of seconds, so a small one after a large one would cost many times as much per row.
"""


class CdcDataSource(DataSource):
    """The data source behind `spark.read.format("cdc")` and `spark.readStream.format("cdc")`.

    pipelines/README.md describes its options.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._frame: Frame | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format, `cdc`."""
        return "cdc"

    def schema(self) -> StructType:
        """Return the columns of the frame.

        Spark calls this method first, so it raises the errors of invalid options.
        """
        return self._get_frame().columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        return LogBatchReader(self._checked(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a streaming query; raises InvalidDefinition if the options set an end."""
        frame = self._checked(schema)
        if frame.options.ending != LATEST:
            raise InvalidDefinition("a stream has no end: omit the options 'endingPosition' and 'endingTimestamp'")
        return LogStreamReader(frame)

    def _get_frame(self) -> Frame:
        # Spark pickles this object after it has called schema(), so the readers use the same table version
        if self._frame is None:
            self._frame = Frame.of(SourceOptions.from_options(self.options))
        return self._frame

    def _checked(self, schema: StructType) -> Frame:
        frame = self._get_frame()
        if [(f.name, f.dataType.simpleString()) for f in schema] != [
            (f.name, f.dataType.simpleString()) for f in frame.columns
        ]:
            raise InvalidDefinition(
                "data source 'cdc' accepts no schema: omit it, and select columns with option 'columns'"
            )
        return frame


def register(session: SparkSession) -> None:
    """Register the format `cdc` in a session and enable the pushdown of filters."""
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    session.dataSource.register(CdcDataSource)


def rows_between(
    session: SparkSession, log: LogReader, globs: Sequence[str], after: Position, upto: Position
) -> DataFrame:
    """Return a batch frame with the rows in (after, upto] of the tables that match the globs.

    The frame's files are chosen in this call, from the commit of the log that `log` has read. So a later compaction or
    trim does not change the frame.
    """
    frame = Frame(options=SourceOptions(path="", tables=tuple(globs)))
    files = frame.tables.narrowed(log.files(after, upto))
    parts = [LogPartition(group, after, upto, frame.tables) for group in group_files(files)]

    def read_parts(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                yield from read_task(parts[number], frame)

    return session.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(read_parts, SCHEMA)


class LogBatchReader(DataSourceReader):
    """Reads one range of the log as a batch frame; Spark fixes the range when it plans the query."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._pushed = PushedFilters()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Remember the filters, so that fewer rows are read. Return all of them, so that Spark applies them as well."""
        self._pushed = PushedFilters.of(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return the Spark tasks that read the range of the frame."""
        options = self._frame.options
        log = options.open_log()
        return plan_tasks(log, self._frame, options.start(log), options.end(log), self._pushed)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task; runs on an executor."""
        return read_task(partition, self._frame)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planner of one streaming query; Spark calls `latestOffset` every 20 ms while the query is idle."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._options = frame.options
        self._log: LogReader | None = None
        self._target: Position | None = None

    def __getstate__(self) -> dict[str, Any]:
        # the executors get a copy and do not need the log
        return {**self.__dict__, "_log": None}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of a batch, from the option `maxRowsPerTrigger`."""
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the offset after which a query without a checkpoint begins."""
        return _offset(self._options.start(self._refreshed()))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Set the end of the query to the log's present durable position."""
        self._target = self._refreshed().durable or Position(0)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the end offset of the next batch. The result is `start` if there is nothing to read."""
        log, after = self._refreshed(), Position(start["position"])
        pinned = log.pinned_version(after)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        # a batch with compacted rows ends at the horizon: later changes could be trimmed before a restart
        upto = log.latest_boundary(after, most if pinned is None else 1, self._options.max_bytes)
        if pinned is None and most is not None and after < upto != log.durable:
            upto = self._with_rest(log, after, upto, most)
        if self._target is not None and pinned is None:
            upto = max(after, min(upto, self._target))
        upto = self._end_before_misfit(log, after, upto)
        if upto == after or not (self._options.boundaries or self._has_files(log, after, upto)):
            # heartbeats move the log's position; a query without boundaries does not need a batch for them
            return start
        return _offset(upto) | ({} if pinned is None else {"compacted": pinned})

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """Return the durable position of the log, which Spark shows in its progress report; None if it is unknown."""
        durable = self._log.durable if self._log is not None else None
        return None if durable is None else _offset(durable)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return the Spark tasks of one batch. A small batch has a single task."""
        after, upto = Position(start["position"]), Position(end["position"])
        log = self._log
        if log is None or (log.durable or Position(0)) < upto:
            # after a restart Spark plans a batch whose end an earlier process has returned
            log = self._refreshed()
        pinned = end.get("compacted")
        if pinned is not None and pinned != log.pinned_version(after):
            log = log.as_of(pinned, upto) or log
        return plan_tasks(log, self._frame, after, upto)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task; runs on an executor."""
        return read_task(partition, self._frame)

    def _with_rest(self, log: LogReader, after: Position, upto: Position, most: int) -> Position:
        """Return the durable position instead of `upto`, if few enough rows wait after `upto`."""
        end = log.latest_boundary(after, most + most // REST_SHARE, self._options.max_bytes)
        return end if end == log.durable else upto

    def _end_before_misfit(self, log: LogReader, after: Position, upto: Position) -> Position:
        """Return `upto`, or an earlier end if a later table version does not fit the columns of the frame.

        The earlier end is the last position before that table version begins. Raises SchemaNotApplicable if the
        frame has nothing to read between `after` and the earlier end.
        """
        if self._frame.typed is None or upto <= after:
            return upto
        for place, version in self._frame.later_versions(log.files(after, upto), upto):
            try:
                self._frame.typed.check(version, place)
            except SchemaNotApplicable:
                last = Position(place.position - 1)
                if last <= after or not self._has_files(log, after, last):
                    raise
                return last
        return upto

    def _has_files(self, log: LogReader, after: Position, upto: Position) -> bool:
        plan = self._frame.read_plan(log, after, upto)
        return bool(plan.baseline or plan.changes)

    def _refreshed(self) -> LogReader:
        if self._log is None:
            self._log = self._options.open_log()
        else:
            self._log.refresh()
        return self._log


def _offset(position: Position) -> dict[str, int]:
    return {"position": int(position)}
