"""Status of each table at the source and in each sink, from the catalog and from the backfills.

At the source a table passes through four states. `queued`: its copy has not begun. `snapshotting`: its rows are copied.
`catching_up`: its copy is done, but the log still marks the table as being copied. `streaming`: its changes are
captured. A sink shows a table as `streaming` after all rows of the table are in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cdc.catalog import TableProgress
from cdc.errors import RESYNC, PreflightFailed
from cdc.position import Position
from cdc.snapshot.backfill_status import BackfillStatus, CopyProgress, is_part
from cdc.table import TableSchema, TableState

SNAPSHOTTING: Final = TableState.SNAPSHOTTING.value
DROPPED: Final = TableState.DROPPED.value
"""State of a table that the source dropped, at the source and in sinks; `cdc tables remove` takes it off the lists."""
_STATES_IN_LOG: Final = {state: state.value for state in TableState} | {
    TableState.LIVE: "streaming",
    TableState.SNAPSHOTTING: "queued",
}
"""State of a table in the log → state to show.

`table_lines` shows the reported state of a table, except in two cases. If the reader has not reported the table, the
state in the log is shown. If the reader reported `streaming`, but the state in the log is another one, the log is newer
than the report, and its state is shown.
"""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """Status of one table, at the source (`sink` is empty) or in one sink."""

    sink: str
    topic: str
    state: str
    reason: str | None
    position: str | None
    version: int | None
    rows: int
    """Number of rows that were copied from the source into the log, or merged into the sink."""
    progress: CopyProgress | None = None
    """Progress of a running copy or backfill of the table; always None for a sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInSink:
    """The status of one table in one sink."""

    sink: str
    state: str
    reason: str | None
    position: str | None
    version: int | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """The status of one table at the source and in all sinks."""

    topic: str
    relation: int | None
    """The log's number of the table; None if the log does not have it."""
    state: str
    """State of the table at the source, as in TableStatus."""
    reason: str | None
    rows: int
    """Number of rows that were copied from the source into the log."""
    progress: CopyProgress | None
    """Progress of a running copy or backfill of the table; None if neither runs."""
    sinks: tuple[TableInSink, ...]


def table_statuses(tables: Iterable[TableProgress], backfills: Sequence[BackfillStatus]) -> tuple[TableStatus, ...]:
    """Return the status of every table at the source and in every sink.

    `backfills` must be sorted, the newest first.
    """
    listed = list(tables)
    copied = {table.topic for table in listed if not table.sink and table.state == SNAPSHOTTING}
    return tuple(
        _in_sink(table, copied=table.topic in copied) if table.sink else _at_source(table, backfills)
        for table in listed
    )


def table_lines(statuses: Iterable[TableStatus], known: Mapping[str, TableSchema]) -> list[TableLine]:
    """Return one line for every table of the log or the catalog, sorted by topic.

    `known` contains the tables of the log, as `tables_by_topic` returns them.
    """
    shown: dict[str, dict[str, TableStatus]] = {topic: {} for topic in known}
    for status in statuses:
        shown.setdefault(status.topic, {})[status.sink] = status
    return [_line(topic, known.get(topic), by_sink) for topic, by_sink in sorted(shown.items())]


def _in_sink(table: TableProgress, *, copied: bool) -> TableStatus:
    state = SNAPSHOTTING if copied and table.state == "streaming" else table.state
    return replace(_table_status(table), state=state)


def _at_source(table: TableProgress, backfills: Sequence[BackfillStatus]) -> TableStatus:
    about = (backfill for backfill in backfills if backfill.pending and backfill.covers(table.topic))
    pending = next(about, None)
    if table.state != SNAPSHOTTING:
        progress = pending.tables.get(table.topic) if pending else None
        # a reader counts rows from its own start, so it misses the rows that an earlier reader copied
        whole = [b.tables[table.topic].rows for b in backfills if _is_full_copy(b) and table.topic in b.tables]
        return replace(_table_status(table), rows=max([table.rows, *whole]), progress=progress)
    copy = pending or next((b for b in backfills if _is_full_copy(b) and b.covers(table.topic)), None)
    if copy is None:
        # a first copy in one transaction has no backfill, so the number of rows shows whether it runs
        return replace(_table_status(table), state=SNAPSHOTTING if table.rows else "queued")
    progress = copy.tables.get(table.topic)
    return replace(
        _table_status(table),
        state=_state(copy, progress),
        reason=table.reason if copy.pending or copy.state == "done" else _failure_reason(copy),
        rows=table.rows if progress is None else max(table.rows, progress.rows),
        progress=progress if copy.pending else None,
    )


def _is_full_copy(backfill: BackfillStatus) -> bool:
    """Return True if the backfill copies all rows of its tables, for every sink."""
    return backfill.request.sink is None and not is_part(backfill.request)


def _state(copy: BackfillStatus, progress: CopyProgress | None) -> str:
    if not copy.pending:
        return "catching_up" if copy.state == "done" else "failed"
    if copy.state == "paused":
        return "paused"
    if progress is None or progress.state == "queued":
        return "queued"
    return "catching_up" if progress.state == "done" else SNAPSHOTTING


def _failure_reason(copy: BackfillStatus) -> str:
    """Return the reason why the copy of a table ended before it was complete."""
    if copy.error is None:
        return f"backfill {copy.id}, which copied the table, ended as {copy.state} → {RESYNC}"
    code, remedy = copy.error["code"], copy.error["suggestion"]
    if code != PreflightFailed.code and "tables resync" not in remedy:  # the reader continues a copy without rights
        remedy = f"{remedy}; then {RESYNC}"
    return f"{code} {copy.error['message']} → {remedy}"


def _table_status(table: TableProgress) -> TableStatus:
    return TableStatus(
        sink=table.sink,
        topic=table.topic,
        state=table.state,
        reason=table.reason,
        position=str(Position(table.position)),
        version=table.version,
        rows=table.rows,
    )


def _line(topic: str, schema: TableSchema | None, by_sink: dict[str, TableStatus]) -> TableLine:
    source = by_sink.get("")
    state, reason = ("streaming", None) if schema is None else (_STATES_IN_LOG[schema.state], schema.reason)
    if source is not None and (state == "streaming" or source.state != "streaming"):
        state, reason = source.state, source.reason
    return TableLine(
        topic=topic,
        relation=None if schema is None else schema.relation,
        state=state,
        reason=reason,
        rows=0 if source is None else source.rows,
        progress=None if source is None else source.progress,
        sinks=tuple(_table_in_sink(table) for sink, table in sorted(by_sink.items()) if sink),
    )


def _table_in_sink(table: TableStatus) -> TableInSink:
    return TableInSink(
        sink=table.sink,
        state=table.state,
        reason=table.reason,
        position=table.position,
        version=table.version,
        rows=table.rows,
    )
