"""Frames: how the rows of one `cdc` frame are planned as tasks, and what a task reads."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Final, Self

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from cdc.change import LOG_SCHEMA
from cdc.errors import InvalidDefinition
from cdc.log.layout import LogFile
from cdc.log.ranges import TableSelection, split
from cdc.log.read_plan import HistoryPlan
from cdc.log.reader import LogReader, read_file, row_spans, select_rows, stream_file
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema, matches
from pipelines.source.filter_pushdown import PushedFilters
from pipelines.source.history_start import BaselineShare, as_read, folded, shares
from pipelines.source.options import SourceOptions
from pipelines.source.typed_changes import TypedTable

BOUNDARY: Final = "b"
"""The operation of the row that ends a batch: it carries the batch's last position and that commit's time."""

LEAST_BYTES: Final = 32 << 20
"""Parquet bytes of one partition: below it a second task costs more than it saves."""
MOST_BYTES: Final = 64 << 20
"""The same of a range that has enough for TASKS: that is a twelfth faster."""
TASKS: Final = 8
"""Partitions that a range has before they become larger."""

BATCH_ROWS: Final = 32_768
"""Rows of one Arrow batch on its way to the JVM, which holds two at a time."""

SCHEMA: Final = from_arrow_schema(LOG_SCHEMA)
"""The log row (`cdc.change.LOG_SCHEMA`) in Spark's types."""

_ARROW: Final = to_arrow_schema(SCHEMA, timezone="UTC")
_FOR_BASELINE: Final = ("op", "key")


@dataclass
class LogPartition(InputPartition):
    """What one task reads: whole files, filtered to (after, upto], and the boundary if it is the last one."""

    files: Sequence[LogFile]
    after: Position
    upto: Position
    only: TableSelection = field(default_factory=TableSelection)
    is_baseline: bool = False
    """The files are a run of `compacted`, and their rows are shown as rows that were read."""
    boundary: tuple[int, int] | None = None
    """Position and commit time, µs UTC, of the boundary row when it is wanted."""


@dataclass
class BaselinePartition(InputPartition):
    """What one task folds: its share of the state at the horizon, and of that the wanted rows."""

    share: BaselineShare
    horizon: Position
    only: TableSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of the log as it was made; pickled to whoever reads it."""

    selection: SourceOptions
    typed: TypedTable | None = None
    """What one table's columns are, where its typed view was asked for."""

    @classmethod
    def of(cls, selection: SourceOptions) -> Self:
        """Raises InvalidDefinition if the log has no such table or column."""
        if selection.table is not None:
            log = selection.opened()
            return cls(
                selection=selection,
                typed=TypedTable.find(log, selection.table, selection.end(log), selection.types, selection.columns),
            )
        if unknown := sorted(set(selection.columns) - set(LOG_SCHEMA.names)):
            raise InvalidDefinition(f"option 'columns': the log has no column {', '.join(map(repr, unknown))}")
        return cls(selection=selection)

    @property
    def columns(self) -> StructType:
        """The frame's columns in Spark's types."""
        if self.typed is not None:
            return self.typed.columns
        return StructType([SCHEMA[name] for name in self.selection.columns or SCHEMA.names])

    @property
    def only(self) -> TableSelection:
        """The rows of a range that are the frame's."""
        return TableSelection(globs=self.selection.tables) if self.typed is None else self.typed.only

    def files(self, log: LogReader, after: Position, upto: Position) -> HistoryPlan:
        """What (after, upto] is read from; raises LogTrimmed if the log does not hold what the frame is of."""
        if self.selection.history:
            return log.history(after, upto)
        return HistoryPlan(changes=log.files(after, upto))

    def later_versions(self, files: Sequence[LogFile], upto: Position) -> list[tuple[ChangePosition, TableSchema]]:
        """Versions of the table in files that came after the frame was made, oldest first; none of other frames."""
        if self.typed is None:
            return []
        found = []
        for file in self.typed.only.narrowed(file for file in files if file.schemas_only):
            rows = read_file(file, self.typed.place.position, upto, ["position", "ordinal", "payload"], self.typed.only)
            found += [
                (ChangePosition(Position(row["position"]), row["ordinal"]), TableSchema.from_json(row["payload"]))
                for row in rows.to_pylist()
            ]
        return sorted(found, key=itemgetter(0))

    def batches(self, rows: pa.Table) -> list[pa.RecordBatch]:
        """Log rows with the needed columns as batches of the frame."""
        if self.typed is not None:
            shown = self.typed.rows(rows)
        else:
            names = self.selection.columns or _ARROW.names
            shown = rows.select(names).cast(pa.schema([_ARROW.field(name) for name in names]))
        found: list[pa.RecordBatch] = shown.to_batches(max_chunksize=BATCH_ROWS)
        return found

    @property
    def needed(self) -> list[str]:
        """Columns of the log that are read."""
        if self.typed is not None:
            return self.typed.needed
        return list(self.selection.columns or LOG_SCHEMA.names)


