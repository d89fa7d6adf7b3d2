"""Table query: one SELECT statement on the tables of a Delta sink, which `cdc query` and the API run.

A query can wait until the sink has published a position. So a program that has written to the source reads its own
rows. All pages of a long result come from one cut if each statement has the same ORDER BY, the next OFFSET, and `at` is
the position of the first page's cut.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cdc.bucket_files import Root
from cdc.config import Definition, DeltaSinkDefinition
from cdc.config.sinks import queried_sinks
from cdc.errors import ConfigError, CutUnavailable, PositionNotReached, UnknownName
from cdc.position import Position
from cdc.targets.awaited_position import POLL, AwaitedPosition
from cdc.targets.cut_retention import format_time
from cdc.targets.json_values import json_value
from cdc.targets.lake_reader import Lake, ReadAt, parse_at
from cdc.targets.lake_with_views import LakeWithViews
from cdc.targets.published_record import Published, TableRecord, TargetState, by_topic


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest:
    """What to select, and from which state of the tables."""

    sql: str
    at: str = ReadAt.PUBLISHED
    """`published`, `latest`, a position, or an ISO 8601 time."""
    limit: int = 1_000
    """Maximum number of rows to return."""
    min_position: str | None = None
    """Wait until the published cut has reached this position; an LSN without an epoch is of the present epoch."""
    timeout: float = 10.0
    """Maximum seconds to wait for the position."""


@dataclass(frozen=True, slots=True)
class QueriedSink:
    """A Delta sink that a statement reads, and what belongs to it."""

    sink: DeltaSinkDefinition
    views: DeltaSinkDefinition | None = None
    """The sink of the views that are next to its tables."""
    log_of_views: Root | None = None

    def lake(self) -> Lake:
        """Return the lake of the sink, without any I/O."""
        if self.views is None or self.log_of_views is None:
            return Lake.of(self.sink)
        return LakeWithViews(self.sink, self.views, self.log_of_views)


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """The rows of a query, with the cut that they come from."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Values as JSON has them; see cdc.targets.json_values."""
    more: bool
    """True if further rows were left out because of the limit."""
    cut: Published | None
    """None if the query read each table at its newest version."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values; `apart` has the state of each table that is not part of the cut."""
        cut = self.cut and {
            "position": str(Position(self.cut.position)),
            "committed_at": format_time(self.cut.committed_at) if self.cut.committed_at else None,
            "apart": {
                topic: table.state for topic, table in by_topic(self.cut.tables.values()).items() if _is_apart(table)
            },
        }
        return {"columns": list(self.columns), "rows": list(self.rows), "more": self.more, "cut": cut}


def _is_apart(table: TableRecord) -> bool:
    """Return True if a table of the source is not in the cut; the source has no dropped table any longer."""
    return table.state not in {TargetState.STREAMING, TargetState.DROPPED}


def find_delta_sink(definition: Definition, name: str | None) -> DeltaSinkDefinition:
    """Return the Delta sink with this name, or the first one; raises UnknownName if there is none."""
    sinks = queried_sinks(definition.sinks)
    found = next((sink for sink in sinks if name in {None, sink.name}), None)
    if found is None:
        wanted = "" if name is None else f" called {name!r}"
        known = ", ".join(repr(sink.name) for sink in sinks)
        raise UnknownName(
            f"pipeline {definition.name!r} has no Delta sink{wanted}",
            remedy=f"choose one of the Delta sinks: {known}" if known else "add a Delta sink to the definition",
        )
    return found


def queried_sink(definition: Definition, name: str | None) -> QueriedSink:
    """Return the Delta sink with this name, or the first one, with its views; raises UnknownName if there is none."""
    sink = find_delta_sink(definition, name)
    views = (other for other in queried_sinks(definition.sinks) if other.views_of == sink.name)
    return QueriedSink(sink, next(views, None), definition.log.of_views)


def query_tables(queried: QueriedSink, request: QueryRequest) -> QueryAnswer:
    """Wait for the position, run the statement, and return its rows.

    Raises PositionNotReached if the sink does not reach the position in time, and the errors of `Lake.query`.
    """
    lake = queried.lake()
    read_at = parse_at(request.at)
    if request.min_position is not None:
        if read_at is not ReadAt.PUBLISHED:
            raise ConfigError(
                f"a query at {request.at!r} cannot wait for a position",
                remedy="leave out either the minimum position or the point in time",
            )
        cut: Published | None = _wait(lake, queried.sink.name, request)
    else:
        cut = None if read_at is ReadAt.LATEST else lake.cut_for(request.sql, read_at)
    reader = lake.query(request.sql, cut or ReadAt.LATEST)
    rows, more = _read_rows(reader, request.limit)
    return QueryAnswer(reader.schema.names, rows, more, cut)


def _wait(lake: Lake, sink: str, request: QueryRequest) -> Published:
    """Return the first published cut that has reached the wanted position."""
    wanted = AwaitedPosition.parse(request.min_position or "")
    deadline = time.monotonic() + request.timeout
    attempts = 0
    while True:
        record = _newest_cut(lake, request.sql)
        if record is not None and wanted.is_reached(record.position):
            return record
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            present = "has no cut yet" if record is None else f"is at {Position(record.position)}"
            raise PositionNotReached(
                f"Delta sink {sink!r} {present}: it did not reach {request.min_position} within {request.timeout:g} s"
            )
        attempts += 1
        time.sleep(min(remaining, POLL.seconds(attempts)))


def _newest_cut(lake: Lake, sql: str) -> Published | None:
    """Return the newest cut that a statement can read; None if there is none yet."""
    try:
        return lake.cut_for(sql)
    except CutUnavailable:
        return None


def _read_rows(reader: pa.RecordBatchReader, limit: int) -> tuple[list[list[Any]], bool]:
    """Return at most `limit` rows, and True if the reader has more rows."""
    rows: list[list[Any]] = []
    for batch in reader:
        columns = [_shortest_reals(column).to_pylist() for column in batch.slice(0, limit + 1 - len(rows)).columns]
        rows.extend([json_value(value) for value in row] for row in zip(*columns, strict=True))
        if len(rows) > limit:
            return rows[:limit], True
    return rows, False


def _shortest_reals(column: pa.Array) -> pa.Array:
    """Return reals as doubles with the same shortest text: 0.1, where the nearest double is 0.10000000149011612."""
    if pa.types.is_float32(column.type):
        return column.cast(pa.string()).cast(pa.float64())
    if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
        return column.cast(pa.list_(pa.string())).cast(pa.list_(pa.float64()))
    return column
