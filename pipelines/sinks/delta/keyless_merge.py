"""Keyless merge: the source of a merge for a table without a key, with new rows and the positions of rows to delete.

The target is a multiset. A deleted row is any row of the target that is equal to it in every column. The target is
searched by the column with the most distinct values among the deleted rows; the row is then deleted by its position.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.errors import MissingBase, SchemaNotApplicable
from cdc.position import Position
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.keyless_fold import keep_latest_per_id, net_changes, row_ids
from pipelines.sinks.delta.base_lookup import is_after, rows_with_keys
from pipelines.sinks.delta.merge import OP
from pipelines.sinks.delta.merge_source import RowShape, as_upserts


def keyless_source(
    images: pa.Table, held: DeltaTable, shape: RowShape, truncated: tuple[int, int] | None = None, *, lenient: bool
) -> pa.Table:
    """Folded rows that the target does not have yet → the merge's source, by place.

    truncated: place of a truncate in the range; an older row is gone by itself. lenient: a delete of a row that is not
    there takes none. Raises MissingBase for one otherwise, SchemaNotApplicable for rows with a key.
    """
    if images["key"].null_count < images.num_rows:
        raise SchemaNotApplicable(f"table {shape.schema.topic!r} lost its key within a batch")
    left = net_changes(images, shape.schema)
    came, went = (left.filter(pc.equal(left["op"], op)) for op in ("u", "d"))
    rows = as_upserts(shape.rows(came), shape)
    if not went.num_rows:
        return rows
    typed = shape.rows(went)
    there = rows_with_keys(held, _telling(typed), shape.columns)
    if truncated is not None:
        there = there.filter(is_after(there, truncated))
    return pa.concat_tables([rows, _leaving(typed, there, shape, lenient=lenient)])


def _leaving(typed: pa.Table, rows: pa.Table, shape: RowShape, *, lenient: bool) -> pa.Table:
    """Of each row that went one that is equal to it among those of the target, by its place."""
    names = [name for name in shape.columns.names if name not in (POSITION_COLUMN, ORDINAL_COLUMN)]
    both = pa.concat_tables([typed, rows])
    ids = row_ids((both[name] for name in names), both.num_rows)
    asked, there = ids[: typed.num_rows], ids[typed.num_rows :]
    kinds = int(ids.max()) + 1
    wanted, present = np.bincount(asked, minlength=kinds), np.bincount(there, minlength=kinds)
    if (wanted > present).any() and not lenient:
        first = Position(typed[POSITION_COLUMN][int(np.flatnonzero((wanted > present)[asked])[0])].as_py())
        raise MissingBase(
            f"the target of table {shape.schema.topic!r} does not contain {int((wanted - present).clip(0).sum())} "
            "of the rows "
            f"that were deleted from {first} on"
        )
    gone = keep_latest_per_id(_as_placed(rows), there, wanted)
    held_by_name = {POSITION_COLUMN: gone["position"], ORDINAL_COLUMN: gone["ordinal"]}
    held_by_name[OP] = pa.repeat(pa.scalar("d"), gone.num_rows)
    columns = [held_by_name.get(field.name, pa.nulls(gone.num_rows, field.type)) for field in shape.source]
    return pa.Table.from_arrays(columns, schema=shape.source)


def _as_placed(rows: pa.Table) -> pa.Table:
    return pa.table({"position": rows[POSITION_COLUMN], "ordinal": rows[ORDINAL_COLUMN]})


def _telling(typed: pa.Table) -> pa.Table:
    """The column that tells the rows apart best of those that a scan can be narrowed by; none if there is none."""
    narrowing = [
        field.name
        for field in typed.schema
        if field.name not in (POSITION_COLUMN, ORDINAL_COLUMN)
        and (pa.types.is_integer(field.type) or pa.types.is_string(field.type))
        and not typed[field.name].null_count
    ]
    best = max(narrowing, key=lambda name: pc.count_distinct(typed[name]).as_py(), default=None)
    return typed.select([] if best is None else [best])
