"""Read tasks of a frame: which Spark tasks a range is divided into, and the rows that each task reads.

Changes are divided into groups of neighbouring files. If older changes were trimmed, a frame with the option `history`
begins with the baseline: the state at the horizon as `r` rows.

One run of `compacted` already is the baseline, with one row per key. Several runs have to be folded together. So they
are divided into shares of about SHARE_BYTES: by relation, because files are sorted by it. A larger relation is also
divided by key. Each task of such a relation reads all rows of the relation and keeps only the rows of its own keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from cdc.errors import InvalidDefinition
from cdc.log.disk_format import LogFile
from cdc.log.file_selection import TableSelection, split
from cdc.log.read_plan import HistoryPlan
from cdc.log.reader import LogReader, RowSpan, read_file, row_spans, select_rows, stream_file
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema, matches
from pipelines.compaction.compact_rows import compact_rows
from pipelines.compaction.key_partitions import read_partial_moves
from pipelines.folding.key_parts import part_of_key, parts_of_moved_keys
from pipelines.runtime.worker_process import collect_garbage_rarely_in_task
from pipelines.source.options import PushedFilters, SourceOptions
from pipelines.source.typed_table_frame import TypedTable

BOUNDARY: Final = "b"
"""Operation of the row that ends a batch; the row has the last position of the batch and its commit time."""

LEAST_BYTES: Final = 32 << 20
"""Minimum Parquet bytes of one partition; for fewer bytes, a second task costs more than it saves."""
MOST_BYTES: Final = 64 << 20
"""Maximum Parquet bytes of one partition; a large range is read a twelfth faster in such partitions."""
TASKS: Final = 8
"""Number of Spark tasks that read one range, unless LEAST_BYTES requires fewer tasks or MOST_BYTES requires more."""
SHARE_BYTES: Final = 64 << 20
"""Bytes of `compacted` in one share; the task that folds it needs several times as much memory."""

BATCH_ROWS: Final = 32_768
"""Rows of one Arrow batch for the JVM, which keeps two batches in memory."""

SCHEMA: Final = from_arrow_schema(LOG_SCHEMA)
"""The log row (`cdc.log_row.LOG_SCHEMA`) in Spark's types."""

_ARROW: Final = to_arrow_schema(SCHEMA, timezone="UTC")
_FOR_BASELINE: Final = ("op", "key")
_IMAGES: Final = pa.array(["c", "r", "u"])
_FENCES: Final = pa.array(["t", "g"])


@dataclass
class LogPartition(InputPartition):
    """The input of a Spark task that returns the rows of `files` in (after, upto], and perhaps a boundary row."""

    files: Sequence[LogFile]
    after: Position
    upto: Position
    tables: TableSelection = field(default_factory=TableSelection)
    is_baseline: bool = False
    """Whether the files are a run of `compacted`, whose rows are returned as `r` rows."""
    boundary: tuple[int, int] | None = None
    """Position and commit time (µs UTC) of the boundary row; None: no boundary row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineShare:
    """A share of the baseline, the state at the horizon: all rows of some relations, or some keys of one relation.

    relations: the first and the last relation. The keys of a large relation are divided among `parts` shares; `part` is
    the number of this share.
    """

    files: Sequence[LogFile]
    relations: tuple[int, int]
    part: int = 0
    parts: int = 1


@dataclass
class BaselinePartition(InputPartition):
    """The input of a Spark task that folds one share of the baseline, and returns its rows of the selected tables."""

    share: BaselineShare
    horizon: Position
    tables: TableSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What one Spark frame reads from the log, and its columns. Executors receive a pickled instance."""

    options: SourceOptions
    typed: TypedTable | None = None
    """The table whose columns the frame has; None: the frame has log rows."""

    @classmethod
    def of(cls, options: SourceOptions) -> Self:
        """Create the frame for the options. Raises InvalidDefinition if the log has no such table or no such column."""
        if options.table is not None:
            log = options.open_log()
            typed = TypedTable.find(log, options.table, options.end(log), options.types, options.columns)
            return cls(options=options, typed=typed)
        if unknown := sorted(set(options.columns) - set(LOG_SCHEMA.names)):
            raise InvalidDefinition(f"option 'columns': the log has no column {', '.join(map(repr, unknown))}")
        return cls(options=options)

    @property
    def columns(self) -> StructType:
        """Return the columns of the frame with Spark's types."""
        if self.typed is not None:
            return self.typed.columns
        return StructType([SCHEMA[name] for name in self.options.columns or SCHEMA.names])

    @property
    def tables(self) -> TableSelection:
        """Return the tables whose rows are in the frame."""
        return TableSelection(globs=self.options.tables) if self.typed is None else self.typed.tables

    def read_plan(self, log: LogReader, after: Position, upto: Position) -> HistoryPlan:
        """Return the files that contain the range (after, upto].

        Raises LogTrimmed if the log no longer has these changes.
        """
        if self.options.history:
            return log.history(after, upto)
        return HistoryPlan(changes=log.files(after, upto))

    def later_versions(self, files: Sequence[LogFile], upto: Position) -> list[tuple[ChangePosition, TableSchema]]:
        """Return the later versions of the frame's table that are in `files`, oldest first.

        A version is later if it follows the version that gives the frame its columns. Returns [] for a frame of log
        rows.
        """
        if self.typed is None:
            return []
        found = []
        for file in self.typed.tables.narrowed(file for file in files if file.schemas_only):
            columns = ["position", "ordinal", "payload"]
            rows = read_file(file, self.typed.place.position, upto, columns, self.typed.tables)
            found += [
                (ChangePosition(Position(row["position"]), row["ordinal"]), TableSchema.from_json(row["payload"]))
                for row in rows.to_pylist()
            ]
        return sorted(found, key=itemgetter(0))

    def to_batches(self, rows: pa.Table) -> list[pa.RecordBatch]:
        """Convert log rows with the columns `log_columns` to batches with the columns of the frame."""
        if self.typed is not None:
            shown = self.typed.rows(rows)
        else:
            names = self.options.columns or _ARROW.names
            shown = rows.select(names).cast(pa.schema([_ARROW.field(name) for name in names]))
        found: list[pa.RecordBatch] = shown.to_batches(max_chunksize=BATCH_ROWS)
        return found

    @property
    def log_columns(self) -> list[str]:
        """Return the names of the log's columns that the frame reads."""
        if self.typed is not None:
            return self.typed.log_columns
        return list(self.options.columns or LOG_SCHEMA.names)


