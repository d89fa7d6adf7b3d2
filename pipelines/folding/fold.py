"""The fold: computes the latest state of every key from a range of log rows, for sinks and for compaction.

The changes of a key are divided into **lives**, which are sequences of consecutive changes. A complete image, a delete,
and a move from another key each begin a life. A partial image belongs to the life before it. The state of a key is its
last life, with the images merged column by column. A key without partial images needs no lives: its latest row is its
state.

This module folds Arrow tables in one process and is the specification. It folds small ranges, because a Spark job would
take longer to start. `spark_fold` does the same as a Spark plan for larger ranges; property tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from pipelines.folding.fences_and_statistics import Fence, add_fences, addressed_to, fence_rows, is_fenced
from pipelines.folding.image_overlay import latest_images

FOLDED_ARROW: Final = pa.schema(
    [
        LOG_SCHEMA.field("relation"),
        pa.field("op", pa.string()),
        LOG_SCHEMA.field("key"),
        pa.field("position", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("committed_at", pa.timestamp("us", tz="UTC")),
        LOG_SCHEMA.field("after"),
        pa.field("complete", pa.bool_()),
        pa.field("base", LOG_SCHEMA.field("key").type),
        LOG_SCHEMA.field("payload"),
    ]
)
"""One row per (relation, key), and the control rows unchanged.

`op` is `u` (`after` is the row), `d` (deleted), a control operation `s t g`, or `b`, the boundary of a batch.
`position`, `ordinal` and `committed_at` are those of the latest change. `complete` is true if `after` contains every
published column. Otherwise the row of the target with the key `base` has the other columns; if `base` is null, the row
with the same key has them.

If `base` is a list of nulls, no row of the target has the other columns. This happens with a row filter: an update that
makes a row visible is sent as an insert, and unchanged TOAST columns are not sent.

A table without a key is not folded. Its rows have a null key: `u` adds one row equal to `after`, `d` removes one, and
an update gives both. `keyless_fold` cancels added rows against removed rows.
"""

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_KEY: Final = ["relation", "text"]
_PYTHON_ROWS: Final = 10_000
"""Number of rows that are converted to Python objects at a time."""
_LOG_ORDER: Final = [("position", "ascending"), ("ordinal", "ascending")]


def fold(rows: pa.Table, *, sink: str) -> pa.Table:
    """Fold the log rows of whole transactions, in any order, to FOLDED_ARROW rows in any order.

    The fold ignores rows addressed to another sink. It removes the rows of a relation before its last truncate (`t`),
    and before the start of its latest finished full copy. A `g` row marks the end of a full copy.
    """
    rows = filter_rows(rows, addressed_to(rows["address"], sink))
    is_row = pc.is_in(rows["op"], _ROWS)
    controls = rows.filter(pc.and_(pc.invert(is_row), pc.not_equal(rows["op"], Operation.MESSAGE.value)))
    images = remove_fenced_rows(filter_rows(rows, is_row), controls)
    keyed, keyless = split_keyless(images)
    whole, in_lives = split_partial(keyed)
    parts = [_to_state(latest_per_key(whole)), keyless_changes(keyless), _as_folded(controls, complete=None)]
    return pa.concat_tables([*parts, fold_lives(in_lives)])


def latest_per_key(rows: pa.Table) -> pa.Table:
    """Return the latest row of each key.

    A key is identified by `relation` and `text`, the column with the joined values of the key.
    """
    ordered = rows.select(["relation", "text", "position", "ordinal"]).append_column("row", _numbers(rows.num_rows))
    if not _is_ordered(rows):  # pyarrow sorts stably and groups in the order of the rows
        ordered = ordered.sort_by(_LOG_ORDER)
    # to compare relations takes half of the time, and most ranges of a backlog have only one
    key = ["text"] if _is_of_one_relation(rows) else _KEY
    # in one thread, because otherwise `last` need not be the last row
    latest = ordered.group_by(key, use_threads=False).aggregate([("row", "last")])
    if latest.num_rows == rows.num_rows:  # a first copy
        return rows
    is_latest = np.zeros(rows.num_rows, np.bool_)
    is_latest[latest["row_last"].to_numpy()] = True
    # filter copies only the rows that remain; take would first concatenate the chunks of all files
    return rows.filter(pa.array(is_latest))


def _is_of_one_relation(rows: pa.Table) -> bool:
    bounds = pc.min_max(rows["relation"])
    return bool(bounds["min"].as_py() == bounds["max"].as_py())


def filter_rows(rows: pa.Table, wanted: pa.ChunkedArray) -> pa.Table:
    """Return the rows whose entry in `wanted` is true; if all are true, return the table itself without a copy."""
    return rows if pc.all(wanted, min_count=0).as_py() else rows.filter(wanted)


def _is_ordered(rows: pa.Table) -> bool:
    """Return whether the rows are sorted by (position, ordinal)."""
    position, ordinal = rows["position"].to_numpy(), rows["ordinal"].to_numpy()
    later, same = position[1:] > position[:-1], position[1:] == position[:-1]
    return bool((later | (same & (ordinal[1:] >= ordinal[:-1]))).all())


def _numbers(count: int) -> pa.Array:
    return pa.arange(0, count)


def remove_fenced_rows(images: pa.Table, controls: pa.Table) -> pa.Table:
    """Return the row images without those that a truncate or the end of a full copy removes.

    controls: the control rows of the range, with its truncates (`t`) and ends of full copies (`g`).
    """
    fences: dict[int, Fence] = {}
    add_fences(fences, fence_rows(controls))
    return images.filter(pc.invert(is_fenced(images, fences))) if fences else images


def split_keyless(images: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Split images into rows of tables with a key and rows of tables without one, in this order.

    The first table gets a column `text`, which joins the values of the key.
    """
    has_key = pc.is_valid(images["key"])
    keyed = filter_rows(images, has_key)
    # Postgres text never contains a NUL
    return keyed.append_column("text", pc.binary_join(keyed["key"], "\0")), images.filter(pc.invert(has_key))


