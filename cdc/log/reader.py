"""Reader of the log: returns position ranges as Arrow batches, for the Spark source, `cdc tail` and other programs.

A reader works on one version of `changes` and one of `compacted`, its view. `compacted` replaces the changes that were
trimmed, so the two versions must belong together: oldest ≤ horizon ≤ durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from threading import RLock
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.bucket_files import BucketPath, Root, as_root, storage_errors
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogCorrupt, LogError
from cdc.log import read_plan
from cdc.log.compacted_table import CompactedState, read_compacted_state
from cdc.log.disk_format import CHANGES, COMPACTED, CommitInfo, LogFile, LogIdentity, format_of, trimmed_id
from cdc.log.file_selection import EVERY_ROW, MAX_BYTES, TableSelection
from cdc.log.parquet_check import unreadable_file_error
from cdc.log.table_io import (
    SMALL_FILE,
    can_read_in_threads,
    is_table,
    open_data_file,
    parquet_file,
)
from cdc.log.table_view import LogTableView
from cdc.log_row import LOG_SCHEMA
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema, matches

UPDATE_EVERY: Final = 2.0
"""Maximum seconds between two reads of the `_delta_log` while no new commit file appears."""
PROBE_EVERY: Final = 0.25
"""Minimum seconds between two checks for the next commit in an object store, where each check costs a request."""
REOPEN_COMPACTED_EVERY: Final = 30.0
"""Seconds after which `refresh` opens the table `compacted` again, even if it finds no new commit.

`refresh` usually checks only whether the next commit file exists. In an old view this check can miss new commits,
because log clean-up may have removed that file.
"""
PART_ROWS: Final = 131_072
"""Maximum number of rows of a file in memory at the same time, unless one row group has more."""
_TOGETHER: Final = 2
"""Number of row groups that are decoded at once."""
_PRUNING_LEAVES: Final = tuple(LOG_SCHEMA.names.index(name) for name in ("position", "ordinal", "relation", "topic"))
"""Column numbers whose Parquet statistics exclude row groups.

Parquet numbers leaf columns, but LOG_SCHEMA numbers top-level columns. No nested column precedes these columns, so both
numbers are equal.
"""
_MAX_ATTEMPTS: Final = 10
"""Maximum attempts to read matching versions of both tables.

