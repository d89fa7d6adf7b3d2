"""Parked keys: computes how a batch changes the parked rows of a table. The functions only convert rows, without I/O.

If the target keeps the latest state, a parked key has one row. A later partial image of the key is overlaid on that
row. A later full image or delete replaces the parked row, and the target gets it like any other row. A truncate or the
end of a full copy removes parked rows that are older. A row that is incomplete is not retried, because its unsent
columns are unknown. It stays parked until a backfill reads the whole row from the source.

If the target keeps history, a parked key has a queue of all its changes since the batch with the first refused change.
A later change may build on the refused one, and a history without the refused change would be wrong. Truncates and ends
of full copies are queued as well. So the target keeps the rows of the key from before the refused change. It gets the
whole queue in order, once a retry succeeds for all changes in the queue. A new full image does not unpark the key,
because the refused change would still be missing in the history.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import CdcError, MissingBase
from cdc.log_row import Operation
from cdc.position import Position
from cdc.table import TableSchema
from cdc.targets.dead_letter_rows import DeadLetterEntry, Key, ParkedChange, ParkedRow
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.history_changes import GenerationEnd
from pipelines.sinks.contract import RefusedRow, TableBatch

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PARTS: Final = "\0"
"""Separator between the column values of a key that is joined to one text; Postgres text never contains it."""

_LOG_ORDER: Final = [("position", "ascending"), ("ordinal", "ascending")]

ParkedByKey = Mapping[Key, ParkedRow]


@dataclass(frozen=True, slots=True)
class OfferedRows:
    """The result of `overlay_parked`: the folded rows for the target, and the rows that stay parked."""

    rows: pa.Table
    """Rows of the batch, with partial images completed from parked rows, and parked rows to retry (FOLDED_ARROW)."""
    waiting: dict[Key, ParkedRow]
    """Rows that stay parked and are not merged into the target."""


def affects_parked(parked_rows: ParkedByKey, batch: TableBatch) -> bool:
    """Return whether a batch may change or remove parked rows of its table.

    That is the case if it changes a parked key, or if it contains a truncate or the end of a full copy.
    """
    if not parked_rows:
        return False
    if batch.truncated is not None or batch.generation is not None or batch.endings:
        return True
    return batch.rows is not None and bool(pc.any(_affects(parked_rows, batch.rows)).as_py())


def overlay_parked(parked_rows: ParkedByKey, batch: TableBatch, again: Collection[Key]) -> OfferedRows:
    """Overlay the partial images of a batch on the parked rows of its table.

    Returns the rows to merge and the rows that stay parked. again: parked keys to retry. The parked rows of other keys
    are retried only if the batch changes them.
    """
    rows = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows
    parked_rows = {
        key: row for key, row in parked_rows.items() if batch.truncated is None or row.place > batch.truncated
    }
    affected = _affects(parked_rows, rows)
    later = {tuple(row["key"]): _overlay_row(parked_rows, row) for row in rows.filter(affected).to_pylist()}
    waiting = {
        key: row for key, row in parked_rows.items() if key not in later and not _is_removed(row, batch.generation)
    }
    tried = [row for row in later.values() if not isinstance(row, ParkedRow)]
    tried += [_to_folded_row(waiting.pop(key)) for key in again if key in waiting and waiting[key].complete]
    waiting |= {key: replace(row, upto=batch.upto) for key, row in later.items() if isinstance(row, ParkedRow)}
    offered = pa.concat_tables([rows.filter(pc.invert(affected)), pa.Table.from_pylist(tried, FOLDED_ARROW)])
    return OfferedRows(offered, waiting)


def park_refused(
    batch: TableBatch, refusals: Iterable[RefusedRow], parked_rows: ParkedByKey, now: int
) -> dict[Key, ParkedRow]:
    """Return key → parked row for the refused rows of a batch; refused deletes are not parked.

    parked_rows: the rows that were parked before the batch. now: µs since 1970 UTC.
    """
    parked: dict[Key, ParkedRow] = {}
    for refusal in refusals:
        assert batch.rows is not None  # noqa: S101 - a refused row implies rows
        row = batch.rows.slice(refusal.row, 1).to_pylist()[0]
        if row["op"] == "d":
            continue
        key = tuple(row["key"])
        before = parked_rows.get(key)
        parked[key] = ParkedRow(
            relation=batch.schema.relation,
            topic=batch.schema.topic,
            key=key,
            position=row["position"],
            ordinal=row["ordinal"],
            committed_at=micros(row["committed_at"]),
            image=dict(row["after"] or ()),
            complete=row["complete"] is not False,
            code=refusal.error.code,
            message=refusal.error.message,
            attempts=1 if before is None else before.attempts + 1,
            first_at=now if before is None else before.first_at,
            upto=batch.upto,
        )
    return parked


def changed_entries(before: ParkedByKey, after: ParkedByKey, upto: int) -> list[DeadLetterEntry]:
    """Return the dead-letter entries that record how a batch changed the parked rows.

    A row that is new or different in `after` gets an entry that parks it. A key that only `before` contains gets an
    entry that unparks it. upto: end of the batch.
    """
    parked = [DeadLetterEntry(row) for key, row in after.items() if before.get(key) != row]
    return parked + [DeadLetterEntry(replace(row, upto=upto), False) for key, row in before.items() if key not in after]


def has_any_key(keys: Iterable[Key], column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return one bool per entry of a key column: whether the entry is one of the keys; false for null."""
    return pc.is_in(pc.binary_join(column, _PARTS), _joined(keys))


