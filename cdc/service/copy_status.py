"""Copying: where each table stands, made from what the reader reports and from the backfills that are about it.

The source's side of a table goes `queued → snapshotting → catching_up → streaming`: waiting for its copy, being copied,
copied while the log's mark is still seen, and captured. A sink that applies a table whose rows are not all in the log
yet is not shown as streaming.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cdc.catalog import TableProgress
from cdc.position import Position
from cdc.snapshot.backfill_progress import BackfillStatus, CopyProgress, is_part
from cdc.table import TableState

SNAPSHOTTING: Final = TableState.SNAPSHOTTING.value


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table in one place; sink is empty for the source's side."""

    sink: str
    topic: str
    state: str
    reason: str | None
    position: str | None
    version: int | None
    rows: int
    """Copied at the source's side, merged in a sink."""
    progress: CopyProgress | None = None
    """Of the copy or backfill that is on its way; at the source's side only."""


def table_statuses(tables: Iterable[TableProgress], backfills: Sequence[BackfillStatus]) -> tuple[TableStatus, ...]:
    """Every table in every place; backfills are newest first."""
    listed = list(tables)
    copied = {table.topic for table in listed if not table.sink and table.state == SNAPSHOTTING}
    return tuple(
        _in_sink(table, copied=table.topic in copied) if table.sink else _at_source(table, backfills)
        for table in listed
    )


def _in_sink(table: TableProgress, *, copied: bool) -> TableStatus:
    state = SNAPSHOTTING if copied and table.state == "streaming" else table.state
    return replace(_table_status(table), state=state)


def _at_source(table: TableProgress, backfills: Sequence[BackfillStatus]) -> TableStatus:
    about = (backfill for backfill in backfills if backfill.pending and backfill.covers(table.topic))
    pending = next(about, None)
    if table.state != SNAPSHOTTING:
        progress = pending.tables.get(table.topic) if pending else None
        # a reader counts from its start; of a copy that it took over it knows a part
        whole = [b.tables[table.topic].rows for b in backfills if _is_full_copy(b) and table.topic in b.tables]
        return replace(_table_status(table), rows=max([table.rows, *whole]), progress=progress)
    copy = pending or next((b for b in backfills if _is_full_copy(b) and b.covers(table.topic)), None)
    if copy is None:
        # a first copy in one go has no backfill, only rows
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
    """Whether it is about all rows of its tables, for every sink."""
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
    """Why a table that is not complete is not being copied, as processes write reasons."""
    if copy.error is not None:
        return f"{copy.error['code']} {copy.error['message']} → {copy.error['suggestion']}"
    return f"backfill {copy.id} that copied it was {copy.state}"


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