An attempt fails only if a compaction and a trim happen between the two reads.
"""


_Read = Callable[..., pa.Table]
"""Function that decodes row groups of a file, given their numbers; `use_threads` says whether in several threads."""
_Decoded = Callable[[Sequence[int], _Read], pa.Table]
"""Function that returns the rows of row groups, given their numbers and what decodes them."""


class RowSpan(NamedTuple):
    """Relation numbers and size of one row group, from the footer of the file."""

    least: int
    """Least relation number in the row group."""
    greatest: int
    """Greatest relation number in the row group."""
    size: int
    """Uncompressed size of the row group in bytes."""


def log_exists(root: str | Root) -> bool:
    """Return True if there is a log; it may be empty. Raises an error if the directory or store cannot be read."""
    return is_table(as_root(root) / CHANGES)


class LogReader:
    """A read-only view of one log at the time of the last `refresh`. A writer may run at the same time."""

    def __init__(self, root: str | Root) -> None:
        self._root = as_root(root) / CHANGES
        if not is_table(self._root):
            raise LogError(
                f"there is no change log at {str(root)!r}",
                remedy="correct log.path, or start the reader, which creates a log",
            )
        self._lock = RLock()
        """Protects the view, because two threads of an apply process use the reader of a sink."""
        self._changes = LogTableView(self._root)
        self.log_id = self._changes.id
        self.identity = LogIdentity.from_description(self._changes.description)
        self.format = format_of(self._changes.description)
        self._update_due = self._compacted_due = self._probe_due = 0.0
        self._durable: Position | None = None
        self._oldest = Position(0)
        self._loaded = -1
        """Version of `changes` to which the positions and the compacted state belong."""
        self._compacted: CompactedState | None = None
        self._load_matching_versions()

    @property
    def system_id(self) -> str:
        """System identifier of the source cluster."""
        return self.identity.system_id

    @property
    def version(self) -> int:
        """Version of the Delta table `changes` in this view."""
        return self._changes.version

    @property
    def durable(self) -> Position | None:
        """Durable position in this view: the last position in the log; None before the initial snapshot."""
        return self._durable

    @property
    def oldest(self) -> Position:
        """Position above which the log has every single change; 0 while nothing was trimmed."""
        return self._oldest

    @property
    def compacted(self) -> CompactedState | None:
        """The compacted state, which replaces the trimmed changes; None if nothing was trimmed."""
        return self._compacted

    def pinned_version(self, after: Position) -> int | None:
        """Return the version of `compacted` that a consumer at position `after` reads; None if it needs none."""
        return self._compacted.version if self._compacted is not None and after < self._oldest else None

    @property
    def last_commit(self) -> CommitInfo | None:
        """Metadata of the latest commit of `changes`; None before the initial snapshot."""
        with self._lock:
            return CommitInfo.from_metadata(self._changes.last_commit())

    def refresh(self) -> None:
        """Move this view to the latest commits of the log; the call is almost free if there is no new commit.

        In an object store the call looks for new commits at most every PROBE_EVERY seconds.
        """
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        # One stat shows whether the next commit file exists. Log clean-up may have removed that file if the view is
        # old, so the table itself is updated from time to time.
        now = time.monotonic()
        if now < self._probe_due:
            return
        if isinstance(self._root, BucketPath):
            self._probe_due = now + PROBE_EVERY
        if (
            now < self._update_due
            and not commit_file(self._root, self.version + 1).exists()
            and not self._has_newer_compacted()
        ):
            return
        self._update_due = now + UPDATE_EVERY
        self._changes.advance()
        if self.version != self._loaded or self._compacted is not None:
            self._load_matching_versions()

    def every_file(self) -> list[LogFile]:
        """Return all data files of `changes` in this view."""
        with self._lock:
            return self._changes.files()

    def listing(self) -> pa.Table:
        """Return one row per data file of `changes` in this view, with the columns of delta-rs' list of add actions."""
        with self._lock:
            return self._changes.listing()

    def segments(self) -> list[LogFile]:
        """Return one LogFile per segment of `changes`, with the segment's totals, oldest first.

        This is cheaper than a list of all files.
        """
        rows = self.listing()
        if not rows.num_rows:
            return []
        bounds = [("min.position", "min"), ("max.position", "max"), ("max.committed_at", "max")]
        sums = [("num_records", "sum"), ("size_bytes", "sum")]
        found = rows.group_by("partition.segment").aggregate([*bounds, *sums]).to_pylist()
        return sorted((_segment(self._root, row) for row in found), key=attrgetter("segment"))

    def files(self, after: Position, upto: Position) -> list[LogFile]:
        """Return the files to read for (after, upto], in the order in which they are read.

        Raises LogTrimmed if the log has neither all changes of the range nor the compacted state that replaces them.
        """
        return read_plan.files(self._snapshot(), after, upto)

    def history(self, after: Position, upto: Position) -> read_plan.HistoryPlan:
        """Return the files from which every single change in (after, upto] is read.

        Raises LogTrimmed as `cdc.log.read_plan.history` does.
        """
        return read_plan.history(self._snapshot(), after, upto)

    def latest_boundary(self, after: Position, max_rows: int | None = None, max_bytes: int = MAX_BYTES) -> Position:
        """Return the position at which a batch that starts after `after` should end.

        The batch has about `max_rows` rows and `max_bytes` bytes of files at most. If `max_rows` is None, it ends at
        the durable position. Return `after` itself if there is nothing new. Raises LogTrimmed if no batch can start
        after `after`.
        """
        durable = self.durable
        if durable is None or durable <= after:
            return after
        return read_plan.boundary(self._snapshot(), after, max_rows, max_bytes)

    def leads(self, after: Position, upto: Position) -> bool:
        """Return True if a batch may read the range (after, upto].

        The log must have the changes of the range, or the compacted state that replaces trimmed changes. The result is
        always True if `latest_boundary(after)` of this view returned `upto`, and `upto` is above `after`.
        """
        return read_plan.can_read_range(self._snapshot(), after, upto)

    def as_of(self, version: int, upto: Position) -> Self | None:
        """Return a copy of this view with an older version of `compacted`, to plan ranges that end at `upto`.

        The copy must not be refreshed. Return None if the older version or one of its files was removed. Return None
        also if changes between the older version's horizon and `upto` were trimmed.
        """
        try:
            older = read_compacted_state(self._root.parent, self.log_id, version)
        except LogCorrupt:  # the version was cleaned up
            return None
        if older is None or self._oldest > older.horizon < upto:
            return None
        if not all(as_root(file.path, file.options).exists() for file in older.files):
            return None
        with self._lock:
            view = copy(self)
            view._changes = copy(self._changes)  # noqa: SLF001 - its own copy
        view._compacted, view._oldest = older, min(self._oldest, older.horizon)  # noqa: SLF001 - its own copy
        return view

    def rows(
        self,
        after: Position,
        upto: Position,
        *,
        topics: Callable[[str], bool] | None = None,
        only: TableSelection = EVERY_ROW,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows in (after, upto] as batches with the columns LOG_SCHEMA, file by file.

        `topics` is a function that returns True for each topic to include; messages without a topic are always
        included. `only` selects rows by relation and table name; other files and row groups are not read.
        """
        for file in only.narrowed(self.files(after, upto)):
            for rows in stream_file(file, after, upto, LOG_SCHEMA.names, only):
                selected = rows if topics is None else _of_topics(rows, topics)
                yield from selected.to_batches()

    def schemas(self, upto: Position | None = None) -> dict[int, TableSchema]:
        """Return the schema of each relation at position `upto` (default: the durable position)."""
        limit = upto if upto is not None else self.durable or Position(0)
        found: dict[int, TableSchema] = {}
        for _, schema in self.schema_history(limit):
            found[schema.relation] = schema.following(found.get(schema.relation))
        return found

    def schema_history(self, upto: Position | None = None) -> list[tuple[ChangePosition, TableSchema]]:
        """Return every schema version of every table up to `upto` (default: the durable position), oldest first."""
        limit = upto if upto is not None else self.durable or Position(0)
        found: dict[ChangePosition, TableSchema] = {}
        for file in read_plan.schema_files(self._snapshot(), limit):
            for row in read_file(file, Position(0), limit, ["position", "ordinal", "payload"]).to_pylist():
                place = ChangePosition(Position(row["position"]), row["ordinal"])
                found[place] = TableSchema.from_json(row["payload"])
        return sorted(found.items(), key=itemgetter(0))

    def committed_at(self, position: Position) -> int:
        """Return the commit time of the transaction at a position, in microseconds UTC; 0 if unknown.

        The time is known for the last transaction of each log file, truncated to milliseconds. The time of the last
        transaction of the log is exact. At the horizon the transaction may be compacted; the result is then the latest
        commit time in `compacted`.
        """
        if position == self.durable:
            return 0 if self.last_commit is None else self.last_commit.committed_at
        at_horizon = self._compacted is not None and position == self._compacted.horizon
        files = self._compacted.files if self._compacted is not None and at_horizon else []
        exact = [file for file in self.every_file() if file.last == position]
        return max((file.committed_at for file in exact or files), default=0)

    def _load_matching_versions(self) -> None:
        """Read the positions of `changes` and the state of `compacted`; repeat this until oldest ≤ horizon ≤ durable.

        Raises LogCorrupt if the positions still contradict each other after _MAX_ATTEMPTS attempts.
        """
        for _ in range(_MAX_ATTEMPTS):
            version = self._changes.transaction(self.log_id)
            self._durable = None if version is None else Position(version)
            # changes are in `compacted` before they are trimmed, so `compacted` is read second
            self._oldest = Position(self._changes.transaction(trimmed_id(self.log_id)) or 0)
            if not self._oldest:
                self._loaded = self.version
                return
            if self._compacted is None or self._has_newer_compacted() or time.monotonic() >= self._compacted_due:
                self._compacted = read_compacted_state(self._root.parent, self.log_id)
                self._compacted_due = time.monotonic() + REOPEN_COMPACTED_EVERY
            if self._compacted is not None and self._oldest <= self._compacted.horizon <= (self._durable or 0):
                self._loaded = self.version
                return
            self._compacted_due = 0.0
            self._changes.advance()
        raise LogCorrupt(
            f"changes up to {self._oldest!s} were trimmed, but table {COMPACTED!r} of the log does not contain "
            "their state"
        )

    def _has_newer_compacted(self) -> bool:
        compacted = self._compacted
        return compacted is not None and commit_file(self._root.parent / COMPACTED, compacted.version + 1).exists()

    def _snapshot(self) -> read_plan.LogSnapshot:
        with self._lock:
            compacted = self._compacted
            return read_plan.LogSnapshot(
                changes=self.every_file(),
                durable=self.durable or Position(0),
                oldest=self.oldest,
                compacted=() if compacted is None else compacted.files,
                horizon=Position(0) if compacted is None else compacted.horizon,
                floor=Position(0) if compacted is None else compacted.floor,
            )


def read_file(
    file: LogFile,
    after: Position,
    upto: Position,
    columns: Sequence[str] | None = None,
    only: TableSelection = EVERY_ROW,
) -> pa.Table:
    """Return the rows of one file that have a position in (after, upto] and that `only` selects.

    The result has the given columns of LOG_SCHEMA, or all of them if `columns` is None.
    """
    names = tuple(columns or LOG_SCHEMA.names)
    return _together(list(stream_file(file, after, upto, names, only)), _schema(names))


def stream_file(
    file: LogFile, after: Position, upto: Position, columns: Sequence[str], only: TableSelection = EVERY_ROW
) -> Iterator[pa.Table]:
    """Yield the rows that `read_file` returns, in tables of about PART_ROWS rows.

    Row groups that the statistics exclude are not read.
    """
    return _stream(file, (after, upto), columns, only, _decoded_in_turn)


def _decoded_in_turn(groups: Sequence[int], read: _Read) -> pa.Table:
    """Decode a few row groups at a time.

    For all of them at once, memory grows while they are decoded, and their values are moved again and again: 120,000
    rows of ten columns need half more time.
    """
    return pa.concat_tables([read(groups[start : start + _TOGETHER]) for start in range(0, len(groups), _TOGETHER)])


class RangeReader:
    """Reads one range of the log after the other. One thread uses it.

    A range usually ends inside a row group, and the next one begins with the rest of it: this row group is decoded
    once, and kept in between. No other threads decode, so that the caller can do something else with the other cores,
    and because each thread keeps memory: a delivery to Kafka needed 17 MiB more with them.
    """

    def __init__(self) -> None:
        self._begun: tuple[str, int, pa.Table] | None = None
        """File, number and rows of the row group inside which the last range ended."""

    def read(self, file: LogFile, after: Position, upto: Position, only: TableSelection = EVERY_ROW) -> pa.Table:
        """Return what `read_file` returns, with all columns."""
        parts = list(_stream(file, (after, upto), LOG_SCHEMA.names, only, partial(self._decoded, file.path)))
        if file.last <= upto:
            self._begun = None
        return _together(parts, LOG_SCHEMA)

    def _decoded(self, path: str, groups: Sequence[int], read: _Read) -> pa.Table:
        begun, self._begun = self._begun, None
        parts = [] if begun is None or begun[:2] != (path, groups[0]) else [begun[2]]
        *whole, last = groups
        if whole[len(parts) :]:
            parts.append(read(whole[len(parts) :], use_threads=False))
        if whole or not parts:
            parts.append(read([last], use_threads=False))
        self._begun = path, last, parts[-1]
        return pa.concat_tables(parts)


def _stream(
    file: LogFile, within: tuple[Position, Position], columns: Sequence[str], only: TableSelection, decoded: _Decoded
) -> Iterator[pa.Table]:
    after, upto = max(within[0], file.skip_upto), within[1]
    schema = _schema(tuple(columns))
    is_whole = file.first > after and file.last <= upto
    filters = {
        "position": not is_whole,
        "ordinal": only.ordinals is not None,
        "relation": only.relations is not None,
        "topic": bool(only.globs),
    }
    needed = [*columns, *(name for name, is_used in filters.items() if is_used and name not in columns)]
    try:
        with storage_errors(as_root(file.path, file.options)):
            source = open_data_file(file.path, file.options, file.size)
            parquet = parquet_file(source)
            in_threads = file.size > SMALL_FILE and can_read_in_threads(source)
            read = partial(parquet.read_row_groups, columns=needed, use_threads=in_threads)
            for groups in _groups(parquet.metadata, (after, upto), only):
                rows = decoded(groups, read)
                found = select_rows(rows if is_whole else _between(rows, after, upto), only).select(columns)
                yield found if found.schema.equals(schema, check_metadata=True) else found.cast(schema)
    except (OSError, pa.ArrowException) as exc:
        raise unreadable_file_error(file) from exc


def _together(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    if len(parts) == 1:  # small files are read very often
        return parts[0]
    return pa.concat_tables([schema.empty_table(), *parts])


def _of_topics(rows: pa.Table, topics: Callable[[str], bool]) -> pa.Table:
    """Return the rows whose topic is selected, and those without a topic; if these are all, without a copy."""
    present = rows["topic"].unique().to_pylist()
    selected = [topic for topic in present if topic is None or topics(topic)]
    if len(selected) == len(present):
        return rows
    return rows.filter(pc.is_in(rows["topic"], pa.array(selected, pa.string())))


def _between(rows: pa.Table, after: Position, upto: Position) -> pa.Table:
    """Return the rows that have a position in (after, upto]."""
    positions = rows["position"].to_numpy()
    if (positions[1:] < positions[:-1]).any():  # the rows of several tables
        return rows.filter(pa.array((positions > after) & (positions <= upto)))
    first, end = np.searchsorted(positions, (int(after), int(upto)), side="right").tolist()
    return rows.slice(first, end - first)


@lru_cache
def _schema(columns: tuple[str, ...]) -> pa.Schema:
    return pa.schema([LOG_SCHEMA.field(name) for name in columns])


def row_spans(file: LogFile) -> list[RowSpan]:
    """Return a RowSpan for each row group of a file, except row groups with messages only."""
    try:
        with storage_errors(as_root(file.path, file.options)):
            # without its size, so that only the end of the file is fetched
            metadata = parquet_file(open_data_file(file.path, file.options)).metadata
    except (OSError, pa.ArrowException) as exc:
        raise unreadable_file_error(file) from exc
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    found = [(_bounds(group).get("relation", file.relations), group.total_byte_size) for group in groups]
    return [RowSpan(*relations, size) for relations, size in found if relations is not None]


def _groups(footer: pq.FileMetaData, within: tuple[Position, Position], only: TableSelection) -> Iterator[list[int]]:
    """Yield lists of row group numbers with about PART_ROWS rows each, without row groups that the filters exclude."""
    after, upto = within
    found: list[int] = []
    rows = 0
    for number in range(footer.num_row_groups):
        bounds = _bounds(footer.row_group(number))
        least, greatest = bounds.get("position", (upto, upto))
        if greatest <= after or least > upto or not only.may_be_in(bounds):
            continue
        count = footer.row_group(number).num_rows
        if found and rows + count > PART_ROWS:
            yield found
            found, rows = [], 0
        found.append(number)
        rows += count
    if found:
        yield found


def _bounds(group: pq.RowGroupMetaData) -> dict[str, tuple[Any, Any]]:
    columns = (group.column(place) for place in _PRUNING_LEAVES)
    return {
        column.path_in_schema: (column.statistics.min, column.statistics.max)
        for column in columns
        if column.is_stats_set and column.statistics.has_min_max
    }


def select_rows(rows: pa.Table, only: TableSelection) -> pa.Table:
    """Return the rows that `only` selects; `rows` needs the columns by which `only` selects."""
    for name, wanted in (("relation", only.relations), ("ordinal", only.ordinals)):
        if wanted is not None:
            values = rows[name]
            rows = rows.filter(pc.and_(pc.greater_equal(values, wanted[0]), pc.less_equal(values, wanted[1])))
    if only.globs:
        present = rows["topic"].unique().to_pylist()
        topics = [topic for topic in present if topic and matches(topic, only.globs)]
        if len(topics) < len(present):
            rows = rows.filter(pc.is_in(rows["topic"], pa.array(topics, pa.string())))
    return rows


def _segment(root: Root, row: dict[str, Any]) -> LogFile:
    number, latest = int(row["partition.segment"]), row["max.committed_at_max"]
    return LogFile(
        path=str(root / f"segment={number}"),
        rows=row["num_records_sum"],
        size=row["size_bytes_sum"],
        first=Position(row["min.position_min"]),
        last=Position(row["max.position_max"]),
        segment=number,
        committed_at=0 if latest is None else int(latest.timestamp() * 1_000_000),
    )
