"""Parked keys of a table in its latest state: how a batch changes them. Pure functions on folded rows.

A parked key has one row. Later changes of the key are folded onto it. A full image, a delete, a truncate or a
generation end replaces it and is offered to the target like any other row. An incomplete parked row is not retried,
because the target does not have its missing columns: it waits until a backfill reads the whole row from the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import MissingBase
from cdc.stores.dead_letter_rows import DeadLetterEntry, Key, ParkedRow
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import RefusedRow, TableBatch

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PARTS: Final = "\0"
"""Separator of the parts of a key; Postgres text never contains it."""

ParkedByKey = Mapping[Key, ParkedRow]


@dataclass(frozen=True, slots=True)
class OfferedRows:
    """The rows of a batch that are offered to the target."""

    rows: pa.Table
    """FOLDED_ARROW: the batch's rows, with later states of parked keys."""
    waiting: dict[Key, ParkedRow]
    """Rows that stay parked whatever the target accepts."""


def affects_parked(parked_rows: ParkedByKey, batch: TableBatch) -> bool:
    """Whether a batch changes or removes parked keys."""
    if not parked_rows:
        return False
    if batch.truncated is not None or batch.generation is not None or batch.endings:
        return True
    return batch.rows is not None and bool(pc.any(_affects(parked_rows, batch.rows)).as_py())


def overlay_parked(parked_rows: ParkedByKey, batch: TableBatch, again: Collection[Key]) -> OfferedRows:
    """Overlay a batch on the parked rows; again: keys to retry even if the batch does not change them."""
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
    """The refused rows of a batch as parked rows; a refused delete needs none. now: µs since 1970 UTC."""
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
    """The entries to store for a batch that ends at upto."""
    parked = [DeadLetterEntry(row) for key, row in after.items() if before.get(key) != row]
    return parked + [DeadLetterEntry(replace(row, upto=upto), False) for key, row in before.items() if key not in after]


def has_any_key(keys: Iterable[Key], column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Which entries of a column of keys are among the keys; a null entry never is."""
    return pc.is_in(pc.binary_join(column, _PARTS), _joined(keys))


def _joined(keys: Iterable[Key]) -> pa.Array:
    return pa.array([_PARTS.join(key) for key in keys], pa.string())


def count_parked_keys(rows: pa.Table | None, parked_rows: ParkedByKey) -> tuple[int, int]:
    """(number of parked keys among those of a batch, number of keys of the batch)."""
    if rows is None or not rows.num_rows:
        return 0, 0
    keys = pc.unique(pc.binary_join(rows["key"], _PARTS))
    return pc.sum(pc.is_in(keys, _joined(parked_rows))).as_py(), len(keys)


def _affects(parked_rows: ParkedByKey, rows: pa.Table) -> pa.ChunkedArray:
    return pc.or_(has_any_key(parked_rows, rows["key"]), has_any_key(parked_rows, rows["base"]))


def _overlay_row(parked_rows: ParkedByKey, row: dict[str, Any]) -> dict[str, Any] | ParkedRow:
    """The row overlaid on its parked base row: as a row to offer, or as a row that stays parked."""
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
    """µs since 1970 UTC; 0 if unknown."""
    return 0 if time is None else (time - EPOCH) // timedelta(microseconds=1)
