"""What the log contains of every table up to a position: rows, bytes and statistics, read from narrow columns.

These numbers decide how a replay builds a table, and a dry run prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import LogFile
from cdc.log.reader import LogReader, read_file
from cdc.log_row import ROW_OPERATIONS
from cdc.position import Position
from cdc.table import TableSchema, matches
from pipelines.folding.fences_and_statistics import (
    STATISTICS_COLUMNS,
    RangeStatistics,
    addressed_to,
    collect_statistics,
)

_KEYS: Final = ("key", "old_key")
_TRUNCATES_AND_GENERATIONS: Final = pa.array(["t", "g"])
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))


@dataclass(frozen=True, slots=True)
class TableContents:
    """What the log contains of one table up to a position."""

    schema: TableSchema
    """The schema of the table at the position up to which the log was read."""
    rows: int
    """Number of changes of the table, before a fold."""
    size: int
    """Estimated bytes of the table in the files of the log, from its share of the rows of each file."""
    statistics: RangeStatistics

    @property
    def relation(self) -> int:
        """The relation: the log's number of the table."""
        return self.schema.relation

    @property
    def topic(self) -> str:
        """The name `schema.table` that the table has in this schema version."""
        return self.schema.topic

    @property
    def generation(self) -> int | None:
        """The start position of the latest finished full copy of the table; None if no full copy has ended."""
        fence = self.statistics.fences.get(self.relation)
        return None if fence is None or fence.generation < 0 else fence.generation


def read_contents(log: LogReader, upto: Position, *, sink: str, globs: Sequence[str]) -> list[TableContents]:
    """Return the contents of every table that the log has for a sink up to a position, largest table first.

    A change belongs to the sink if the name of its table at the time of the change matches a glob.
    """
    rows: Counter[int] = Counter()
    size: Counter[int] = Counter()
    partial: set[int] = set()
    special: list[pa.Table] = []
    for file in log.files(Position(0), upto):
        found = filter_sink_rows(_narrow(file, upto), sink, globs)
        counted = found.filter(pc.is_in(found["op"], _ROWS))["relation"].value_counts()
        for entry in counted.to_pylist():
            rows[entry["values"]] += entry["counts"]
            size[entry["values"]] += file.size * entry["counts"] // max(1, file.rows)
        # a table without rows is listed as well
        rows.update(dict.fromkeys(found["relation"].drop_null().unique().to_pylist(), 0))
        partial |= set(found.filter(found["partial"])["relation"].unique().to_pylist())
        partial_key_changes = pc.and_(found["partial"], pc.is_valid(found["old_key"]))
        special.append(
            found.filter(pc.or_(partial_key_changes, pc.is_in(found["op"], _TRUNCATES_AND_GENERATIONS))).select(
                STATISTICS_COLUMNS
            )
        )
    statistics = dict(_statistics_by_relation(special, sink))
    schemas = log.schemas(upto)
    listed = [
        TableContents(
            schemas[relation],
            rows[relation],
            size[relation],
            replace(statistics.get(relation, RangeStatistics(links=0)), partial=relation in partial),
        )
        for relation in rows
        if relation in schemas
    ]
    return sorted(listed, key=lambda table: (-table.rows, table.topic))


def _narrow(file: LogFile, upto: Position) -> pa.Table:
    """Read STATISTICS_COLUMNS and `topic` of a file; keys are read only if the file has partial images."""
    names = [name for name in (*STATISTICS_COLUMNS, "topic") if file.partial or name not in _KEYS]
    rows = read_file(file, Position(0), upto, names)
    for name in _KEYS:
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, pa.list_(pa.string())))
    return rows


def filter_sink_rows(rows: pa.Table, sink: str, globs: Sequence[str]) -> pa.Table:
    """Return the rows whose topic matches a glob, without rows that are addressed to another sink."""
    topics = [topic for topic in rows["topic"].unique().to_pylist() if topic is not None and matches(topic, globs)]
    wanted = pc.is_in(rows["topic"], pa.array(topics, pa.string()))
    return rows.filter(pc.and_(addressed_to(rows["address"], sink), wanted))


def _statistics_by_relation(special: Sequence[pa.Table], sink: str) -> Iterator[tuple[int, RangeStatistics]]:
    if not special:
        return
    rows = pa.concat_tables(special)
    for relation in rows["relation"].unique().to_pylist():
        yield relation, collect_statistics([rows.filter(pc.equal(rows["relation"], relation))], sink=sink)