def _joined(keys: Iterable[Key]) -> pa.Array:
    return pa.array([_PARTS.join(key) for key in keys], pa.string())


def count_parked_keys(rows: pa.Table | None, parked_rows: ParkedByKey) -> tuple[int, int]:
    """Return (number of the batch's keys that are parked, number of the batch's keys)."""
    if rows is None or not rows.num_rows:
        return 0, 0
    keys = pc.unique(pc.binary_join(rows["key"], _PARTS))
    return pc.sum(pc.is_in(keys, _joined(parked_rows))).as_py(), len(keys)


def _affects(parked_rows: ParkedByKey, rows: pa.Table) -> pa.ChunkedArray:
    return pc.or_(has_any_key(parked_rows, rows["key"]), has_any_key(parked_rows, rows["base"]))


def _overlay_row(parked_rows: ParkedByKey, row: dict[str, Any]) -> dict[str, Any] | ParkedRow:
    """Complete a partial image with the parked row of its key, or of its old key if the row moved.

    Returns the row for the target, or a ParkedRow if the parked row is incomplete itself. A delete, a complete image
    and a row whose key is not parked are returned unchanged.
    """
    base = parked_rows.get(tuple(row["base"] or row["key"]))
    if row["op"] == "d" or row["complete"] is not False or base is None:
        return row
    image = {**base.image, **dict(row["after"] or ())}
    if base.complete:
        return {**row, "after": list(image.items()), "complete": True, "base": None}
    return replace(
        base,
        key=tuple(row["key"]),
        position=row["position"],
        ordinal=row["ordinal"],
        committed_at=micros(row["committed_at"]),
        image=image,
        code=MissingBase.code,
    )


def _is_removed(row: ParkedRow, generation: int | None) -> bool:
    return generation is not None and row.position < generation


def _to_folded_row(row: ParkedRow) -> dict[str, Any]:
    return {
        "relation": row.relation,
        "op": "u",
        "key": list(row.key),
        "position": row.position,
        "ordinal": row.ordinal,
        "committed_at": EPOCH + timedelta(microseconds=row.committed_at),
        "after": list(row.image.items()),
        "complete": True,
    }


def micros(time: datetime | None) -> int:
    """Return a time as µs since 1970 UTC; 0 if it is None."""
    return 0 if time is None else (time - EPOCH) // timedelta(microseconds=1)


