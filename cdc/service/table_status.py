"""Tables of a pipeline, one line each, from the log's schemas and the catalog's statuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc.errors import LogError
from cdc.log.object_path import Root
from cdc.log.reader import LogReader
from cdc.service.copy_status import TableStatus
from cdc.service.status import PipelineStatus
from cdc.snapshot.backfill_progress import CopyProgress
from cdc.table import TableSchema, TableState

_STATES: Final = {state: state.value for state in TableState} | {
    TableState.LIVE: "streaming",
    TableState.SNAPSHOTTING: "queued",
}
"""State for each of the log's table states; the log is newer than a report that says streaming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInSink:
    """One table in one sink."""

    sink: str
    state: str
    reason: str | None
    position: str | None
    version: int | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """One table."""

    topic: str
    relation: int | None
    """The log's number of the table; None if the log does not have it."""
    state: str
    """At the source, as in TableStatus."""
    reason: str | None
    rows: int
    """Rows copied."""
    progress: CopyProgress | None
    """Progress of a running copy."""
    sinks: tuple[TableInSink, ...]


def table_lines(status: PipelineStatus, log: str | Root) -> list[TableLine]:
    """Every table of log or catalog by topic; of a reused name, the present table."""
    known = tables_by_topic(log)
    shown: dict[str, dict[str, TableStatus]] = {topic: {} for topic in known}
    for table in status.tables:
        shown.setdefault(table.topic, {})[table.sink] = table
    return [_line(topic, known.get(topic), places) for topic, places in sorted(shown.items())]


def tables_by_topic(log: str | Root) -> dict[str, TableSchema]:
    """Topic → its table in the log, a dropped one only if no other has the name; empty without a log."""
    try:
        schemas = LogReader(log).schemas().values()
    except LogError:
        return {}  # the first copy has not begun
    ordered = sorted(schemas, key=lambda schema: schema.state is not TableState.DROPPED)
    return {schema.topic: schema for schema in ordered}


def _line(topic: str, schema: TableSchema | None, places: dict[str, TableStatus]) -> TableLine:
    source = places.get("")
    state, reason = ("streaming", None) if schema is None else (_STATES[schema.state], schema.reason)
    if source is not None and (state == "streaming" or source.state != "streaming"):
        state, reason = source.state, source.reason
    return TableLine(
        topic=topic,
        relation=None if schema is None else schema.relation,
        state=state,
        reason=reason,
        rows=0 if source is None else source.rows,
        progress=None if source is None else source.progress,
        sinks=tuple(_in_sink(table) for sink, table in sorted(places.items()) if sink),
    )


def _in_sink(table: TableStatus) -> TableInSink:
    return TableInSink(
        sink=table.sink,
        state=table.state,
        reason=table.reason,
        position=table.position,
        version=table.version,
        rows=table.rows,
    )
