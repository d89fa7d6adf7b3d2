"""The Spark data source `cdc`: ranges of the change log as frames, batch and streaming.

An offset is `{"position": int}`, the last position that a batch includes; a batch is a range (a, b] of positions,
so admission control never splits a transaction. Planning runs in one long-lived Python worker beside the driver,
which keeps the opened log between triggers; executors read the Parquet files and hand Arrow to the JVM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from cdc.change import LOG_SCHEMA
from cdc.errors import InvalidDefinition
from cdc.log.layout import LogFile
from cdc.log.ranges import split
from cdc.log.read import LogReader, read_file
from cdc.position import Position
from cdc.table import matches

BOUNDARY: Final = "b"
"""The operation of the row that ends a batch: it carries the batch's last position and that commit's time."""

SPLIT_BYTES: Final = 32 << 20
"""Parquet bytes of one partition: below it a second task costs more than it saves."""

BATCH_ROWS: Final = 32_768
"""Rows of one Arrow batch on its way to the JVM, which holds two at a time."""

SCHEMA: Final = from_arrow_schema(LOG_SCHEMA)
"""The log row (`cdc.change.LOG_SCHEMA`) in Spark's types."""

_SET: Final = r"\[!?+\]?+[^\]]*\]"
"""Of characters, in a glob; what it holds is meant as it stands."""
_GLOB: Final = re.compile(rf"(?:{_SET}|[^,])+")
_SPECIAL: Final = re.compile(rf"({_SET})|([\[,\s])")

