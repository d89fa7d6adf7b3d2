"""Reader of the log: position ranges as Arrow batches, for the Spark source, `cdc tail` and other programs.

What was trimmed from `changes` is read from `compacted`; the two are looked at together, so that each view is of one
moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.change import LOG_SCHEMA
from cdc.errors import LogCorrupt, LogError
from cdc.log import read_plan
from cdc.log.compacted_state import CompactedState, read_compacted_state
from cdc.log.layout import (
    CHANGES,
    COMPACTED,
    CommitInfo,
    LogFile,
    LogIdentity,
    commit_file,
    format_of,
    log_file_of_action,
    trimmed_id,
)
from cdc.log.object_path import BucketPath, Root, as_root, storage_errors
from cdc.log.parquet_check import unreadable_file_error
from cdc.log.ranges import EVERY_ROW, TableSelection
from cdc.log.storage import can_read_in_threads, is_table, last_commit_info, open_data_file, open_table, parquet_file
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema, matches

LOOK_EVERY: Final = 2.0
"""Seconds between two looks at the table of a log in which nothing seems to happen."""
PROBE_EVERY: Final = 0.25
"""Seconds between two looks for the next commit in an object store, where each is a request that is paid for."""
LOOK_AGAIN: Final = 30.0
"""Seconds after which `compacted` is opened anew although its next commit is not seen: it may be cleaned away."""
REOPEN_AFTER: Final = 64
"""Versions after which the table is opened anew: an opened one keeps every commit it has replayed."""
PART_ROWS: Final = 131_072
"""Rows of a file that are in memory at once, unless one row group has more."""
_BOUNDED: Final = tuple(LOG_SCHEMA.names.index(name) for name in ("position", "relation", "topic"))
"""Leaves of a file's schema whose statistics rule row groups out; no nested column stands before them."""
_LOOKS: Final = 10
"""At one moment of both tables: each further one takes a compaction and a trim in between."""


class RowSpan(NamedTuple):
    """Neighbouring rows of a file."""

    least: int
    """Of their relations."""
    greatest: int
    size: int
    """Bytes, before they were compressed."""


