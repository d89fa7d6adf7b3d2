"""Inspection of the log for `cdc log`, `cdc tail` and the page: rows, counts, segments, and the position of a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import LogFile
from cdc.log.reader import LogReader, read_file
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.logical_message import message_prefixes
from cdc.position import Position

OUTLINE: Final = ("position", "ordinal", "xid", "committed_at", "relation", "topic", "op", "key", "old_key", "payload")
"""Columns of a log row without the row images."""
_ORDER = [("position", "ascending"), ("ordinal", "ascending")]
_SEGMENT: Final = "partition.segment"
_BEGAN: Final = "min.committed_at"
_ENDED: Final = "max.committed_at"
_FIRST: Final = "min.position"
_LAST: Final = "max.position"
_MILLISECOND = 1_000
"""Precision of commit times in the statistics of a file, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSummary:
    """Number of files and rows, size, positions and times of one segment of `changes`."""

    segment: int
    files: int
    rows: int
    size: int
    """Total size of the segment's files in bytes."""
    first: Position
    """First position in the segment."""
    last: Position
    """Last position in the segment."""
    began_at: datetime | None
    """Earliest commit time in the segment, truncated to milliseconds; None without statistics."""
    ended_at: datetime | None
    """Latest commit time in the segment, truncated to milliseconds; None without statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """The rows to include: those of some tables, and some logical messages."""

    topics: Callable[[str], bool]
    """Function that returns True for each topic whose rows are included."""
    prefixes: Callable[[str], bool]
    """Function that returns True for each prefix whose messages are included.

    A message of format 1 or 2, whose prefix is unknown, is passed as a message with an empty prefix.
    """

    def filter(self, rows: pa.Table) -> pa.Table:
        """Return the included rows; `rows` has the columns LOG_SCHEMA."""
        topics = [topic for topic in rows["topic"].unique().to_pylist() if topic is not None and self.topics(topic)]
        included = pc.is_in(rows["topic"], pa.array(topics, pa.string()))
        is_message = pc.equal(rows["op"], Operation.MESSAGE.value)
        if pc.any(is_message).as_py():
            found = pc.fill_null(message_prefixes(rows), "")
            prefixes = [prefix for prefix in found.filter(is_message).unique().to_pylist() if self.prefixes(prefix)]
            included = pc.if_else(is_message, pc.is_in(found, pa.array(prefixes, pa.string())), included)
        return rows.filter(included)


EVERY_ROW: Final = RowSelection(topics=lambda _topic: True, prefixes=lambda _prefix: True)
"""Selection of all rows of all tables, and of all messages."""


def rows_of_tables(topics: Callable[[str], bool]) -> RowSelection:
    """Return the selection of the rows of some tables, without messages."""
    return RowSelection(topics=topics, prefixes=lambda _prefix: False)


def newest_rows(
    log: LogReader, selected: RowSelection, count: int, operations: frozenset[str] = frozenset()
) -> pa.Table:
    """Return the last selected rows, sorted by position and ordinal.

    The rows are read from `changes` only. The result has at least `count` rows, or all rows if there are fewer. If
    `operations` is not empty, only rows with one of these operations are counted. Rows with other operations are
    returned too, so that the two rows of a key change stay together.
    """
    durable = log.durable or Position(0)
    found: list[pa.Table] = []
    have = 0
    for group in reversed(_groups(log.files(log.oldest, durable))):
        rows = _sorted(group, log.oldest, durable, selected)
        found.insert(0, rows)
        have += rows.num_rows if not operations else _count(rows, operations)
        if have >= count:
            break
    return pa.concat_tables(found) if found else pa.table({})


def rows_between(log: LogReader, selected: RowSelection, after: Position, upto: Position) -> Iterator[pa.Table]:
    """Yield the selected rows in (after, upto], sorted by position and ordinal.

    Each table has the rows of a few files, and a transaction is never split between two tables.
    """
    for group in _groups(log.files(after, upto)):
        yield _sorted(group, after, upto, selected)


def transaction(log: LogReader, position: Position) -> pa.Table:
    """Return the rows of the transaction at this position, sorted by ordinal; an empty table if there are none.

    A message that is not transactional is the only row at its position.
    """
    tables = list(rows_between(log, EVERY_ROW, Position(max(0, position - 1)), position))
    return pa.concat_tables(tables) if tables else pa.table({})


def outline(log: LogReader, position: Position, most: int) -> tuple[pa.Table, int]:
    """Return the first `most` rows of the transaction at this position, and the total number of its rows.

    The returned rows are sorted by ordinal and have the columns OUTLINE. Messages are neither returned nor counted,
    because they belong to no table.
    """
    tables, count = [pa.schema([LOG_SCHEMA.field(name) for name in OUTLINE]).empty_table()], 0
    after = Position(max(0, position - 1))
    for file in log.files(after, position):
        rows = read_file(file, after, position, OUTLINE)
        rows = rows.filter(pc.is_valid(rows["topic"]))
        count += rows.num_rows
        tables.append(rows.sort_by("ordinal").slice(0, most))
    return pa.concat_tables(tables).sort_by("ordinal").slice(0, most), count


def count_rows(log: LogReader) -> dict[str, dict[str, int]]:
    """Return the number of rows in the whole log: topic → operation → number.

    The function reads two columns of every file.
    """
    durable = log.durable or Position(0)
    found: dict[str, Counter[str]] = {}
    for file in log.files(Position(0), durable):
        rows = read_file(file, Position(0), durable, ["topic", "op"])
        for group in rows.group_by(["topic", "op"]).aggregate([([], "count_all")]).to_pylist():
            found.setdefault(group["topic"] or "", Counter())[group["op"]] += group["count_all"]
    return {topic: dict(sorted(found[topic].items())) for topic in sorted(found)}


def summarize_segments(files: Sequence[LogFile]) -> list[dict[str, Any]]:
    """Return one dict per segment: its number, files, rows, bytes, and its first and last position."""
    shown = []
    for number in sorted({file.segment for file in files}):
        own = [file for file in files if file.segment == number]
        shown.append(
            {
                "segment": number,
                "files": len(own),
                "rows": sum(file.rows for file in own),
                "bytes": sum(file.size for file in own),
                "first": str(min(file.first for file in own)),
                "last": str(max(file.last for file in own)),
            }
        )
    return shown


class SegmentListing:
    """The segments of a log at one moment, from one listing of the log's files."""

    def __init__(self, log: LogReader) -> None:
        self._files = log.listing()

    def segments(self) -> list[SegmentSummary]:
        """Return one summary per segment, oldest first."""
        if not self._files.num_rows:
            return []
        bounds = [(_FIRST, "min"), (_LAST, "max"), (_BEGAN, "min"), (_ENDED, "max")]
        sums = [("num_records", "sum"), ("size_bytes", "sum"), ([], "count_all")]
        rows = self._files.group_by(_SEGMENT).aggregate([*bounds, *sums]).to_pylist()
        found = [
            SegmentSummary(
                segment=int(row[_SEGMENT]),
                files=row["count_all"],
                rows=row["num_records_sum"],
                size=row["size_bytes_sum"],
                first=Position(row[f"{_FIRST}_min"]),
                last=Position(row[f"{_LAST}_max"]),
                began_at=row[f"{_BEGAN}_min"],
                ended_at=row[f"{_ENDED}_max"],
            )
            for row in rows
        ]
        return sorted(found, key=lambda summary: summary.segment)

    def seconds_behind(self, position: Position) -> float | None:
        """Return the seconds by which the last change up to `position` was committed before the log's last change.

        If the log has no change up to `position`, the seconds count from its first change. Return None if the log has
        no changes or no commit times.
        """
        if not self._files.num_rows:
            return None
        passed = self._files.filter(pc.less_equal(self._files[_LAST], int(position)))
        newest = _bound(self._files, _ENDED, "max")
        current = _bound(passed, _ENDED, "max") if passed.num_rows else _bound(self._files, _BEGAN, "min")
        if newest is None or current is None:
            return None
        return float((newest - current).total_seconds())


