"""Changed rows of a view: the differences between its rows at two cuts, and their form in the log."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import ViewKeyNotUnique
from cdc.log_row import LOG_SCHEMA, Operation, RowOrder
from cdc.table import TableSchema

ROWS: Final = pa.schema([LOG_SCHEMA.field("key"), LOG_SCHEMA.field("after")])
"""Arrow schema of the rows of a view: key and image."""
CHANGED_ROWS: Final = pa.schema([LOG_SCHEMA.field(name) for name in ("op", "key", "before", "after")])
"""Arrow schema of the changed rows of a view."""
_ID: Final = "id"
_OLD: Final = "old"
_NEW: Final = "new"


def check_key(rows: pa.Table, schema: TableSchema) -> None:
    """Raise ViewKeyNotUnique if two rows of ROWS have the same key."""
    names = ", ".join(column.name for column in schema.key)
    keys = rows["key"].combine_chunks()
    ids = pc.binary_join(keys, "\0")
    counts = ids.value_counts()
    twice = pc.greater(counts.field("counts"), 1)
    if pc.any(twice).as_py():
        values = counts.field("values").filter(twice)[0].as_py().split("\0")
        raise ViewKeyNotUnique(f"view {schema.topic!r} has more than one row with the key ({names}) = {values!r}")


def all_new(rows: pa.Table) -> pa.Table:
    """Return the rows of ROWS as rows that were read, for a view that is computed for the first time."""
    return _changed(Operation.READ, rows["key"], None, rows["after"])


def differences(old: pa.Table, new: pa.Table) -> pa.Table:
    """Return the changes that make the rows `new` of the rows `old`, sorted by key; both have the columns ROWS.

    No key may occur twice in one of them. Equal rows give no change.
    """
    sides = [
        pa.table({_ID: pc.binary_join(_one_chunk(rows["key"]), "\0"), name: np.arange(rows.num_rows)})
        for name, rows in ((_OLD, old), (_NEW, new))
    ]
    both = sides[0].join(sides[1], _ID, join_type="full outer").sort_by(_ID)
    is_old, is_new = both[_OLD].is_valid(), both[_NEW].is_valid()
    created = both.filter(pc.invert(is_old))[_NEW]
    deleted = both.filter(pc.invert(is_new))[_OLD]
    kept = both.filter(pc.and_(is_old, is_new))
    before, after = old["after"].take(kept[_OLD]), new["after"].take(kept[_NEW])
    differs = pa.array(_differ(before, after))
    updated = new["key"].take(kept[_NEW]).filter(differs)
    return pa.concat_tables(
        [
            _changed(Operation.DELETE, old["key"].take(deleted), old["after"].take(deleted), None),
            _changed(Operation.UPDATE, updated, before.filter(differs), after.filter(differs)),
            _changed(Operation.CREATE, new["key"].take(created), None, new["after"].take(created)),
        ]
    )


def log_rows(rows: pa.Table, schema: TableSchema, order: RowOrder) -> pa.Table:
    """Return rows of CHANGED_ROWS as rows of LOG_SCHEMA. order: the place of the first row."""
    number = rows.num_rows
    constant = {
        "position": order.position,
        "xid": order.xid,
        "committed_at": order.committed_at,
        "relation": schema.relation,
        "topic": schema.topic,
        "partial": False,
    }
    columns = []
    for field in LOG_SCHEMA:
        if field.name == "ordinal":
            columns.append(pa.array(np.arange(order.ordinal, order.ordinal + number)))
        elif field.name in constant:
            columns.append(pa.repeat(pa.scalar(constant[field.name], field.type), number))
        else:
            columns.append(rows[field.name] if field.name in rows.column_names else pa.nulls(number, field.type))
    return pa.Table.from_arrays(columns, schema=LOG_SCHEMA)


def _changed(operation: Operation, key: Any, before: Any, after: Any) -> pa.Table:
    number = len(key)
    image = LOG_SCHEMA.field("after").type
    columns = [
        pa.repeat(pa.scalar(operation.value), number),
        key,
        pa.nulls(number, image) if before is None else before,
        pa.nulls(number, image) if after is None else after,
    ]
    return pa.Table.from_arrays(columns, schema=CHANGED_ROWS)


def _differ(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    """Return one bool per row: whether two images of the same columns differ."""
    images = [_one_chunk(left), _one_chunk(right)]
    differs = np.zeros(len(images[0]), np.bool_)
    if not len(images[0]):
        return differs
    items = [_items_by_column(image) for image in images]
    for mine, yours in zip(*items, strict=True):
        is_equal = pc.fill_null(pc.equal(mine, yours), fill_value=False)
        both_null = pc.and_(pc.is_null(mine), pc.is_null(yours))
        differs |= ~pc.or_(is_equal, both_null).to_numpy(zero_copy_only=False)
    return differs


def _items_by_column(images: pa.MapArray) -> list[pa.Array]:
    """Return the texts of each column of images that have the same columns, in the order of the column ids."""
    offsets = images.offsets.to_numpy()
    ids = images.keys.to_numpy()[offsets[0] : offsets[-1]].reshape(len(images), -1)
    texts = images.items.slice(offsets[0], offsets[-1] - offsets[0])
    order = np.argsort(ids, axis=1, kind="stable") + np.arange(len(images))[:, None] * ids.shape[1]
    return [texts.take(pa.array(column)) for column in order.T]


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