class LogReader:
    """A view of one log as of the last refresh; cheap to refresh, safe beside the writer."""

    def __init__(self, root: str | Root) -> None:
        self._root = as_root(root) / CHANGES
        if not is_table(self._root):
            raise LogError(f"no change log at {str(root)!r}", remedy="check log.path, and that the reader has run once")
        self._table = open_table(self._root)
        self._opened_at = self._table.version()
        metadata = self._table.metadata()
        self.log_id = str(metadata.id)
        self.identity = LogIdentity.from_description(metadata.description)
        self.format = format_of(metadata.description)
        self._look_due = self._compacted_due = self._probe_due = 0.0
        self._files: list[LogFile] | None = None
        self._known: dict[str, LogFile] = {}
        """By path, those that were listed last: of hundreds few are new, and none ever changes."""
        self._durable: Position | None = None
        self._oldest = Position(0)
        self._compacted: CompactedState | None = None
        self._settle()

    @property
    def system_id(self) -> str:
        """Of the source cluster."""
        return self.identity.system_id

    @property
    def version(self) -> int:
        """Delta version of the view of `changes`."""
        return int(self._table.version())

    @property
    def durable(self) -> Position | None:
        """The last position in the log; None before its first snapshot."""
        return self._durable

    @property
    def oldest(self) -> Position:
        """Every change above is there by itself; of what is at or below only the state of each key. 0 at first."""
        return self._oldest

    @property
    def compacted(self) -> CompactedState | None:
        """What the view reads instead of trimmed changes; None while nothing was trimmed."""
        return self._compacted

    @property
    def last_commit(self) -> CommitInfo | None:
        """What the latest commit says of itself; None before the first snapshot."""
        return CommitInfo.from_metadata(last_commit_info(self._root, self._table))

    def refresh(self) -> None:
        """Move the view to what is committed now (PROBE_EVERY ago in an object store); nearly free when nothing is."""
        before = self._table.version()
        # The next commit's file tells at the price of a stat. It can be cleaned away behind a view that stood
        # still for long, so now and then the table itself is asked.
        now = time.monotonic()
        if now < self._probe_due:
            return
        if isinstance(self._root, BucketPath):
            self._probe_due = now + PROBE_EVERY
        if now < self._look_due and not commit_file(self._root, before + 1).exists() and not self._is_compacted_again():
            return
        self._look_due = now + LOOK_EVERY
        self._update()
        if self._table.version() != before:
            self._files = None
        elif self._compacted is None:
            return
        if self._table.version() - self._opened_at >= REOPEN_AFTER:
            self._table = open_table(self._root)
            self._opened_at = self._table.version()
        self._settle()

    def every_file(self) -> list[LogFile]:
        """All data files of `changes` in the view."""
        if self._files is None:
            actions = self.listing()
            paths = actions["path"].to_pylist()
            fresh = [place for place, path in enumerate(paths) if path not in self._known]
            rows = actions.take(pa.array(fresh, pa.int64())).to_pylist()
            known = self._known | {row["path"]: log_file_of_action(self._root, row) for row in rows}
            self._known = {path: known[path] for path in paths}
            self._files = list(self._known.values())
        return self._files

    def listing(self) -> pa.Table:
        """The data files of `changes` in the view, a row each, with the statistics in columns of their own."""
        return pa.table(self._table.get_add_actions(flatten=True))

    def segments(self) -> list[LogFile]:
        """Each segment of `changes` as if it were one file, oldest first; does not list every file."""
        rows = self.listing()
        if not rows.num_rows:
            return []
        bounds = [("min.position", "min"), ("max.position", "max"), ("max.committed_at", "max")]
        sums = [("num_records", "sum"), ("size_bytes", "sum")]
        found = rows.group_by("partition.segment").aggregate([*bounds, *sums]).to_pylist()
        return sorted((_segment(self._root, row) for row in found), key=attrgetter("segment"))

    def files(self, after: Position, upto: Position) -> list[LogFile]:
        """The files to read (after, upto] from, in order.

        Raises LogTrimmed if the log can tell neither every change of the range nor what they come to.
        """
        return read_plan.files(self._view(), after, upto)

    def history(self, after: Position, upto: Position) -> read_plan.HistoryPlan:
        """What every single change of (after, upto] is read from; raises as cdc.log.read_plan.history."""
        return read_plan.history(self._view(), after, upto)

    def latest_boundary(self, after: Position, max_rows: int | None = None) -> Position:
        """Where a batch that starts after `after` should end; `after` itself when there is nothing new.

        Raises LogTrimmed if no batch can start there.
        """
        durable = self.durable
        if durable is None or durable <= after:
            return after
        return read_plan.boundary(self._view(), after, max_rows)

    def leads(self, after: Position, upto: Position) -> bool:
        """Whether a batch that starts after `after` may end at `upto`; see latest_boundary for one that always may."""
        return read_plan.can_read_range(self._view(), after, upto)

    def as_of(self, version: int, upto: Position) -> Self | None:
        """This view with that version of `compacted`, to plan ranges that end at upto; not to be refreshed.

        None where it does not lead there any more: its files, or changes behind its horizon, are gone.
        """
        try:
            held = read_compacted_state(self._root.parent, self.log_id, version)
        except LogCorrupt:  # cleaned away
            return None
        if held is None or self._oldest > held.horizon < upto:
            return None
        if not all(as_root(file.path, file.options).exists() for file in held.files):
            return None
        view = copy(self)
        view._compacted, view._oldest = held, min(self._oldest, held.horizon)  # noqa: SLF001 - its own copy
        return view

    def rows(
        self,
        after: Position,
        upto: Position,
        *,
        topics: Callable[[str], bool] | None = None,
        only: TableSelection = EVERY_ROW,
    ) -> Iterator[pa.RecordBatch]:
        """The rows in (after, upto] as LOG_SCHEMA batches, file by file; messages pass every filter of topics.

        only: what is wanted, of which alone files and row groups are read.
        """
        for file in only.narrowed(self.files(after, upto)):
            for rows in stream_file(file, after, upto, LOG_SCHEMA.names, only):
                if topics is not None:
                    wanted = {t for t in rows["topic"].unique().to_pylist() if t is None or topics(t)}
                    rows = rows.filter(pc.is_in(rows["topic"], pa.array(wanted, pa.string())))  # noqa: PLW2901
                yield from rows.to_batches()

    def schemas(self, upto: Position | None = None) -> dict[int, TableSchema]:
        """Relation → the version of its schema in force at upto (default: now)."""
        limit = upto if upto is not None else self.durable or Position(0)
        return {schema.relation: schema for _, schema in self.schema_history(limit)}

    def schema_history(self, upto: Position | None = None) -> list[tuple[ChangePosition, TableSchema]]:
        """Every version of every table up to a position (default: now), oldest first."""
        limit = upto if upto is not None else self.durable or Position(0)
        found: dict[ChangePosition, TableSchema] = {}
        for file in read_plan.schema_files(self._view(), limit):
            for row in read_file(file, Position(0), limit, ["position", "ordinal", "payload"]).to_pylist():
                place = ChangePosition(Position(row["position"]), row["ordinal"])
                found[place] = TableSchema.from_json(row["payload"])
        return sorted(found.items(), key=itemgetter(0))

    def committed_at(self, position: Position) -> int:
        """Commit time at a position, µs UTC; exact for the last transaction, else cut to ms; 0 if unknown.

        At the horizon, where the last transaction may be folded away, that of the latest row.
        """
        if position == self.durable:
            return 0 if self.last_commit is None else self.last_commit.committed_at
        held = self._compacted is not None and position == self._compacted.horizon
        files = self._compacted.files if self._compacted is not None and held else []
        exact = [file for file in self.every_file() if file.last == position]
        return max((file.committed_at for file in exact or files), default=0)

    def _settle(self) -> None:
        """Let the view be of one moment: oldest ≤ horizon ≤ durable, as every writer keeps it."""
        for _ in range(_LOOKS):
            version = self._table.transaction_version(self.log_id)
            self._durable = None if version is None else Position(version)
            # what was trimmed lies in `compacted` before it goes, so that one is looked at second
            self._oldest = Position(self._table.transaction_version(trimmed_id(self.log_id)) or 0)
            if not self._oldest:
                return
            if self._compacted is None or self._is_compacted_again() or time.monotonic() >= self._compacted_due:
                self._compacted = read_compacted_state(self._root.parent, self.log_id)
                self._compacted_due = time.monotonic() + LOOK_AGAIN
            if self._compacted is not None and self._oldest <= self._compacted.horizon <= (self._durable or 0):
                return
            self._compacted_due = 0.0
            self._update()
            self._files = None
        raise LogCorrupt(f"changes up to {self._oldest!s} were trimmed, and {COMPACTED!r} does not contain their state")

    def _update(self) -> None:
        with storage_errors(self._root):
            self._table.update_incremental()

    def _is_compacted_again(self) -> bool:
        at = self._compacted
        return at is not None and commit_file(self._root.parent / COMPACTED, at.version + 1).exists()

    def _view(self) -> read_plan.LogSnapshot:
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
    """The rows of one file in (after, upto] that are wanted, as LOG_SCHEMA or the named columns of it."""
    names = list(columns or LOG_SCHEMA.names)
    schema = pa.schema([LOG_SCHEMA.field(name) for name in names])
    return pa.concat_tables([schema.empty_table(), *stream_file(file, after, upto, names, only)])


