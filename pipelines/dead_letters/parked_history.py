"""Parked keys of a table with history: how a batch changes them. Pure functions on rows of single changes.

A parked key has a queue of all its changes, from the batch with the first refused change on: a later change may build
on it, and a history without it would be wrong. Truncates and generation ends are queued as well. So the target keeps
what it had of the key, and gets the queue as a whole and in order when a retry succeeds for all of it. A new image from
the source does not release the key, because the missing change is one of the past.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import CdcError, MissingBase
from cdc.log_row import Operation
from cdc.position import Position
from cdc.stores.dead_letter_rows import Key, ParkedChange, ParkedRow
from cdc.table import TableSchema
from pipelines.dead_letters.parked_latest_rows import EPOCH, ParkedByKey, has_any_key, micros
from pipelines.folding.every_change import GenerationEnd
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import RefusedRow, TableBatch

_ENDINGS: Final = (Operation.TRUNCATE.value, Operation.GENERATION.value)


def rows_after(rows: pa.Table | None, position: int) -> pa.Table | None:
    """The rows of a batch after a position that an earlier batch has reached."""
    return None if rows is None else rows.filter(pc.greater(rows["position"], position))


def queue_changes_of_parked(parked_rows: ParkedByKey, batch: TableBatch) -> tuple[pa.Table, dict[Key, ParkedRow]]:
    """(the batch's rows of other keys, the parked rows with the batch's changes appended).

    Raises MissingBase for a partial image of a row that moved from or to a parked key: its other columns are unknown.
    """
    rows = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows
    _check_moves(rows, parked_rows, batch.schema)
    mine, changes = has_any_key(parked_rows, rows["key"]), _changes(rows, parked_rows)
    ended = [_to_parked_change(ending) for ending in batch.endings]
    left = {key: _append_changes(row, [*changes.get(key, ()), *ended], batch.upto) for key, row in parked_rows.items()}
    return rows.filter(pc.invert(mine)), left


def replay_queues(queues: Iterable[ParkedRow]) -> tuple[pa.Table, tuple[GenerationEnd, ...]]:
    """(all changes of parked keys, truncates and generation ends in their queues), as fields of a TableBatch."""
    rows: list[dict[str, Any]] = []
    ended = set[GenerationEnd]()
    for queue in queues:
        rows += [_to_folded_row(queue, change) for change in queue.changes if change.op not in _ENDINGS]
        ended |= {
            GenerationEnd(change.position, change.ordinal, change.committed_at, change.began)
            for change in queue.changes
            if change.op in _ENDINGS
        }
    return pa.Table.from_pylist(rows, FOLDED_ARROW), tuple(sorted(ended))


def park_refused_keys(
    batch: TableBatch, rows: pa.Table, refusals: Iterable[RefusedRow], now: int
) -> tuple[pa.Table, dict[Key, ParkedRow]]:
    """(the rows of other keys, the keys of refused rows with all of the batch's changes).

    rows: those of keys that are not parked. now: µs since 1970 UTC. Raises MissingBase as `queue_changes_of_parked`.
    """
    first: dict[Key, tuple[dict[str, Any], RefusedRow]] = {}
    for refusal in refusals:
        row = rows.slice(refusal.row, 1).to_pylist()[0]
        known = first.setdefault(tuple(row["key"]), (row, refusal))
        if (row["position"], row["ordinal"]) < (known[0]["position"], known[0]["ordinal"]):
            first[tuple(row["key"])] = row, refusal
    _check_moves(rows, first, batch.schema)
    changes, ended = _changes(rows, first), [_to_parked_change(ending) for ending in batch.endings]
    parked = {
        key: _append_changes(_to_parked_row(batch, row, refusal, now), [*changes[key], *ended], batch.upto)
        for key, (row, refusal) in first.items()
    }
    return rows.filter(pc.invert(has_any_key(first, rows["key"]))), parked


def without_refused_changes(row: ParkedRow) -> ParkedRow:
    """A parked row without the refused change and all later changes of the key."""
    kept = (change for change in row.changes if change.place < row.place or change.op in _ENDINGS)
    return replace(row, changes=tuple(kept))


def count_refusal(row: ParkedRow, error: CdcError, upto: int) -> ParkedRow:
    """A parked row after a failed retry with a batch that ends at upto."""
    return replace(row, attempts=row.attempts + 1, code=error.code, message=error.message, upto=upto)


def _to_parked_row(batch: TableBatch, row: Mapping[str, Any], refusal: RefusedRow, now: int) -> ParkedRow:
    return ParkedRow(
        relation=batch.schema.relation,
        topic=batch.schema.topic,
        key=tuple(row["key"]),
        position=row["position"],
        ordinal=row["ordinal"],
        committed_at=micros(row["committed_at"]),
        image=dict(row["after"] or ()),
        complete=True,
        code=refusal.error.code,
        message=refusal.error.message,
        first_at=now,
        upto=batch.upto,
    )


def _append_changes(row: ParkedRow, changes: Iterable[ParkedChange], upto: int) -> ParkedRow:
    """The row with changes appended to its queue; the row itself if there are none."""
    added = sorted(changes, key=lambda one: one.place)
    return replace(row, changes=(*row.changes, *added), upto=upto) if added else row


def _check_moves(rows: pa.Table, parked: Container[Key], schema: TableSchema) -> None:
    partial = pc.invert(pc.fill_null(rows["complete"], fill_value=True))
    for row in rows.filter(pc.and_(partial, pc.is_valid(rows["base"]))).to_pylist():
        if tuple(row["key"]) in parked or tuple(row["base"]) in parked:
            raise MissingBase(
                f"table {schema.topic!r}: the partial image at {Position(row['position'])} cannot be completed, "
                "because the key of its row changed from or to the key of a parked row",
                remedy="find the refused column with 'cdc dlq ls', set its type policy to 'text', then run "
                "'cdc replay SINK --tables TABLE'",
            )


def _changes(rows: pa.Table, keys: Mapping[Key, Any]) -> dict[Key, list[ParkedChange]]:
    found: dict[Key, list[ParkedChange]] = {}
    for row in rows.filter(has_any_key(keys, rows["key"])).to_pylist():
        change = ParkedChange(
            op=row["op"],
            position=row["position"],
            ordinal=row["ordinal"],
            committed_at=micros(row["committed_at"]),
            image=dict(row["after"] or ()),
            complete=row["complete"] is not False,
        )
        found.setdefault(tuple(row["key"]), []).append(change)
    return found


def _to_parked_change(ending: GenerationEnd) -> ParkedChange:
    op = Operation.TRUNCATE if ending.began is None else Operation.GENERATION
    return ParkedChange(
        op=op.value,
        position=ending.position,
        ordinal=ending.ordinal,
        committed_at=ending.committed_at,
        began=ending.began,
    )


def _to_folded_row(queue: ParkedRow, change: ParkedChange) -> dict[str, Any]:
    return {
        "relation": queue.relation,
        "op": change.op,
        "key": list(queue.key),
        "position": change.position,
        "ordinal": change.ordinal,
        "committed_at": EPOCH + timedelta(microseconds=change.committed_at),
        "after": list(change.image.items()),
        "complete": change.complete,
    }
