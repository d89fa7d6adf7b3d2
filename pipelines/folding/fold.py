"""The fold: a range of log rows → the latest state of every key, for every sink and for compaction.

A key's rows are cut into **lives**. A full image (`c`, `r`, or `u` with every column), a delete, and a move from
another key each begin one; partial images go on with the life they find. Only a key's last life counts, merged
column by column. Keys without partial images need no lives: their latest row is their state.

This file folds Arrow in one process: the specification, and what folds every range that is smaller than the time
a Spark job takes to start. `fold_spark` is the same as a Spark plan, for ranges that are not; property tests hold
the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA, ROW_OPERATIONS, Operation
from pipelines.folding.range_statistics import Fence, add_fences, addressed_to, hidden, marks

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
"""One row per (relation, key), and the control rows as they came.

op is `u` (the row is as `after` says), `d` (gone), a control letter `s t g`, or `b`, the boundary of a batch.
position, ordinal and committed_at are those of the latest change. `complete`: after holds every column that is
sent; else the target's row under `base`, or under the key itself when base is null, has the others. A base of nulls is
no row's: where a publication has a row filter, an update that lets a row in is sent as an insert, without what did not
change, and what an older row of that key held is not its. A table without
a key is not folded: its rows have a null key, `u` says that one more row is as `after`, `d` that one less is, and an
update is both. How many are left of equal ones is for pipelines.folding.keyless_fold.
"""

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_KEY: Final = ["relation", "text"]
_PLACE: Final = [("position", "ascending"), ("ordinal", "ascending")]


def fold(rows: pa.Table, *, sink: str) -> pa.Table:
    """Log rows of one range, whole transactions, in any order → FOLDED_ARROW, in any order.

    Rows addressed to another sink are passed over; rows before the last `t` of their relation, or before the
    generation that a `g` ends, are dropped.
    """
    rows = kept(rows, addressed_to(rows["address"], sink))
    is_row = pc.is_in(rows["op"], _ROWS)
    controls = rows.filter(pc.and_(pc.invert(is_row), pc.not_equal(rows["op"], Operation.MESSAGE.value)))
    images = after_fences(kept(rows, is_row), controls)
    keyed, keyless = by_key(images)
    whole, in_lives = apart_from_partial(keyed)
    parts = [_stated(latest_per_key(whole)), changes(keyless), _as_folded(controls, complete=None)]
    return pa.concat_tables([*parts, last_lives(in_lives)])


def latest_per_key(rows: pa.Table) -> pa.Table:
    """Rows with `text` → the latest of each (relation, text)."""
    ordered = rows.select(["relation", "text", "position", "ordinal"]).append_column("row", _numbers(rows.num_rows))
    if not _is_ordered(rows):  # pyarrow sorts stably and groups in the order it meets
        ordered = ordered.sort_by(_PLACE)
    # one thread: `last` means the last row only then
    latest = ordered.group_by(_KEY, use_threads=False).aggregate([("row", "last")])
    is_latest = np.zeros(rows.num_rows, np.bool_)
    is_latest[latest["row_last"].to_numpy()] = True
    # of many pieces, as files are read in, filter copies what stays, and take would copy all of them first
    return rows.filter(pa.array(is_latest))


def kept(rows: pa.Table, wanted: pa.ChunkedArray) -> pa.Table:
    """The rows that are wanted; mostly those are all, and none is copied."""
    return rows if pc.all(wanted, min_count=0).as_py() else rows.filter(wanted)


def _is_ordered(rows: pa.Table) -> bool:
    """Whether rows stand in the order of the log, as those of one table do that are read from it."""
    position, ordinal = rows["position"].to_numpy(), rows["ordinal"].to_numpy()
    later, same = position[1:] > position[:-1], position[1:] == position[:-1]
    return bool((later | (same & (ordinal[1:] >= ordinal[:-1]))).all())


def _numbers(count: int) -> pa.Array:
    return pa.arange(0, count)


def after_fences(images: pa.Table, controls: pa.Table) -> pa.Table:
    """The images that no `t` and no `g` among the controls has ended."""
    fences: dict[int, Fence] = {}
    add_fences(fences, marks(controls))
    return images.filter(pc.invert(hidden(images, fences))) if fences else images


def by_key(images: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Rows of tables with a key, their key added as one `text`, and those of keyless ones."""
    has_key = pc.is_valid(images["key"])
    keyed = kept(images, has_key)
    # Postgres text never holds a NUL
    return keyed.append_column("text", pc.binary_join(keyed["key"], "\0")), images.filter(pc.invert(has_key))