def position_at_time(files: Iterable[LogFile], durable: Position, moment: int) -> Position:
    """Return the last position before the first transaction that was committed after `moment`.

    `moment` is in microseconds UTC. Return `durable` if no transaction was committed later. Commit times come from the
    source's clock, so they may decrease slightly while positions increase. The function reads only positions and commit
    times, and only of files that can contain such a transaction.
    """
    later = durable + 1
    for file in sorted(files, key=lambda file: file.first):
        if file.first < later and file.committed_at + _MILLISECOND > moment:
            rows = read_file(file, Position(0), durable, ["position", "committed_at"])
            after = pc.greater(rows["committed_at"].cast(pa.int64()), moment)
            first = pc.min(rows.filter(after)["position"]).as_py()
            later = later if first is None else min(later, first)
    return Position(later - 1)


def approximate_position_at(log: LogReader, moment: datetime) -> Position:
    """Return a position before the first transaction that was committed at `moment` or later.

    Return the durable position if there is no such transaction. The result lies just before the first position of a
    file. It may be too early, but it is never below the oldest position.
    """
    durable = log.durable or Position(0)
    micros = int(moment.timestamp() * 1_000_000) // 1000 * 1000  # files keep milliseconds
    firsts = [file.first for file in log.every_file() if file.committed_at >= micros]
    return Position(max(log.oldest, min(firsts) - 1)) if firsts else durable


def _groups(files: Sequence[LogFile]) -> list[list[LogFile]]:
    """Return groups of files with overlapping positions, so that no transaction is in two groups."""
    groups: list[list[LogFile]] = []
    last = Position(0)
    for file in sorted(files, key=lambda f: (f.first, f.last)):
        if not groups or file.first > last:
            groups.append([])
        groups[-1].append(file)
        last = max(last, file.last)
    return groups


def _sorted(files: Sequence[LogFile], after: Position, upto: Position, selected: RowSelection) -> pa.Table:
    whole = pa.concat_tables([selected.filter(read_file(file, after, upto)) for file in files])
    return whole.take(pc.sort_indices(whole.select(["position", "ordinal"]), sort_keys=_ORDER))


def _count(rows: pa.Table, operations: frozenset[str]) -> int:
    return int(pc.sum(pc.is_in(rows["op"], pa.array(sorted(operations))), min_count=0).as_py())


def _bound(files: pa.Table, column: str, which: str) -> datetime | None:
    found: datetime | None = pc.min_max(files[column])[which].as_py()
    return found
