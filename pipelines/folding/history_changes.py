"""The changes of a range for targets that keep the history of a row: one row per change instead of one per key.

The rows have the columns of FOLDED_ARROW. `op` is the log's operation. `after` is the sent image; for a delete, the
image of the old row. `complete` is false if columns were not sent; the sink reads these from the target. `base` is the
key of the row before a key change, if columns were not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import ROW_OPERATIONS, Operation
from pipelines.folding.fences_and_statistics import addressed_to
from pipelines.folding.fold import FOLDED_ARROW, fold

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_IMAGE: Final = FOLDED_ARROW.field("after").type


@dataclass(frozen=True, slots=True, order=True)
class GenerationEnd:
    """A truncate, which removes all rows so far, or the end of a full copy, which removes rows older than its start."""

    position: int
    ordinal: int
    committed_at: int
    """Commit time in µs since 1970 UTC."""
    began: int | None = None
    """Start position of the full copy, whose end removes all rows older than this position; None for a truncate."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self | None:
        """Convert a log row of a truncate or of the end of a full copy; return None for any other row."""
        if row["op"] == Operation.TRUNCATE:
            return cls(row["position"], row["ordinal"], row["committed_at"])
        if row["op"] == Operation.GENERATION:
            return cls(row["position"], row["ordinal"], row["committed_at"], int(row["payload"] or b"0"))
        return None


def single_changes(rows: pa.Table | pa.RecordBatch, kept: AbstractSet[int], since: int) -> Any:
    """Return a bool mask of the log rows that must not be folded, because the sink keeps the history of their relation.

    The mask is true for changes of the relations `kept` after position `since`. In these relations, it is true for rows
    without a key at every position: two equal rows are two rows, and a fold would join them.
    """
    of_kept = pc.and_(pc.is_in(rows["relation"], pa.array(sorted(kept), pa.int64())), pc.is_in(rows["op"], _ROWS))
    return pc.and_(of_kept, pc.or_(pc.greater(rows["position"], int(since)), pc.is_null(rows["key"])))


def fold_with_history(rows: pa.Table, kept: AbstractSet[int], since: int, *, sink: str) -> pa.Table:
    """Fold log rows (LOG_SCHEMA) as `fold` does, but keep the single changes of some relations.

    kept: the relations whose history the sink keeps. Their changes up to position `since` are folded, and become rows
    of a copy; later ones stay. So do the folded rows that a later truncate or full copy removes: the history has them.
    """
    if not kept:
        return fold(rows, sink=sink)
    single, late = single_changes(rows, kept, since), is_late(rows, kept, since)
    is_control = pc.and_(late, pc.invert(single))
    folded = fold(rows.filter(pc.invert(pc.or_(single, is_control))), sink=sink)
    controls = fold(rows.filter(is_control), sink=sink)
    return pa.concat_tables([with_copied(folded, kept), controls, every_change(rows.filter(single), sink=sink)])


def is_late(rows: pa.Table, kept: AbstractSet[int], since: int) -> Any:
    """Return a bool mask of the log rows of the relations `kept` after position `since`."""
    of_kept = pc.fill_null(pc.is_in(rows["relation"], pa.array(sorted(kept), pa.int64())), fill_value=False)
    return pc.and_(of_kept, pc.greater(rows["position"], int(since)))


def every_change(rows: pa.Table, *, sink: str) -> pa.Table:
    """Convert log rows (LOG_SCHEMA) to one FOLDED_ARROW row per change, without rows addressed to another sink."""
    rows = rows.filter(pc.and_(pc.is_in(rows["op"], _ROWS), addressed_to(rows["address"], sink)))
    deleted = pc.equal(rows["op"], Operation.DELETE.value)
    image = pc.if_else(deleted, rows["before"].combine_chunks(), rows["after"].combine_chunks())
    complete = pc.or_(deleted, pc.invert(rows["partial"])).combine_chunks()
    # a complete image needs no row of the old key, and the changes of that key may be in another part of the range
    base = pc.if_else(complete, pa.scalar(None, rows["old_key"].type), rows["old_key"].combine_chunks())
    columns = {
        "after": image,
        "complete": complete,
        "base": base,
        "payload": pa.nulls(rows.num_rows, FOLDED_ARROW.field("payload").type),
    }
    values = [columns[name] if name in columns else rows[name] for name in FOLDED_ARROW.names]
    return pa.table(values, schema=FOLDED_ARROW)


def with_copied(folded: pa.Table, kept: AbstractSet[int]) -> pa.Table:
    """Return the folded rows, with op `u` replaced by `r` in the relations `kept`, whose history the sink keeps.

    These rows have no `base`. They begin a history, as the rows of a full copy do.
    """
    state = pc.and_(
        pc.is_in(folded["relation"], pa.array(sorted(kept), pa.int64())), pc.is_in(folded["op"], pa.array(["u", "d"]))
    )
    state = pc.fill_null(state, fill_value=False)
    return pa.concat_tables([folded.filter(pc.invert(state)), as_copied_rows(folded.filter(state))])


def as_copied_rows(folded: pa.Table) -> pa.Table:
    """Convert the folded rows of a table with a key to rows of a copy: op `u` becomes `r`, op `d` stays.

    These rows begin a history whose older changes were trimmed from the log. The result has no `base`, so an incomplete
    row stays incomplete.
    """
    deleted = pc.equal(folded["op"], Operation.DELETE.value)
    columns = {
        "op": pc.if_else(deleted, folded["op"], Operation.READ.value),
        "base": pa.nulls(folded.num_rows, FOLDED_ARROW.field("base").type),
    }
    return pa.table([columns.get(name, folded[name]) for name in FOLDED_ARROW.names], schema=FOLDED_ARROW)