_ARROW: Final = to_arrow_schema(SCHEMA, timezone="UTC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The options of one frame, checked."""

    path: str
    tables: tuple[str, ...] = ()
    """Globs of `schema.table`; everything when empty. Rows without a table, the messages, pass only then."""
    starting: str = "earliest"
    """earliest, latest, or a position: the frame begins after it."""
    ending: str = "latest"
    """latest or a position: the frame ends with it. Batch only."""
    max_rows: int | None = None
    boundaries: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Read Spark's options; raises InvalidDefinition, MalformedLsn or MalformedPosition."""
        if not options.get("path"):
            raise InvalidDefinition("data source 'cdc' needs option 'path': the root of a change log")
        limit = options.get("maxRowsPerTrigger")
        if limit is not None and not (limit.isdigit() and int(limit)):
            raise InvalidDefinition(f"option 'maxRowsPerTrigger': expected a whole number above 0, got {limit!r}")
        boundaries = options.get("boundaries", "false").lower()
        if boundaries not in ("true", "false"):
            raise InvalidDefinition(f"option 'boundaries': expected true or false, got {boundaries!r}")
        selection = cls(
            path=options["path"],
            tables=tuple(glob.strip() for glob in _GLOB.findall(options.get("tables", "")) if glob.strip()),
            starting=options.get("startingPosition", "earliest"),
            ending=options.get("endingPosition", "latest"),
            max_rows=None if limit is None else int(limit),
            boundaries=boundaries == "true",
        )
        # malformed positions are told where the frame is made, not in a worker
        selection.start(lambda: Position(0))
        selection.end(lambda: Position(0))
        return selection

    def start(self, latest: Callable[[], Position]) -> Position:
        """The position that the frame begins after."""
        if self.starting == "earliest":
            return Position(0)
        return latest() if self.starting == "latest" else Position.parse(self.starting)

    def end(self, latest: Callable[[], Position]) -> Position:
        """The last position of a batch frame; never beyond what is durable."""
        return latest() if self.ending == "latest" else min(latest(), Position.parse(self.ending))


@dataclass
class LogPartition(InputPartition):
    """What one task reads: whole files, filtered to (after, upto], and the boundary if it is the last one."""

    files: Sequence[LogFile]
    after: Position
    upto: Position
    boundary: int | None = None
    """Commit time of upto in µs UTC when the boundary row is wanted."""


class CdcDataSource(DataSource):
    """`spark.read.format("cdc")` and `spark.readStream.format("cdc")`; see pipelines/README.md for its options."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "cdc"

    def schema(self) -> StructType:
        """The log row."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark passes what schema() said
        """A range as a batch frame."""
        return LogBatchReader(Selection.from_options(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's name
        """The log as a stream."""
        return LogStreamReader(Selection.from_options(self.options))


def register(session: SparkSession) -> None:
    """Make the format `cdc` known to a session."""
    session.dataSource.register(CdcDataSource)


def rows_between(session: SparkSession, path: str, globs: Sequence[str], after: Position, upto: Position) -> DataFrame:
    """The rows of the globs' tables in (after, upto] of the log under path, as a batch frame."""
    options = {
        "path": path,
        "tables": tables_option(globs),
        "startingPosition": str(after),
        "endingPosition": str(upto),
    }
    return session.read.format("cdc").options(**options).load()


def tables_option(globs: Sequence[str]) -> str:
    """The globs as the option `tables` takes them, whatever characters they hold."""
    return ",".join(_SPECIAL.sub(lambda found: found[1] or f"[{found[2]}]", glob) for glob in globs)


class LogBatchReader(DataSourceReader):
    """One range, fixed when the query is planned."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    def partitions(self) -> Sequence[InputPartition]:
        """The range (startingPosition, endingPosition] in parts of about SPLIT_BYTES."""
        log = LogReader(self._selection.path)
        latest = lambda: log.durable or Position(0)  # noqa: E731 - a name for a call made twice
        after, upto = self._selection.start(latest), self._selection.end(latest)
        return _plan(log, self._selection, after, upto)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        return _read(partition, self._selection)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planner of one streaming query; Spark calls it about every 20 ms while the query is idle."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
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
        return _offset(self._selection.start(lambda: self._refreshed().durable or Position(0)))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """What is durable now is where this query ends."""
        self._target = self._refreshed().durable or Position(0)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """The end of the next batch; start itself when there is nothing to do."""
        log, after = self._refreshed(), Position(start["position"])
        upto = log.latest_boundary(after, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        if self._target is not None:
            upto = max(after, min(upto, self._target))
        if not self._selection.boundaries and not log.files(after, upto):
            # heartbeats move the log's position; a query that sees no boundaries need not wake up for them
            return start
        return _offset(upto)

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
        return _plan(log, self._selection, after, upto)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor."""
        return _read(partition, self._selection)

    def _refreshed(self) -> LogReader:
        if self._log is None:
            self._log = LogReader(self._selection.path)
        else:
            self._log.refresh()
        return self._log


def _offset(position: Position) -> dict[str, int]:
    return {"position": int(position)}


def _plan(log: LogReader, selection: Selection, after: Position, upto: Position) -> list[InputPartition]:
    if upto <= after:
        return []
    parts: list[InputPartition] = [
        LogPartition(files, after, upto) for files in split(log.files(after, upto), SPLIT_BYTES)
    ]
    if selection.boundaries:
        if not parts:
            parts = [LogPartition((), after, upto)]
        last = parts[-1]
        last.boundary = log.committed_at(upto)
    return parts


def _read(partition: InputPartition, selection: Selection) -> Iterator[pa.RecordBatch]:
    # Spark asks a batch frame without partitions for the rows of a plain InputPartition(None)
    if not isinstance(partition, LogPartition):
        return
    for file in partition.files:
        rows = _of_tables(read_file(file, partition.after, partition.upto), selection.tables)
        yield from rows.cast(_ARROW).to_batches(max_chunksize=BATCH_ROWS)
    if partition.boundary is not None:
        yield _boundary_row(partition.upto, partition.boundary)


def _of_tables(rows: pa.Table, globs: tuple[str, ...]) -> pa.Table:
    if not globs:
        return rows
    wanted = [topic for topic in rows["topic"].unique().to_pylist() if topic is not None and matches(topic, globs)]
    return rows.filter(pc.is_in(rows["topic"], pa.array(wanted, pa.string())))


def _boundary_row(position: Position, committed_at: int) -> pa.RecordBatch:
    said = {"position": int(position), "ordinal": 0, "xid": 0, "op": BOUNDARY, "partial": False}
    row = {name: said.get(name) for name in LOG_SCHEMA.names} | {"committed_at": committed_at}
    return pa.RecordBatch.from_pylist([row], schema=_ARROW)
