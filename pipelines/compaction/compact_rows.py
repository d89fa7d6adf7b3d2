"""Compacting: rows of the log → the fewest rows that fold the same, whatever rows come after them.

For every cut of a log into A and what follows, B: fold(compacted(A) ∪ B) = fold(A ∪ B), but for truncates and
generations that a later one of the same relation hides. So whoever reads a log from its beginning may be given
compacted rows instead, and nothing downstream changes.

Only narrow columns are looked at to find which rows stay; the wide ones are copied once, at the end. Row by row in
Python go the keys whose last life has a partial image, and no others.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.log.layout import ORDER
from pipelines.folding.fold import (
    fold_lives,
    has_base_key,
    latest_per_key,
    remove_fenced_rows,
    split_keyless,
    split_partial,
)
from pipelines.folding.range_statistics import fence_rows

SURVEYED: Final = ("relation", "op", "key", "old_key", "position", "ordinal", "partial", "payload")
"""The columns that tell which rows are needed; they take a fifth of the time of all."""
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_NARROW: Final = ["relation", "op", "key", "old_key", "position", "ordinal", "partial"]
_NUMBER: Final = "number"
_PLACE: Final = [name for name, _ in ORDER]


def compacted(rows: pa.Table, after: int = 0) -> pa.Table:
    """Log rows, whole transactions in any order → LOG_SCHEMA, sorted: what must stay of those behind `after`.

    One row per key: its last image, whole (`partial` false) or with what the rows say of it, or its tombstone. Rows
    of keyless tables as they are. All `s`, of each relation the last `t` and the `g` that count. No `m`. All are
    for everyone. A row up to `after` serves to complete the others: of a moved row the image that it left behind.
    """
    numbered = rows.select(_NARROW).append_column(_NUMBER, pa.arange(0, rows.num_rows))
    is_row = pc.is_in(rows["op"], _ROWS)
    controls = rows.filter(pc.invert(is_row)).drop_columns(["before", "after"])
    images = remove_fenced_rows(numbered.filter(is_row), controls)
    keyed, keyless = split_keyless(images)
    whole, in_lives = split_partial(_since_beginning(keyed))
    parts = [
        _controls(controls, after),
        _taken(rows, keyless, after),
        _states(_taken(rows, latest_per_key(whole), after)),
        _lives(rows, in_lives, after),
    ]
    return pa.concat_tables(parts).sort_by(ORDER)


def needed(rows: pa.Table) -> pa.Array:
    """The places of the rows (SURVEYED) on which compacted() depends: without the others it makes the same."""
    numbered = rows.select(_NARROW).append_column(_NUMBER, pa.arange(0, rows.num_rows))
    is_row = pc.is_in(rows["op"], _ROWS)
    is_control = pc.and_(pc.invert(is_row), pc.not_equal(rows["op"], Operation.MESSAGE.value))
    keyed, keyless = split_keyless(remove_fenced_rows(numbered.filter(is_row), rows.filter(is_control)))
    found = [numbered.filter(is_control), keyless, _since_last_whole(keyed) if keyed.num_rows else keyed]
    return pa.chunked_array([chunk for part in found for chunk in part[_NUMBER].chunks], pa.int64()).combine_chunks()


def without_tombstones(rows: pa.Table, floor: int) -> pa.Table:
    """The rows without the deletes of keys up to a position: for who holds nothing older of those keys.

    A delete in a keyless table takes one row of many away and is no tombstone.
    """
    is_tombstone = pc.and_(pc.equal(rows["op"], Operation.DELETE.value), pc.is_valid(rows["key"]))
    return rows.filter(pc.invert(pc.and_(is_tombstone, pc.less_equal(rows["position"], floor))))


def moved(rows: pa.Table) -> pa.Table:
    """The moves with partial images, whose other columns stand under another key: relation, key, old_key."""
    is_move = pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))
    return rows.filter(is_move).select(["relation", "key", "old_key"])


def _since_beginning(keyed: pa.Table) -> pa.Table:
    """The rows without those that stand before the last full image or delete of their key.

    Keys between which partial images moved keep theirs: what counts there is the life that was left.
    """
    return _since_last_whole(keyed) if pc.any(keyed["partial"]).as_py() else keyed


def _since_last_whole(keyed: pa.Table) -> pa.Table:
    ids = _identities(keyed)
    order = np.lexsort((keyed["ordinal"].to_numpy(), keyed["position"].to_numpy()))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    begins = order[~keyed["partial"].to_numpy()[order]]
    began = np.full(int(ids.max()) + 1, -1, np.int64)
    began[ids[begins]] = place[begins]  # of places assigned twice the last one stays
    moves = moved(keyed)
    linked = pa.concat_arrays([pc.binary_join(moves[name].combine_chunks(), "\0") for name in ("key", "old_key")])
    kept = (place >= began[ids]) | pc.is_in(keyed["text"], linked).to_numpy()
    return keyed.filter(pa.array(kept))


def _identities(keyed: pa.Table) -> np.ndarray:
    """A number for each (relation, text)."""
    texts = keyed["text"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    relations = keyed["relation"].combine_chunks().dictionary_encode()
    if len(relations.dictionary) == 1:
        return texts
    both = pa.array(texts * len(relations.dictionary) + relations.indices.to_numpy())
    return both.dictionary_encode().indices.to_numpy().astype(np.int64)


def _taken(rows: pa.Table, found: pa.Table, after: int) -> pa.Table:
    """The whole rows of numbered ones behind `after`."""
    behind = found.filter(pc.greater(found["position"], after))
    return _for_everyone(rows.take(behind[_NUMBER]))


def _states(latest: pa.Table) -> pa.Table:
    """Latest rows of keys → their state; no old image is part of it, nor that of a deleted row."""
    gone = pc.equal(latest["op"], Operation.DELETE.value)
    after = pc.if_else(gone, pa.nulls(latest.num_rows, latest["after"].type), latest["after"].combine_chunks())
    return _with(latest, after=after, before=None, old_key=None)


def _lives(rows: pa.Table, in_lives: pa.Table, after: int) -> pa.Table:
    """Rows of keys with partial images → their states, laid over the latest row of each."""
    told = fold_lives(rows.take(in_lives[_NUMBER])).select([*_PLACE, "after", "complete", "base"])
    told = told.filter(pc.greater(told["position"], after)).sort_by(ORDER)
    latest = in_lives.select([*_PLACE, _NUMBER]).join(told.select(_PLACE), _PLACE, join_type="left semi")
    latest = _taken(rows, latest.sort_by(ORDER), after)
    # a row that came without a part of it stays new: nothing older is under it
    based = pc.or_(told["base"].combine_chunks().is_null(), has_base_key(told["base"]))
    said = {"op": pc.if_else(based, latest["op"], Operation.CREATE.value), "after": told["after"]}
    return _with(latest, **said, partial=pc.invert(told["complete"]), before=None, old_key=None)


def _controls(controls: pa.Table, after: int) -> pa.Table:
    """All `s`, and of each relation the last `t`, the last `g`, and the `g` of the copy that began last."""
    last: dict[tuple[int, str], tuple[int, int, int]] = {}
    furthest: dict[int, tuple[int, tuple[int, int, int]]] = {}
    for mark in sorted(fence_rows(controls), key=lambda mark: (mark["position"], mark["ordinal"])):
        place = last[mark["relation"], mark["op"]] = mark["relation"], mark["position"], mark["ordinal"]
        if mark["op"] == Operation.GENERATION:
            began = int(bytes(mark["payload"])), place
            furthest[mark["relation"]] = max(began, furthest.get(mark["relation"], began))
    kept = {*last.values(), *(place for _, place in furthest.values())}
    stays = [
        row["position"] > after and (row["op"] == Operation.SCHEMA or tuple(row[name] for name in _PLACE) in kept)
        for row in controls.select(["op", *_PLACE]).to_pylist()
    ]
    found = controls.filter(pa.array(stays, pa.bool_()))
    return _with(found, before=None, after=None, address=None)


def _for_everyone(rows: pa.Table) -> pa.Table:
    return _with(rows, address=None)


def _with(rows: pa.Table, **columns: Any) -> pa.Table:
    """The rows as LOG_SCHEMA with some columns replaced, None standing for nulls."""
    said = {
        name: pa.nulls(rows.num_rows, LOG_SCHEMA.field(name).type) if column is None else column
        for name, column in columns.items()
    }
    return pa.table([said[name] if name in said else rows[name] for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)