def stream_file(
    file: LogFile, after: Position, upto: Position, columns: Sequence[str], only: TableSelection = EVERY_ROW
) -> Iterator[pa.Table]:
    """The same in parts of about PART_ROWS; row groups whose statistics rule them out are not read."""
    after = max(after, file.beyond)
    schema = pa.schema([LOG_SCHEMA.field(name) for name in columns])
    within = file.first > after and file.last <= upto
    asked = {"position": not within, "relation": only.relations is not None, "topic": bool(only.globs)}
    needed = [*columns, *(name for name, is_asked in asked.items() if is_asked and name not in columns)]
    try:
        with storage_errors(as_root(file.path, file.options)):
            source = open_data_file(file.path, file.options, file.size)
            parquet = parquet_file(source)
            for groups in _groups(parquet.metadata, (after, upto), only):
                rows = parquet.read_row_groups(groups, columns=needed, use_threads=can_read_in_threads(source))
                if not within:
                    place = rows["position"]
                    rows = rows.filter(pc.and_(pc.greater(place, int(after)), pc.less_equal(place, int(upto))))
                yield select_rows(rows, only).select(columns).cast(schema)
    except (OSError, pa.ArrowException) as exc:
        raise unreadable_file_error(file) from exc


def row_spans(file: LogFile) -> list[RowSpan]:
    """The file's row groups; those of messages alone are left out."""
    try:
        with storage_errors(as_root(file.path, file.options)):
            # without its size: what is far from the footer is not fetched
            about = parquet_file(open_data_file(file.path, file.options)).metadata
    except (OSError, pa.ArrowException) as exc:
        raise unreadable_file_error(file) from exc
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    found = [(_bounds(group).get("relation", file.relations), group.total_byte_size) for group in groups]
    return [RowSpan(*relations, size) for relations, size in found if relations is not None]


def _groups(footer: pq.FileMetaData, within: tuple[Position, Position], only: TableSelection) -> Iterator[list[int]]:
    """The row groups that may have wanted rows, as many at a time as have PART_ROWS."""
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
    columns = (group.column(place) for place in _BOUNDED)
    return {
        column.path_in_schema: (column.statistics.min, column.statistics.max)
        for column in columns
        if column.is_stats_set and column.statistics.has_min_max
    }


def select_rows(rows: pa.Table, only: TableSelection) -> pa.Table:
    """The rows that are wanted; `relation` and `topic` are looked at where they are asked for."""
    if only.relations is not None:
        least, greatest = only.relations
        relation = rows["relation"]
        rows = rows.filter(pc.and_(pc.greater_equal(relation, least), pc.less_equal(relation, greatest)))
    if only.globs:
        topics = [topic for topic in rows["topic"].unique().to_pylist() if topic and matches(topic, only.globs)]
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