def split_partial(keyed: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Split rows by key: return (rows of keys without partial images, rows of all other keys).

    If a partial image moved a row to another key, all rows of the old key are in the second table as well.
    """
    return _split_by_key(keyed, keyed.filter(keyed["partial"]))


def _split_by_key(keyed: pa.Table, some: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Split rows by key: return (all other rows, rows of the keys and old keys that `some` has)."""
    if not some.num_rows:
        return keyed, some
    moved = some.filter(pc.is_valid(some["old_key"]))
    old = pa.table({"relation": moved["relation"], "text": pc.binary_join(moved["old_key"], "\0")})
    touched = pa.concat_tables([some.select(_KEY), old]).group_by(_KEY).aggregate([])
    numbered = keyed.select(_KEY).append_column("row", _numbers(keyed.num_rows))
    is_touched = np.zeros(keyed.num_rows, np.bool_)
    is_touched[numbered.join(touched, _KEY, join_type="left semi")["row"].to_numpy()] = True
    # not take, which concatenates the chunks first: one chunk of images cannot exceed 2 GiB
    return keyed.filter(pa.array(~is_touched)), keyed.filter(pa.array(is_touched))


def key_ids(keyed: pa.Table) -> np.ndarray:
    """Return one number per row; rows with the same relation and key have the same number."""
    texts = keyed["text"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    relations = keyed["relation"].combine_chunks().dictionary_encode()
    if len(relations.dictionary) == 1:
        return texts
    both = pa.array(texts * len(relations.dictionary) + relations.indices.to_numpy())
    return both.dictionary_encode().indices.to_numpy().astype(np.int64)


def _to_state(latest: pa.Table) -> pa.Table:
    """Convert the latest row of each key to a FOLDED_ARROW row; a deleted row has no image."""
    is_delete = pc.equal(latest["op"], Operation.DELETE.value)
    if not pc.any(is_delete, min_count=0).as_py():
        return _as_folded(latest, op="u")
    deleted = latest.filter(is_delete)
    deleted = deleted.set_column(
        deleted.column_names.index("after"), "after", pa.nulls(deleted.num_rows, _image_type())
    )
    alive = latest.filter(pc.invert(is_delete))
    return pa.concat_tables([_as_folded(alive, op="u"), _as_folded(deleted)])


def keyless_changes(rows: pa.Table) -> pa.Table:
    """Convert log rows of tables without a key to FOLDED_ARROW: added rows get op `u`, removed rows get `d`."""
    added = rows.filter(pc.not_equal(rows["op"], Operation.DELETE.value))
    removed = rows.filter(pc.is_valid(rows["before"]))
    removed = removed.set_column(removed.column_names.index("after"), "after", removed["before"])
    return pa.concat_tables([_as_folded(added, op="u"), _as_folded(removed, op="d")])


def _as_folded(rows: pa.Table, op: str | None = None, *, complete: bool | None = True) -> pa.Table:
    columns: dict[str, Any] = {
        "complete": pa.repeat(pa.scalar(complete, pa.bool_()), rows.num_rows),
        "base": pa.nulls(rows.num_rows, FOLDED_ARROW.field("base").type),
    }
    if op is not None:
        columns["op"] = pa.repeat(pa.scalar(op), rows.num_rows)
    values = [columns[name] if name in columns else rows[name] for name in FOLDED_ARROW.names]
    return pa.table(values, schema=FOLDED_ARROW)


def _image_type() -> pa.DataType:
    return FOLDED_ARROW.field("after").type


@dataclass(frozen=True, slots=True)
class Life:
    """The merged changes of one key since its last complete image, delete or move from another key."""

    row: Mapping[str, Any]
    """The latest log row of the key."""
    is_deleted: bool
    """Whether the latest log row is a delete."""
    image: Mapping[int, str | None] = field(default_factory=dict)
    complete: bool = True
    """Whether the image has every column."""
    base: Sequence[str | None] | None = None
    """Key of the target's row that has the missing columns, if it differs from the present key; otherwise None.

    A list of nulls: no row of the target has the missing columns.
    """

    def with_partial(self, row: Mapping[str, Any]) -> Life:
        """Return a copy of this life, with a later partial image as overlay over its image.

        row: the log row with the partial image.
        """
        return Life(row, False, {**self.image, **_image(row)}, self.complete and not self.is_deleted, self.base)

    def with_move(self, row: Mapping[str, Any]) -> Life:
        """Return the life of the new key, after an update with a partial image changed the key of this row.

        row: the log row of this update.
        """
        if self.is_deleted:  # a deleted row cannot have moved: the columns of an invalid log are not guessed
            return Life(row, False, _image(row), False, row["old_key"])
        base = None if self.complete else self.base or row["old_key"]
        return replace(self.with_partial(row), base=base)


def null_base(key: Sequence[str]) -> list[None]:
    """Return the `base` of a row that no row of the target can complete: a list with one null per key column."""
    return [None] * len(key)


def has_base_key(bases: pa.ChunkedArray) -> pa.Array:
    """Return one bool per base: true if the base is a key, false if it is null or the result of `null_base`."""
    return pc.list_element(bases.combine_chunks(), 0).is_valid()


def fold_lives(keyed: pa.Table) -> pa.Table:
    """Fold the rows of keys with partial images to FOLDED_ARROW rows; `keyed` has the column `text`.

    Rows are folded one by one only for keys with a partial insert, and for keys between which a partial image moved a
    row.
    """
    is_insert = pc.equal(keyed["op"], Operation.CREATE.value)
    has_other_base = pc.and_(keyed["partial"], pc.or_(pc.is_valid(keyed["old_key"]), is_insert))
    alone, linked = _split_by_key(keyed, keyed.filter(has_other_base))
    return pa.concat_tables([_fold_alone(alone), _fold_one_by_one(linked)])


def _fold_alone(keyed: pa.Table) -> pa.Table:
    """Fold the rows of keys whose partial images are updates that moved no row."""
    if not keyed.num_rows:
        return FOLDED_ARROW.empty_table()
    found = latest_images(keyed, key_ids(keyed))
    latest = keyed.select(["relation", "key", "position", "ordinal", "committed_at", "payload"]).take(found["row"])
    op = pc.if_else(pc.is_null(found["after"]), "d", "u")
    folded = _as_folded(latest.append_column("op", op).append_column("after", found["after"]))
    return folded.set_column(folded.column_names.index("complete"), "complete", found["complete"])


def _fold_one_by_one(rows: pa.Table) -> pa.Table:
    """Fold rows one by one in the order of the log."""
    lives: dict[tuple[int, tuple[str, ...]], Life] = {}
    before_delete: dict[tuple[int, tuple[str, ...]], tuple[Life | None, tuple[int, int]]] = {}
    for row in _in_order(rows):
        relation, key = row["relation"], tuple(row["key"])
        found = lives.get((relation, key))
        if row["op"] == Operation.DELETE:
            before_delete[relation, key] = found, (row["position"], row["ordinal"])
            life = Life(row, True)
        elif not row["partial"]:
            life = Life(row, False, _image(row))
        elif row["op"] == Operation.CREATE:
            life = Life(row, False, _image(row), False, null_base(row["key"]))
        elif row["old_key"] is None:
            life = (found or Life(row, False, complete=False)).with_partial(row)
        else:
            old = relation, tuple(row["old_key"])
            # the delete of the old key is the row just before the move: the life before that delete counts
            was, deleted_at = before_delete.get(old, (None, None))
            if deleted_at != (row["position"], row["ordinal"] - 1):
                was = lives.get(old)
            life = (was or Life(row, False, complete=False)).with_move(row)
        lives[relation, key] = life
    return pa.Table.from_pylist(list(map(_folded_row, lives.values())), schema=FOLDED_ARROW)


def _in_order(rows: pa.Table) -> Iterator[Mapping[str, Any]]:
    needed = ["relation", "op", "key", "old_key", "position", "ordinal", "committed_at", "after", "partial"]
    order = pc.sort_indices(rows.select(["position", "ordinal"]), _LOG_ORDER)
    for start in range(0, rows.num_rows, _PYTHON_ROWS):  # a Python object per value needs much memory
        yield from rows.select(needed).take(order[start : start + _PYTHON_ROWS]).to_pylist()


def _image(row: Mapping[str, Any]) -> dict[int, str | None]:
    return dict(row["after"] or ())


def _folded_row(life: Life) -> dict[str, Any]:
    row = {name: life.row[name] for name in ("relation", "key", "position", "ordinal", "committed_at")}
    if life.is_deleted:
        return row | {"op": "d", "complete": True}
    return row | {"op": "u", "after": list(life.image.items()), "complete": life.complete, "base": life.base}