def planned(
    log: LogReader, frame: Frame, after: Position, upto: Position, pushed: PushedFilters | None = None
) -> list[InputPartition]:
    """The tasks that read (after, upto] for a frame; raises LogTrimmed or SchemaNotApplicable if none can."""
    if upto <= after:
        return []
    wanted, pushed = frame.files(log, after, upto), pushed or PushedFilters()
    if frame.typed is not None:
        for place, version in frame.later_versions(wanted.changes, upto):
            frame.typed.check(version, place)
    only = pushed.narrowed(frame.only)
    if only is None:
        return []
    parts: list[InputPartition] = [*_baseline(log, wanted.baseline, only)]
    low, high = pushed.within(after, upto)
    changes = [file for file in only.narrowed(wanted.changes) if file.last > low and file.first <= high]
    parts += [LogPartition(files, low, high, only) for files in dealt(changes)]
    if frame.selection.boundaries:
        # a part of its own where the others are no parts of files
        if not parts or not isinstance(parts[-1], LogPartition):
            parts.append(LogPartition((), after, upto))
        last = parts[-1]
        assert isinstance(last, LogPartition)  # noqa: S101 - appended above
        last.boundary = int(upto), log.committed_at(upto)
    return parts


def dealt(files: Iterable[LogFile]) -> list[list[LogFile]]:
    """Neighbouring files by task."""
    listed = list(files)
    size = sum(file.size for file in listed) // TASKS
    return split(listed, min(MOST_BYTES, max(LEAST_BYTES, size)))


def read(partition: InputPartition, frame: Frame) -> Iterator[pa.RecordBatch]:
    """The batches of one task; runs on an executor."""
    _keep_what_is_imported()
    if isinstance(partition, BaselinePartition):
        state = folded(partition.share, partition.horizon)
        yield from frame.batches(select_rows(state, partition.only).select(frame.needed))
    # Spark asks a batch frame without partitions for the rows of a plain InputPartition(None)
    elif isinstance(partition, LogPartition):
        for rows in _rows(partition, frame.needed):
            yield from frame.batches(rows)
        if partition.boundary is not None:
            yield _boundary_row(*partition.boundary)


@cache
def _keep_what_is_imported() -> None:
    """Let the collector pass by what is there now, once per process.

    Spark's worker has it look through everything behind each task, modules and all: a quarter of what reading costs.
    """
    gc.freeze()


def _rows(partition: LogPartition, needed: list[str]) -> Iterator[pa.Table]:
    extra = [name for name in _FOR_BASELINE if partition.is_baseline and name not in needed]
    for file in partition.files:
        for rows in stream_file(file, partition.after, partition.upto, [*needed, *extra], partition.only):
            yield as_read(rows).select(needed) if partition.is_baseline else rows


def _baseline(log: LogReader, files: Sequence[LogFile], only: TableSelection) -> list[InputPartition]:
    if not files or log.compacted is None:
        return []
    horizon = log.compacted.horizon
    if len({file.segment for file in files}) == 1:
        groups = dealt(only.narrowed(files))
        return [LogPartition(group, Position(0), horizon, only, is_baseline=True) for group in groups]
    relations = _relations(log, only, horizon)
    # a table has one state, under whatever names its rows came
    of_tables = [
        extent
        for file in files
        for extent in row_spans(file)
        if any(extent.least <= relation <= extent.greatest for relation in relations)
    ]
    found = shares(files, of_tables)
    return [BaselinePartition(share, horizon, only) for share in found if _any_within(relations, share.relations)]


def _relations(log: LogReader, only: TableSelection, upto: Position) -> list[int]:
    """Every relation whose rows may be wanted, by any of the names it has had."""
    versions = [version for _, version in log.schema_history(upto)]
    least, greatest = only.relations or (0, 1 << 62)
    named = {version.relation for version in versions if not only.globs or matches(version.topic, only.globs)}
    return sorted(relation for relation in named if least <= relation <= greatest)


def _any_within(relations: Sequence[int], bounds: tuple[int, int]) -> bool:
    return any(bounds[0] <= relation <= bounds[1] for relation in relations)


def _boundary_row(position: int, committed_at: int) -> pa.RecordBatch:
    said = {"position": position, "ordinal": 0, "xid": 0, "op": BOUNDARY, "partial": False}
    row = {name: said.get(name) for name in LOG_SCHEMA.names} | {"committed_at": committed_at}
    return pa.RecordBatch.from_pylist([row], schema=_ARROW)