def plan_tasks(
    log: LogReader, frame: Frame, after: Position, upto: Position, pushed: PushedFilters | None = None
) -> list[InputPartition]:
    """Return the Spark tasks that read the range (after, upto] of a frame.

    pushed: bounds of pushed filters, which reduce what is read. Raises LogTrimmed if the log no longer has these
    changes. Raises SchemaNotApplicable if a later version of the table does not fit, see TypedTable.check.
    """
    if upto <= after:
        return []
    plan, pushed = frame.read_plan(log, after, upto), pushed or PushedFilters()
    if frame.typed is not None:
        for place, version in frame.later_versions(plan.changes, upto):
            frame.typed.check(version, place)
    tables = pushed.narrowed(frame.tables)
    if tables is None:
        return []
    parts: list[InputPartition] = [*_baseline_tasks(log, plan.baseline, tables)]
    low, high = pushed.within(after, upto)
    changes = [file for file in tables.narrowed(plan.changes) if file.last > low and file.first <= high]
    parts += [LogPartition(files, low, high, tables) for files in group_files(changes)]
    if frame.options.boundaries:
        # only a LogPartition can have the boundary row
        if not parts or not isinstance(parts[-1], LogPartition):
            parts.append(LogPartition((), after, upto))
        last = parts[-1]
        assert isinstance(last, LogPartition)  # noqa: S101 - appended above
        last.boundary = int(upto), log.committed_at(upto)
    return parts


def group_files(files: Iterable[LogFile]) -> list[list[LogFile]]:
    """Divide the files, in their order, into groups. One task reads each group."""
    listed = list(files)
    size = sum(file.size for file in listed) // TASKS
    return split(listed, min(MOST_BYTES, max(LEAST_BYTES, size)))


def read_task(partition: InputPartition, frame: Frame) -> Iterator[pa.RecordBatch]:
    """Return the rows of one task as Arrow batches; runs on an executor."""
    collect_garbage_rarely_in_task()
    if isinstance(partition, BaselinePartition):
        state = fold_share(partition.share, partition.horizon)
        yield from frame.to_batches(select_rows(state, partition.tables).select(frame.log_columns))
    # for a batch frame without partitions Spark asks for the rows of a plain InputPartition(None)
    elif isinstance(partition, LogPartition):
        for rows in _read_rows(partition, frame.log_columns):
            yield from frame.to_batches(rows)
        if partition.boundary is not None:
            yield _boundary_row(*partition.boundary)


def _read_rows(partition: LogPartition, columns: list[str]) -> Iterator[pa.Table]:
    extra = [name for name in _FOR_BASELINE if partition.is_baseline and name not in columns]
    for file in partition.files:
        for rows in stream_file(file, partition.after, partition.upto, [*columns, *extra], partition.tables):
            yield as_read_rows(rows).select(columns) if partition.is_baseline else rows


def _boundary_row(position: int, committed_at: int) -> pa.RecordBatch:
    values = {"position": position, "ordinal": 0, "xid": 0, "op": BOUNDARY, "partial": False}
    row = {name: values.get(name) for name in LOG_SCHEMA.names} | {"committed_at": committed_at}
    return pa.RecordBatch.from_pylist([row], schema=_ARROW)


def _baseline_tasks(log: LogReader, files: Sequence[LogFile], tables: TableSelection) -> list[InputPartition]:
    if not files or log.compacted is None:
        return []
    horizon = log.compacted.horizon
    if len({file.segment for file in files}) == 1:
        groups = group_files(tables.narrowed(files))
        return [LogPartition(group, Position(0), horizon, tables, is_baseline=True) for group in groups]
    relations = _relations(log, tables, horizon)
    # the rows of a table are folded together, whatever names it has had
    spans = [
        span
        for file in files
        for span in row_spans(file)
        if any(span.least <= relation <= span.greatest for relation in relations)
    ]
    shares = divide_baseline(files, spans)
    return [BaselinePartition(share, horizon, tables) for share in shares if _any_within(relations, share.relations)]


