"""The compacted rows of a log range: the fewest rows that fold to the same result, whatever rows come after them.

For every division of a log into A and the following rows B, fold(compact_rows(A) ∪ B) = fold(A ∪ B). There is one
exception: compact_rows(A) omits a truncate or the end of a full copy if a later one of the same table supersedes it. So
a reader that begins before the horizon gets compacted rows instead of the changes, and folds them in the same way.

Narrow columns decide which rows stay; the wide columns are copied once, at the end. Only keys with partial images after
their last complete image or delete are processed row by row in Python.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import ORDER
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from pipelines.folding.fences_and_statistics import fence_rows
from pipelines.folding.fold import (
    fold_lives,
    has_base_key,
    key_ids,
    latest_per_key,
    remove_fenced_rows,
    split_keyless,
    split_partial,
)
from pipelines.folding.key_parts import partial_moves

NARROW_COLUMNS: Final = ("relation", "op", "key", "old_key", "position", "ordinal", "partial", "payload")
"""Columns that decide which rows are needed; reading only these takes a fifth of the time of reading all columns."""
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_IMAGE_COLUMNS: Final = ["relation", "op", "key", "old_key", "position", "ordinal", "partial"]
_NUMBER: Final = "number"
_ORDER_COLUMNS: Final = [name for name, _ in ORDER]


def compact_rows(rows: pa.Table, after: int = 0) -> pa.Table:
    """Return the compacted rows after position `after` (LOG_SCHEMA), in the order of a run.

    rows: log rows of whole transactions, in any order. Rows up to `after` are not part of the result; they only
    complete images of moved rows. The result has one row per key: its latest image, which may stay partial, or its
    tombstone. Rows without a key are unchanged. All schema rows (`s`) stay. Each relation has its last truncate (`t`)
    and at most two ends of full copies (`g`). Logical messages (`m`) are left out. No row has an address.
    """
    numbered = rows.select(_IMAGE_COLUMNS).append_column(_NUMBER, pa.arange(0, rows.num_rows))
    is_row = pc.is_in(rows["op"], _ROWS)
    controls = rows.filter(pc.invert(is_row)).drop_columns(["before", "after"])
    images = remove_fenced_rows(numbered.filter(is_row), controls)
    keyed, keyless = split_keyless(images)
    complete, in_lives = split_partial(_since_last_life(keyed))
    parts = [
        _latest_controls(controls, after),
        _full_rows(rows, keyless, after),
        _states(_full_rows(rows, latest_per_key(complete), after)),
        _folded_lives(rows, in_lives, after),
    ]
    return pa.concat_tables(parts).sort_by(ORDER)


def needed_row_numbers(rows: pa.Table) -> pa.Array:
    """Return the indexes of the rows that compact_rows() needs; the other rows do not change its result.

    rows: log rows with the columns NARROW_COLUMNS.
    """
    numbered = rows.select(_IMAGE_COLUMNS).append_column(_NUMBER, pa.arange(0, rows.num_rows))
    is_row = pc.is_in(rows["op"], _ROWS)
    is_control = pc.and_(pc.invert(is_row), pc.not_equal(rows["op"], Operation.MESSAGE.value))
    keyed, keyless = split_keyless(remove_fenced_rows(numbered.filter(is_row), rows.filter(is_control)))
    found = [numbered.filter(is_control), keyless, _since_last_full_image(keyed) if keyed.num_rows else keyed]
    return pa.chunked_array([chunk for part in found for chunk in part[_NUMBER].chunks], pa.int64()).combine_chunks()


def remove_tombstones(rows: pa.Table, floor: int) -> pa.Table:
    """Remove the tombstones up to position `floor`, which every reader has passed.

    A delete in a table without a key stays: it removes one of several equal rows, so it is no tombstone.
    """
    is_tombstone = pc.and_(pc.equal(rows["op"], Operation.DELETE.value), pc.is_valid(rows["key"]))
    return rows.filter(pc.invert(pc.and_(is_tombstone, pc.less_equal(rows["position"], floor))))


def _since_last_life(keyed: pa.Table) -> pa.Table:
    """Drop the rows of each key that precede its last complete image or delete.

    If `keyed` has no partial image, return it unchanged.
    If an update with a partial image changed the key of a row, all rows of the old and of the new key stay. The rows of
    the old key complete that image.
    """
    return _since_last_full_image(keyed) if pc.any(keyed["partial"]).as_py() else keyed


def _since_last_full_image(keyed: pa.Table) -> pa.Table:
    ids = key_ids(keyed)
    order = np.lexsort((keyed["ordinal"].to_numpy(), keyed["position"].to_numpy()))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    full = order[~keyed["partial"].to_numpy()[order]]
    last_full = np.full(int(ids.max()) + 1, -1, np.int64)
    last_full[ids[full]] = rank[full]  # numpy keeps the last of several values for one id
    moves = partial_moves(keyed)
    moved_keys = pa.concat_arrays([pc.binary_join(moves[name].combine_chunks(), "\0") for name in ("key", "old_key")])
    is_needed = (rank >= last_full[ids]) | pc.is_in(keyed["text"], moved_keys).to_numpy()
    return keyed.filter(pa.array(is_needed))


def _full_rows(rows: pa.Table, numbered: pa.Table, after: int) -> pa.Table:
    """Return the rows of `numbered` after position `after`, with all columns of `rows` and without address."""
    later = numbered.filter(pc.greater(numbered["position"], after))
    return _replace_columns(rows.take(later[_NUMBER]), address=None)


def _states(latest: pa.Table) -> pa.Table:
    """Remove `before` and `old_key` from the latest row of each key; from a delete, remove `after` as well."""
    is_delete = pc.equal(latest["op"], Operation.DELETE.value)
    after = pc.if_else(is_delete, pa.nulls(latest.num_rows, latest["after"].type), latest["after"].combine_chunks())
    return _replace_columns(latest, after=after, before=None, old_key=None)


def _folded_lives(rows: pa.Table, in_lives: pa.Table, after: int) -> pa.Table:
    """Return the latest row of each key, with an image into which the fold has merged the key's partial images.

    in_lives: the rows of all keys with partial images, as `split_partial` returns them.
    """
    whole = rows.take(in_lives[_NUMBER]).append_column("text", in_lives["text"])
    folded = fold_lives(whole).select([*_ORDER_COLUMNS, "after", "complete", "base"])
    folded = folded.filter(pc.greater(folded["position"], after)).sort_by(ORDER)
    latest = in_lives.select([*_ORDER_COLUMNS, _NUMBER]).join(
        folded.select(_ORDER_COLUMNS), _ORDER_COLUMNS, join_type="left semi"
    )
    latest = _full_rows(rows, latest.sort_by(ORDER), after)
    # a partial image with a base of nulls stays an insert, because no older row may complete it
    has_base = pc.or_(folded["base"].combine_chunks().is_null(), has_base_key(folded["base"]))
    columns = {"op": pc.if_else(has_base, latest["op"], Operation.CREATE.value), "after": folded["after"]}
    return _replace_columns(latest, **columns, partial=pc.invert(folded["complete"]), before=None, old_key=None)


def _latest_controls(controls: pa.Table, after: int) -> pa.Table:
    """Return the control rows that compacted rows need, if they are after position `after`.

    These are all schema rows, and for each relation the last truncate and at most two ends of full copies (`g` rows).
    One is the `g` row of the copy that ended last, the other that of the copy that began last. If copies do not
    overlap, both are the same row.
    """
    last: dict[tuple[int, str], tuple[int, int, int]] = {}
    latest_copy: dict[int, tuple[int, tuple[int, int, int]]] = {}
    for row in sorted(fence_rows(controls), key=lambda row: (row["position"], row["ordinal"])):
        order = last[row["relation"], row["op"]] = row["relation"], row["position"], row["ordinal"]
        if row["op"] == Operation.GENERATION:
            copy = int(bytes(row["payload"])), order
            latest_copy[row["relation"]] = max(copy, latest_copy.get(row["relation"], copy))
    needed = {*last.values(), *(order for _, order in latest_copy.values())}
    is_needed = [
        row["position"] > after
        and (row["op"] == Operation.SCHEMA or tuple(row[name] for name in _ORDER_COLUMNS) in needed)
        for row in controls.select(["op", *_ORDER_COLUMNS]).to_pylist()
    ]
    found = controls.filter(pa.array(is_needed, pa.bool_()))
    return _replace_columns(found, before=None, after=None, address=None)


def _replace_columns(rows: pa.Table, **columns: Any) -> pa.Table:
    """Return the rows as LOG_SCHEMA with the given columns replaced; None replaces a column by nulls."""
    replaced = {
        name: pa.nulls(rows.num_rows, LOG_SCHEMA.field(name).type) if column is None else column
        for name, column in columns.items()
    }
    values = [replaced[name] if name in replaced else rows[name] for name in LOG_SCHEMA.names]
    return pa.table(values, schema=LOG_SCHEMA)