def apart_from_partial(keyed: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Rows of keys that only full images and deletes touch, and the others: few, and worth a closer look."""
    partial = keyed.filter(keyed["partial"])
    if not partial.num_rows:
        return keyed, partial
    moved = partial.filter(pc.is_valid(partial["old_key"]))
    old = pa.table({"relation": moved["relation"], "text": pc.binary_join(moved["old_key"], "\0")})
    touched = pa.concat_tables([partial.select(_KEY), old]).group_by(_KEY).aggregate([])
    numbered = keyed.select(_KEY).append_column("row", _numbers(keyed.num_rows))
    in_lives = np.zeros(keyed.num_rows, np.bool_)
    in_lives[numbered.join(touched, _KEY, join_type="left semi")["row"].to_numpy()] = True
    # not take, which joins the pieces first: of an image more than 2 GiB are not to be had in one
    return keyed.filter(pa.array(~in_lives)), keyed.filter(pa.array(in_lives))


def _stated(latest: pa.Table) -> pa.Table:
    """Latest rows of keys → their state; the image of a deleted row is not part of it."""
    is_delete = pc.equal(latest["op"], Operation.DELETE.value)
    gone = latest.filter(is_delete)
    gone = gone.set_column(gone.column_names.index("after"), "after", pa.nulls(gone.num_rows, _image_type()))
    alive = latest.filter(pc.invert(is_delete))
    return pa.concat_tables([_as_folded(alive, op="u"), _as_folded(gone)])


def changes(rows: pa.Table) -> pa.Table:
    """Rows of tables without a key (LOG_SCHEMA) → FOLDED_ARROW, what came and what went."""
    came = rows.filter(pc.not_equal(rows["op"], Operation.DELETE.value))
    went = rows.filter(pc.is_valid(rows["before"]))
    went = went.set_column(went.column_names.index("after"), "after", went["before"])
    return pa.concat_tables([_as_folded(came, op="u"), _as_folded(went, op="d")])


def _as_folded(rows: pa.Table, op: str | None = None, *, complete: bool | None = True) -> pa.Table:
    said: dict[str, Any] = {
        "complete": pa.repeat(pa.scalar(complete, pa.bool_()), rows.num_rows),
        "base": pa.nulls(rows.num_rows, FOLDED_ARROW.field("base").type),
    }
    if op is not None:
        said["op"] = pa.repeat(pa.scalar(op), rows.num_rows)
    columns = [said[name] if name in said else rows[name] for name in FOLDED_ARROW.names]
    return pa.table(columns, schema=FOLDED_ARROW)


def _image_type() -> pa.DataType:
    return FOLDED_ARROW.field("after").type


@dataclass(frozen=True, slots=True)
class Life:
    """A key's life as far as the rows that were seen tell it."""

    row: Mapping[str, Any]
    """The latest row."""
    gone: bool
    """Whether that deleted it."""
    image: Mapping[int, str | None] = field(default_factory=dict)
    complete: bool = True
    """Whether the image has every column."""
    base: Sequence[str | None] | None = None
    """The key under which the target held the row before the range, if not under its own."""

    def goes_on(self, row: Mapping[str, Any]) -> Life:
        """The life after a partial image; one after a delete, which no sane log has, is not guessed to be whole."""
        return Life(row, False, {**self.image, **_image(row)}, self.complete and not self.gone, self.base)

    def moved(self, row: Mapping[str, Any]) -> Life:
        """The life after a move to another key with a partial image."""
        if self.gone:  # a row that was gone cannot have moved: of such a log nothing is guessed
            return Life(row, False, _image(row), False, row["old_key"])
        base = None if self.complete else self.base or row["old_key"]
        return replace(self.goes_on(row), base=base)


def nowhere(key: Sequence[str]) -> list[None]:
    """The base of a row that has none."""
    return [None] * len(key)


def named(bases: pa.ChunkedArray) -> pa.Array:
    """Which bases name a key: neither null nor nowhere; bool."""
    return pc.list_element(bases.combine_chunks(), 0).is_valid()


def last_lives(rows: pa.Table) -> pa.Table:
    """Rows of keys with partial images → FOLDED_ARROW, one by one in the order of the log."""
    lives: dict[tuple[int, tuple[str, ...]], Life] = {}
    left: dict[tuple[int, tuple[str, ...]], tuple[Life | None, tuple[int, int]]] = {}
    for row in _in_order(rows):
        relation, key = row["relation"], tuple(row["key"])
        found = lives.get((relation, key))
        if row["op"] == Operation.DELETE:
            left[relation, key] = found, (row["position"], row["ordinal"])
            life = Life(row, True)
        elif not row["partial"]:
            life = Life(row, False, _image(row))
        elif row["op"] == Operation.CREATE:
            life = Life(row, False, _image(row), False, nowhere(row["key"]))
        elif row["old_key"] is None:
            life = (found or Life(row, False, complete=False)).goes_on(row)
        else:
            old = relation, tuple(row["old_key"])
            # the move's own delete of the old key stands just before it: what counts is the life that it ended
            was, place = left.get(old, (None, None))
            if place != (row["position"], row["ordinal"] - 1):
                was = lives.get(old)
            life = (was or Life(row, False, complete=False)).moved(row)
        lives[relation, key] = life
    return pa.Table.from_pylist(list(map(_told, lives.values())), schema=FOLDED_ARROW)


def _in_order(rows: pa.Table) -> Iterable[Mapping[str, Any]]:
    if not rows.num_rows:
        return []
    needed = ["relation", "op", "key", "old_key", "position", "ordinal", "committed_at", "after", "partial"]
    order = pc.sort_indices(rows.select(["position", "ordinal"]), _PLACE)
    listed: list[dict[str, Any]] = rows.select(needed).take(order).to_pylist()
    return listed


def _image(row: Mapping[str, Any]) -> dict[int, str | None]:
    return dict(row["after"] or ())


def _told(life: Life) -> dict[str, Any]:
    row = {name: life.row[name] for name in ("relation", "key", "position", "ordinal", "committed_at")}
    if life.gone:
        return row | {"op": "d", "complete": True}
    return row | {"op": "u", "after": list(life.image.items()), "complete": life.complete, "base": life.base}
