"""Queries over the log for `cdc log inspect` and `cdc tail`: newest rows, a range, one transaction, row counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA
from cdc.log.layout import LogFile
from cdc.log.reader import LogReader, read_file
from cdc.position import Position

OUTLINE: Final = ("position", "ordinal", "xid", "committed_at", "relation", "topic", "op", "key", "old_key", "payload")
"""Columns of a log row without its row images."""
Wanted = Callable[[str], bool]
"""Predicate over topics."""
_ORDER = [("position", "ascending"), ("ordinal", "ascending")]


def newest_rows(log: LogReader, wanted: Wanted, count: int, operations: frozenset[str] = frozenset()) -> pa.Table:
    """At least the last `count` rows of the wanted topics (all if there are fewer), sorted, read from the end.

    Nothing of what was trimmed: there are states of keys there, and no changes. Rows of other operations come along
    and are not counted: the two halves of a key change stay together.
    """
    durable = log.durable or Position(0)
    found: list[pa.Table] = []
    have = 0
    for group in reversed(_groups(log.files(log.oldest, durable))):
        rows = _sorted(group, log.oldest, durable, wanted)
        found.insert(0, rows)
        have += rows.num_rows if not operations else _count(rows, operations)
        if have >= count:
            break
    return pa.concat_tables(found) if found else pa.table({})


def rows_between(log: LogReader, wanted: Wanted, after: Position, upto: Position) -> Iterator[pa.Table]:
    """The rows in (after, upto], sorted, a few files at a time; no transaction is cut in two."""
    for group in _groups(log.files(after, upto)):
        yield _sorted(group, after, upto, wanted)


def position_before_time(log: LogReader, moment: datetime) -> Position:
    """A position at or before the first transaction committed at that time or later; the durable one if none was.

    Never one below the oldest from which single changes can be read.
    """
    durable = log.durable or Position(0)
    micros = int(moment.timestamp() * 1_000_000) // 1000 * 1000  # files keep milliseconds
    firsts = [file.first for file in log.every_file() if file.committed_at >= micros]
    return Position(max(log.oldest, min(firsts) - 1)) if firsts else durable


def transaction(log: LogReader, position: Position) -> pa.Table:
    """The rows of the transaction at a position, in order; empty if there is none."""
    tables = list(rows_between(log, lambda _topic: True, Position(max(0, position - 1)), position))
    return pa.concat_tables(tables) if tables else pa.table({})


def outline(log: LogReader, position: Position, most: int) -> tuple[pa.Table, int]:
    """The first rows of the transaction at a position, so many at most, in order and as OUTLINE; and how many it has.

    Messages belong to no table, and are left out as everywhere here.
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
    """By topic and operation → the number of rows in the whole log; reads two columns of every file."""
    durable = log.durable or Position(0)
    found: dict[str, Counter[str]] = {}
    for file in log.files(Position(0), durable):
        rows = read_file(file, Position(0), durable, ["topic", "op"])
        for group in rows.group_by(["topic", "op"]).aggregate([([], "count_all")]).to_pylist():
            found.setdefault(group["topic"] or "", Counter())[group["op"]] += group["count_all"]
    return {topic: dict(sorted(found[topic].items())) for topic in sorted(found)}


def summarize_segments(files: Sequence[LogFile]) -> list[dict[str, Any]]:
    """What a listing shows per segment: files, rows, bytes, first and last position as text."""
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


def _groups(files: Sequence[LogFile]) -> list[list[LogFile]]:
    """Files in runs whose position ranges touch: a transaction may lie in several files of one commit."""
    groups: list[list[LogFile]] = []
    last = Position(0)
    for file in sorted(files, key=lambda f: (f.first, f.last)):
        if not groups or file.first > last:
            groups.append([])
        groups[-1].append(file)
        last = max(last, file.last)
    return groups


def _sorted(files: Sequence[LogFile], after: Position, upto: Position, wanted: Wanted) -> pa.Table:
    tables = []
    for file in files:
        rows = read_file(file, after, upto)
        topics = [topic for topic in rows["topic"].unique().to_pylist() if topic is not None and wanted(topic)]
        tables.append(rows.filter(pc.is_in(rows["topic"], pa.array(topics, pa.string()))))
    whole = pa.concat_tables(tables)
    return whole.take(pc.sort_indices(whole.select(["position", "ordinal"]), sort_keys=_ORDER))


def _count(rows: pa.Table, operations: frozenset[str]) -> int:
    return int(pc.sum(pc.is_in(rows["op"], pa.array(sorted(operations))), min_count=0).as_py())
