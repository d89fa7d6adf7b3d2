"""The Spark data source `cdc`: ranges of the change log as frames, batch and streaming.

An offset is `{"position": int}`, the last position that a batch includes; a batch is a range (a, b] of positions,
so admission control never splits a transaction. One that begins below the oldest change also says which version of
`compacted` it is read from, so that it is the same batch after a restart. Planning runs in one long-lived Python
worker beside the driver, which keeps the opened log between triggers; executors read the Parquet files and hand Arrow
to the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from cdc.errors import InvalidDefinition, SchemaNotApplicable
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.runtime.consumer_registration import pinned_in
from pipelines.source.filter_pushdown import PushedFilters
from pipelines.source.frames import SCHEMA, Frame, LogPartition, dealt, planned, read
from pipelines.source.options import LATEST, SourceOptions


class CdcDataSource(DataSource):
    """`spark.read.format("cdc")` and `spark.readStream.format("cdc")`; see pipelines/README.md for its options."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._frame: Frame | None = None

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "cdc"

    def schema(self) -> StructType:
        """The frame's columns; what is wrong with its options is told here, where it is made."""
        return self._made().columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """A range as a batch frame."""
        return LogBatchReader(self._checked(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """The log as a stream."""
        frame = self._checked(schema)
        if frame.selection.ending != LATEST:
            raise InvalidDefinition("a stream has no end: omit the options 'endingPosition' and 'endingTimestamp'")
        return LogStreamReader(frame)

    def _made(self) -> Frame:
        # Spark sends this object on after it has asked for the columns, so a typed frame stays of that version
        if self._frame is None:
            self._frame = Frame.of(SourceOptions.from_options(self.options))
        return self._frame

    def _checked(self, schema: StructType) -> Frame:
        frame = self._made()
        if [(f.name, f.dataType.simpleString()) for f in schema] != [
            (f.name, f.dataType.simpleString()) for f in frame.columns
        ]:
            raise InvalidDefinition("data source 'cdc' accepts no schema: option 'columns' selects columns")
        return frame


def register(session: SparkSession) -> None:
    """Make the format `cdc` known to a session, and let it see the filters of its frames."""
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    session.dataSource.register(CdcDataSource)


def rows_between(
    session: SparkSession, log: LogReader, globs: Sequence[str], after: Position, upto: Position
) -> DataFrame:
    """The rows of the globs' tables in (after, upto], as a batch frame; the log's view says which files hold them.

    It says so now: they stay what the view's owner knows, however the log is compacted and trimmed meanwhile.
    """
    frame = Frame(selection=SourceOptions(path="", tables=tuple(globs)))
    parts = [
        LogPartition(files, after, upto, frame.only) for files in dealt(frame.only.narrowed(log.files(after, upto)))
    ]

    def read_parts(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                yield from read(parts[number], frame)

    return session.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(read_parts, SCHEMA)


class LogBatchReader(DataSourceReader):
    """One range, fixed when the query is planned."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._pushed = PushedFilters()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take from the filters what need not be read; every one of them stays for Spark to apply."""
        self._pushed = PushedFilters.of(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """The range (start, end], dealt into tasks."""
        selection = self._frame.selection
        log = selection.opened()
        return planned(log, self._frame, selection.start(log), selection.end(log), self._pushed)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        return read(partition, self._frame)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planner of one streaming query; Spark calls it about every 20 ms while the query is idle."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._selection = frame.selection
        self._log: LogReader | None = None
        self._target: Position | None = None

    def __getstate__(self) -> dict[str, Any]:
        # executors get a copy, and they never look at the log's table
        return {**self.__dict__, "_log": None}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The option maxRowsPerTrigger."""
        return ReadAllAvailable() if self._selection.max_rows is None else ReadMaxRows(self._selection.max_rows)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins."""
        return _offset(self._selection.start(self._refreshed()))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """What is durable now is where this query ends."""
        self._target = self._refreshed().durable or Position(0)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """The end of the next batch; start itself when there is nothing to do."""
        log, after = self._refreshed(), Position(start["position"])
        pinned = pinned_in(log, after)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        # what is folded ends at the horizon of now: changes behind it could be trimmed before a restart
        upto = log.latest_boundary(after, most if pinned is None else 1)
        if self._target is not None and pinned is None:
            upto = max(after, min(upto, self._target))
        upto = self._until_changed(log, after, upto)
        if upto == after or not (self._selection.boundaries or self._has_files(log, after, upto)):
            # heartbeats move the log's position; a query that sees no boundaries need not wake up for them
            return start
        return _offset(upto) | ({} if pinned is None else {"compacted": pinned})

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """What the log holds, for the query's progress report."""
        durable = self._log.durable if self._log is not None else None
        return None if durable is None else _offset(durable)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """The tasks of one batch: one for a small range."""
        after, upto = Position(start["position"]), Position(end["position"])
        log = self._log
        if log is None or (log.durable or Position(0)) < upto:
            # after a restart Spark plans a batch that an earlier planner announced
            log = self._refreshed()
        pinned = end.get("compacted")
        if pinned is not None and pinned != pinned_in(log, after):
            log = log.as_of(pinned, upto) or log
        return planned(log, self._frame, after, upto)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        return read(partition, self._frame)

    def _until_changed(self, log: LogReader, after: Position, upto: Position) -> Position:
        """Where a batch that would end at upto ends so that all of it fits the frame's columns.

        Raises SchemaNotApplicable once the next change does not fit.
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
        wanted = self._frame.files(log, after, upto)
        return bool(wanted.baseline or wanted.changes)

    def _refreshed(self) -> LogReader:
        if self._log is None:
            self._log = self._selection.opened()
        else:
            self._log.refresh()
        return self._log


def _offset(position: Position) -> dict[str, int]:
    return {"position": int(position)}