def _relations(log: LogReader, tables: TableSelection, upto: Position) -> list[int]:
    """Return the relations of the selected tables. A table is selected by any name that it has had up to `upto`."""
    versions = [version for _, version in log.schema_history(upto)]
    least, greatest = tables.relations or (0, 1 << 62)
    named = {version.relation for version in versions if not tables.globs or matches(version.topic, tables.globs)}
    return sorted(relation for relation in named if least <= relation <= greatest)


def _any_within(relations: Sequence[int], bounds: tuple[int, int]) -> bool:
    return any(bounds[0] <= relation <= bounds[1] for relation in relations)


def divide_baseline(
    files: Sequence[LogFile], spans: Sequence[RowSpan], limit: int = SHARE_BYTES
) -> list[BaselineShare]:
    """Divide the rows of several runs into shares of about `limit` bytes. Each row belongs to one share.

    spans: least and greatest relation and the bytes of each row group in the files.
    """
    shares: list[BaselineShare] = []
    for relations, size in _relation_ranges(spans, limit):
        own = TableSelection(relations=relations).narrowed(files)
        parts = max(1, -(-size // limit)) if relations[0] == relations[1] else 1
        shares += [BaselineShare(files=own, relations=relations, part=part, parts=parts) for part in range(parts)]
    return shares


def fold_share(share: BaselineShare, horizon: Position) -> pa.Table:
    """Return the state of the share's rows at the horizon, with the schema LOG_SCHEMA."""
    tables = TableSelection(relations=share.relations)
    moved_parts: dict[tuple[int, str], int] = {}
    if share.parts > 1:
        moved_parts = parts_of_moved_keys(read_partial_moves(share.files, Position(0), horizon), share.parts)
    found = [
        _rows_of_share(rows, share, moved_parts)
        for file in share.files
        for rows in stream_file(file, Position(0), horizon, LOG_SCHEMA.names, tables)
    ]
    return as_read_rows(compact_rows(pa.concat_tables([LOG_SCHEMA.empty_table(), *found])))


def as_read_rows(rows: pa.Table) -> pa.Table:
    """Convert compacted rows to rows of a snapshot: each key that is not deleted becomes an `r` row.

    Schema rows stay. Tombstones, truncates and ends of full copies are left out. Rows without a key keep their
    operations.
    """
    is_keyed = pc.and_(pc.is_valid(rows["key"]), pc.is_in(rows["op"], _IMAGES))
    is_keyless = pc.and_(pc.is_null(rows["key"]), pc.is_in(rows["op"], pa.array(["c", "d", "r", "u"])))
    stays = pc.or_(pc.or_(is_keyed, is_keyless), pc.equal(rows["op"], Operation.SCHEMA.value))
    op = pc.if_else(is_keyed, Operation.READ.value, rows["op"])
    return rows.set_column(rows.schema.names.index("op"), rows.schema.field("op"), op).filter(stays)


def _relation_ranges(spans: Sequence[RowSpan], limit: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Divide the relations into ranges of about `limit` bytes; yield ((first, last relation), bytes) for each."""
    if not spans:
        return
    least, beyond = (np.array([span[side] for span in spans], np.int64) for side in (0, 1))
    beyond += 1
    # the bytes of a span are distributed evenly over its relations
    density = np.array([span[2] for span in spans]) / (beyond - least)
    points = np.unique(np.concatenate([least, beyond]))
    slopes = np.zeros(len(points))
    np.add.at(slopes, np.searchsorted(points, least), density)
    np.subtract.at(slopes, np.searchsorted(points, beyond), density)
    sizes = np.cumsum(slopes)[:-1] * np.diff(points)
    first, total = int(points[0]), 0.0
    for (start, _), size in zip(pairwise(points.tolist()), sizes.tolist(), strict=True):
        if total and total + size > limit:
            yield (first, start - 1), round(total)
            first, total = start, 0.0
        total += size
    yield (first, int(points[-1]) - 1), round(total)


def _rows_of_share(rows: pa.Table, share: BaselineShare, moved_parts: dict[tuple[int, str], int]) -> pa.Table:
    """Return the rows that belong to a share.

    Truncates and ends of full copies belong to every share of their relation. Every other row, with or without a key,
    belongs to exactly one share.
    """
    if share.parts == 1:
        return rows
    keys = pc.fill_null(pc.binary_join(rows["key"], "\0"), "").to_pylist()
    relation = share.relations[0]
    parts = np.array([moved_parts.get((relation, key), part_of_key(relation, key, share.parts)) for key in keys])
    is_fence = pc.is_in(rows["op"], _FENCES).to_numpy()
    return rows.filter(pa.array((parts == share.part) | is_fence))
