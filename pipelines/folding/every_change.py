"""History: every change of a table by itself, for targets that keep more of a row than its latest state.

The rows have the shape of folded ones (FOLDED_ARROW), one for each change and not one for each key: `op` is the log's
letter, `after` what was sent (of a delete, of the old row), `complete` is false where columns were not sent, and `base`
is the key that the row had before it moved. What was not sent is looked up where the target's rows are at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROW_OPERATIONS, Operation
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.range_statistics import addressed_to

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_IMAGE: Final = FOLDED_ARROW.field("after").type


@dataclass(frozen=True, slots=True, order=True)
class GenerationEnd:
    """A truncate or the end of a generation: every row that is older is gone from there on."""

    position: int
    ordinal: int
    committed_at: int
    """µs UTC."""
    began: int | None = None
    """Rows from below this position are gone; None for a truncate, which ends every row before itself."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self | None:
        """What a control row ends, `committed_at` in µs; None for one that ends nothing."""
        if row["op"] == Operation.TRUNCATE:
            return cls(row["position"], row["ordinal"], row["committed_at"])
        if row["op"] == Operation.GENERATION:
            return cls(row["position"], row["ordinal"], row["committed_at"], int(row["payload"] or b"0"))
        return None


def every_change(rows: pa.Table, *, sink: str) -> pa.Table:
    """Log rows (LOG_SCHEMA) of any order → their changes of rows; those addressed to another sink are passed over."""
    rows = rows.filter(pc.and_(pc.is_in(rows["op"], _ROWS), addressed_to(rows["address"], sink)))
    deleted = pc.equal(rows["op"], Operation.DELETE.value)
    image = pc.if_else(deleted, rows["before"].combine_chunks(), rows["after"].combine_chunks())
    said = {
        "after": image,
        "complete": pc.or_(deleted, pc.invert(rows["partial"])),
        "base": rows["old_key"],
        "payload": pa.nulls(rows.num_rows, FOLDED_ARROW.field("payload").type),
    }
    columns = [said[name] if name in said else rows[name] for name in FOLDED_ARROW.names]
    return pa.table(columns, schema=FOLDED_ARROW)


def as_copied(folded: pa.Table) -> pa.Table:
    """Folded rows of a table with a key, op `u` and `d` → the same as a copy of the table reads them, op `r` and `d`.

    So begins the history of a table whose older changes are not in the log any more. A row that lacks columns still
    does, and there is none that could complete it.
    """
    deleted = pc.equal(folded["op"], Operation.DELETE.value)
    said = {
        "op": pc.if_else(deleted, folded["op"], Operation.READ.value),
        "base": pa.nulls(folded.num_rows, FOLDED_ARROW.field("base").type),
    }
    return pa.table([said.get(name, folded[name]) for name in FOLDED_ARROW.names], schema=FOLDED_ARROW)