_ENDINGS: Final = (Operation.TRUNCATE.value, Operation.GENERATION.value)


def rows_after(rows: pa.Table | None, position: int) -> pa.Table | None:
    """Return the rows after `position`, because earlier batches have applied the others; None if `rows` is None."""
    return None if rows is None else rows.filter(pc.greater(rows["position"], position))


def queue_changes_of_parked(parked_rows: ParkedByKey, batch: TableBatch) -> tuple[pa.Table, dict[Key, ParkedRow]]:
    """Append a batch's changes of parked keys to their queues; return (rows of other keys, parked rows by key).

    Raises MissingBase for a partial image that moves a row from or to a parked key, because its unsent columns are
    unknown.
    """
    rows = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows
    _check_moves(rows, parked_rows, batch.schema)
    mine, changes = has_any_key(parked_rows, rows["key"]), _changes(rows, parked_rows)
    ended = [_to_parked_change(ending) for ending in batch.endings]
    left = {key: _append_changes(row, [*changes.get(key, ()), *ended], batch.upto) for key, row in parked_rows.items()}
    return rows.filter(pc.invert(mine)), left


def replay_queues(queues: Iterable[ParkedRow]) -> tuple[pa.Table, tuple[GenerationEnd, ...]]:
    """Return the contents of queues of parked keys, to be merged with a batch.

    The first result contains all changes, for `TableBatch.unparked`. The second one contains all truncates and ends of
    full copies, for `TableBatch.earlier_endings`.
    """
    rows: list[dict[str, Any]] = []
    ended = set[GenerationEnd]()
    for queue in queues:
        rows += [_to_folded_change(queue, change) for change in queue.changes if change.op not in _ENDINGS]
        ended |= {
            GenerationEnd(change.position, change.ordinal, change.committed_at, change.began)
            for change in queue.changes
            if change.op in _ENDINGS
        }
    return pa.Table.from_pylist(rows, FOLDED_ARROW), tuple(sorted(ended))


def park_refused_keys(
    batch: TableBatch, rows: pa.Table, refusals: Iterable[RefusedRow], now: int
) -> tuple[pa.Table, dict[Key, ParkedRow]]:
    """Park the keys of refused rows with all of their changes; return (rows of other keys, new parked rows by key).

    rows: the batch's changes of keys that are not parked yet. now: µs since 1970 UTC. Raises MissingBase for a partial
    image that moves a row from or to one of the keys to park.
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
    """Return a copy of the parked row, without the refused change and the later changes of the key in its queue.

    Truncates and ends of full copies stay in the queue.
    """
    kept = (change for change in row.changes if change.place < row.place or change.op in _ENDINGS)
    return replace(row, changes=tuple(kept))


def count_refusal(row: ParkedRow, error: CdcError, upto: int) -> ParkedRow:
    """Return a parked row with one more attempt, after a retry failed with `error` in the batch that ends at `upto`."""
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
    """Return the row with `changes` appended to its queue; return the row itself if `changes` is empty."""
    added = sorted(changes, key=lambda one: one.place)
    return replace(row, changes=(*row.changes, *added), upto=upto) if added else row


def _check_moves(rows: pa.Table, parked: Container[Key], schema: TableSchema) -> None:
    partial = pc.invert(pc.fill_null(rows["complete"], fill_value=True))
    moves = rows.filter(pc.and_(partial, pc.is_valid(rows["base"]))).sort_by(_LOG_ORDER)
    for row in moves.to_pylist():
        if tuple(row["key"]) in parked or tuple(row["base"]) in parked:
            raise MissingBase(
                f"table {schema.topic!r}: the partial image at {Position(row['position'])} cannot be completed, "
                "because it changes the key of its row, and the row with the old or the new key is parked",
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


def _to_folded_change(queue: ParkedRow, change: ParkedChange) -> dict[str, Any]:
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
