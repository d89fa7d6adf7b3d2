"""What becomes of parked keys in a batch: pure, on rows in the folded shape.

A key is parked in one state: later changes of it are folded onto that, as the fold does. A full image, a delete, a
truncate or a generation end takes its place and is tried like any other row. A parked row without all of its columns
is not tried, for what it lacks is nowhere in the target: it waits for the source to tell the whole row.
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
"""Between the parts of a key; Postgres text never holds it."""

Held = Mapping[Key, ParkedRow]


@dataclass(frozen=True, slots=True)
class OfferedRows:
    """A batch as its target is to be offered it."""

    rows: pa.Table
    """FOLDED_ARROW: the batch's rows, later states of parked keys among them."""
    waiting: dict[Key, ParkedRow]
    """What stays parked whatever becomes of the rows."""


def touches(held: Held, batch: TableBatch) -> bool:
    """Whether a batch says anything of parked keys."""
    if not held:
        return False
    if batch.truncated is not None or batch.generation is not None or batch.endings:
        return True
    return batch.rows is not None and bool(pc.any(_concerned(held, batch.rows)).as_py())


def offer(held: Held, batch: TableBatch, again: Collection[Key]) -> OfferedRows:
    """Lay a batch over what is parked; again: keys to be tried whether or not the batch has them."""
    rows = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows
    held = {key: row for key, row in held.items() if batch.truncated is None or row.place > batch.truncated}
    concerned = _concerned(held, rows)
    later = {tuple(row["key"]): _onto(held, row) for row in rows.filter(concerned).to_pylist()}
    waiting = {key: row for key, row in held.items() if key not in later and not _ended(row, batch.generation)}
    tried = [row for row in later.values() if not isinstance(row, ParkedRow)]
    tried += [_folded(waiting.pop(key)) for key in again if key in waiting and waiting[key].complete]
    waiting |= {key: replace(row, upto=batch.upto) for key, row in later.items() if isinstance(row, ParkedRow)}
    offered = pa.concat_tables([rows.filter(pc.invert(concerned)), pa.Table.from_pylist(tried, FOLDED_ARROW)])
    return OfferedRows(offered, waiting)


def set_aside(batch: TableBatch, refusals: Iterable[RefusedRow], held: Held, now: int) -> dict[Key, ParkedRow]:
    """The refused rows of a batch as they are parked; deletes among them are no rows. now: µs since 1970 UTC."""
    parked: dict[Key, ParkedRow] = {}
    for refusal in refusals:
        assert batch.rows is not None  # noqa: S101 - of no rows none is refused
        row = batch.rows.slice(refusal.row, 1).to_pylist()[0]
        if row["op"] == "d":
            continue
        key = tuple(row["key"])
        before = held.get(key)
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


def changed(before: Held, after: Held, upto: int) -> list[DeadLetterEntry]:
    """What is to be kept of a batch that ends at upto."""
    parked = [DeadLetterEntry(row) for key, row in after.items() if before.get(key) != row]
    return parked + [DeadLetterEntry(replace(row, upto=upto), False) for key, row in before.items() if key not in after]


def keyed(keys: Iterable[Key], column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Which entries of a column of keys are among the keys; no null is."""
    return pc.is_in(pc.binary_join(column, _PARTS), _joined(keys))


def _joined(keys: Iterable[Key]) -> pa.Array:
    return pa.array([_PARTS.join(key) for key in keys], pa.string())


def keys_of(rows: pa.Table | None, held: Held) -> tuple[int, int]:
    """(how many keys of a batch's rows are held, how many keys they have)."""
    if rows is None or not rows.num_rows:
        return 0, 0
    keys = pc.unique(pc.binary_join(rows["key"], _PARTS))
    return pc.sum(pc.is_in(keys, _joined(held))).as_py(), len(keys)


def _concerned(held: Held, rows: pa.Table) -> pa.ChunkedArray:
    return pc.or_(keyed(held, rows["key"]), keyed(held, rows["base"]))


def _onto(held: Held, row: dict[str, Any]) -> dict[str, Any] | ParkedRow:
    """The row over its parked base, if that is one: as the target is offered it, or as it stays parked."""
    under = held.get(tuple(row["base"] or row["key"]))
    if row["op"] == "d" or row["complete"] is not False or under is None:
        return row
    image = {**under.image, **dict(row["after"] or ())}
    if under.complete:
        return {**row, "after": list(image.items()), "complete": True, "base": None}
    return replace(
        under,
        key=tuple(row["key"]),
        position=row["position"],
        ordinal=row["ordinal"],
        committed_at=micros(row["committed_at"]),
        image=image,
        code=MissingBase.code,
    )


def _ended(row: ParkedRow, generation: int | None) -> bool:
    return generation is not None and row.position < generation


def _folded(row: ParkedRow) -> dict[str, Any]:
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


def micros(moment: datetime | None) -> int:
    """µs since 1970 UTC; 0 where it is not known."""
    return 0 if moment is None else (moment - EPOCH) // timedelta(microseconds=1)
