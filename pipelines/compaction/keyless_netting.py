"""Cancelled: of tables without a key, changes that undo each other, so that such a table is not kept with all its past.

Of equal rows it matters how many there are. So an image that came and an equal one that went are nothing together,
for whoever has both or neither: below the floor everybody does. Where more came than went the latest stay, and the
other way round. An update is both: the old image went and the new one came, and each half cancels by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROW_OPERATIONS, Operation
from cdc.log.layout import LogFile
from cdc.log.ranges import TableSelection
from cdc.log.reader import read_file, stream_file
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.folding.fold import remove_fenced_rows
from pipelines.folding.keyless_fold import keep_latest_per_id

CANCELLED: Final = pa.schema([("position", pa.int64()), ("ordinal", pa.int64()), ("came", pa.bool_())])
"""A half of a row that is cancelled: the image that came with it, or the one that went."""
_COLUMNS: Final = ("relation", "op", "key", "position", "ordinal", "partial", "payload", "before", "after")
_NARROW: Final = ["relation", "op", "position", "ordinal"]
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_AT_ONCE: Final = 64 << 20
"""Bytes of rows whose images are text at the same time."""
_NUMBER: Final = "number"


def cancelled(files: Sequence[LogFile], floor: Position) -> pa.Table:
    """What cancels in the runs of a log, all of them, up to a position that every reader has passed; CANCELLED.

    Holds some 50 bytes for each row up to there of one table at a time.
    """
    found = (_of_table(files, relation, floor) for relation in (_keyless(files) if floor else ()))
    return pa.concat_tables([CANCELLED.empty_table(), *found])


def without_cancelled(rows: pa.Table, found: pa.Table) -> pa.Table:
    """The rows without those halves: an update of which one is left is what that one is, a row without any is gone."""
    came, went = pc.not_equal(rows["op"], Operation.DELETE.value).to_numpy(), pc.is_valid(rows["before"]).to_numpy()
    numbered = rows.select(["position", "ordinal"]).append_column(_NUMBER, pa.arange(0, rows.num_rows))
    struck = found.join(numbered, ["position", "ordinal"], join_type="inner")
    if not struck.num_rows:
        return rows
    numbers, halves = struck[_NUMBER].to_numpy(), struck["came"].to_numpy()
    left_came, left_went = came.copy(), went.copy()
    left_came[numbers[halves]] = left_went[numbers[~halves]] = False
    only_came, only_went = pa.array(left_came & ~left_went & went), pa.array(left_went & ~left_came & came)
    rows = _with(rows, "op", pc.if_else(only_went, "d", pc.if_else(only_came, "c", rows["op"])))
    rows = _with(rows, "before", _unless(only_came, rows["before"]))
    rows = _with(rows, "after", _unless(only_went, rows["after"]))
    touched = np.zeros(rows.num_rows, bool)
    touched[numbers] = True
    return rows.filter(pa.array(left_came | left_went | ~touched))


def _keyless(files: Iterable[LogFile]) -> list[int]:
    """The tables that never had a key."""
    keyed: dict[int, bool] = {}
    for file in files:
        if file.schemas_only:
            for payload in read_file(file, Position(0), file.last, ["payload"])["payload"].to_pylist():
                schema = TableSchema.from_json(payload)
                keyed[schema.relation] = keyed.get(schema.relation, False) or bool(schema.key)
    return sorted(relation for relation, has_key in keyed.items() if not has_key)


def _of_table(files: Sequence[LogFile], relation: int, floor: Position) -> pa.Table:
    only = TableSelection(relations=(relation, relation))
    found = [
        part
        for file in only.narrowed(file for file in files if not file.schemas_only)
        for rows in stream_file(file, Position(0), floor, _COLUMNS, only)
        for part in _halves(rows)
    ]
    if not found:
        return CANCELLED.empty_table()
    # what a truncate or a copy has ended is gone by itself
    rows = pa.concat_tables(found)
    is_half = pc.is_valid(rows["image"])
    halves = remove_fenced_rows(rows.filter(is_half), rows.filter(pc.invert(is_half)))
    ids = halves["image"].combine_chunks().dictionary_encode().indices.to_numpy()
    came = halves["came"].to_numpy()
    count = [np.bincount(ids[which], minlength=ids.max(initial=0) + 1) for which in (~came, came)]
    both = np.minimum(*count)
    # (image, went or came) → how many stay
    stay = np.stack([count[0] - both, count[1] - both], axis=1).ravel()
    kept = keep_latest_per_id(halves.append_column(_NUMBER, pa.arange(0, halves.num_rows)), ids * 2 + came, stay)
    struck = np.ones(halves.num_rows, bool)
    struck[kept[_NUMBER].to_numpy()] = False
    return halves.filter(pa.array(struck)).select(CANCELLED.names).cast(CANCELLED)


def _halves(rows: pa.Table) -> Iterator[pa.Table]:
    """Every image that came or went, known by 16 bytes, and what ended rows, without an image."""
    fences = rows.filter(pc.is_in(rows["op"], _FENCES))
    yield _known(fences, came=False, images=pa.nulls(fences.num_rows, pa.binary(16)))
    is_row = pc.and_(pc.is_in(rows["op"], _ROWS), pc.is_null(rows["key"]))
    images = rows.filter(pc.and_(is_row, pc.invert(rows["partial"])))
    step = max(1, images.num_rows * _AT_ONCE // max(1, images.nbytes))
    for start in range(0, images.num_rows, step):
        some = images.slice(start, step)
        own = some.filter(pc.and_(pc.not_equal(some["op"], Operation.DELETE.value), pc.is_valid(some["after"])))
        yield _known(own, came=True, images=_identities(own["after"]))
        own = some.filter(pc.is_valid(some["before"]))
        yield _known(own, came=False, images=_identities(own["before"]))


def _known(rows: pa.Table, *, came: bool, images: pa.Array) -> pa.Table:
    half = rows.select([*_NARROW, "payload"])
    return half.append_column("came", pa.repeat(pa.scalar(came), rows.num_rows)).append_column("image", images)


def _identities(images: pa.ChunkedArray) -> pa.Array:
    """The same 16 bytes for equal images, column by column, NULL and absent told apart."""
    whole = images.combine_chunks()
    ids, values = pc.cast(whole.keys, pa.string()), whole.items
    # text of Postgres never holds a NUL
    entries = pc.binary_join_element_wise(ids, values, "=", null_handling="skip")
    texts = pc.binary_join(pa.ListArray.from_arrays(whole.offsets, entries), "\0")
    return pa.array([blake2b(text.encode(), digest_size=16).digest() for text in texts.to_pylist()], pa.binary(16))


def _with(rows: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)


def _unless(gone: pa.Array, images: pa.ChunkedArray) -> pa.Array:
    return pc.if_else(gone, pa.nulls(len(gone), images.type), images.combine_chunks())
