"""Netting of tables without a key: an added and a removed row with equal images cancel out, and the log drops both.

The rows of such a table form a multiset, so only the number of equal rows counts. A pair may be removed if no reader
has applied only one of its two changes. All readers have passed the floor, so pairs up to the floor are removed. Of
several equal images the earliest cancel out, and the latest stay. An update has two halves: it removes the old image
and adds the new one, and each half cancels separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import TableSelection
from cdc.log.reader import read_file, stream_file
from cdc.log_row import ROW_OPERATIONS, Operation
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.folding.fold import remove_fenced_rows
from pipelines.folding.keyless_fold import keep_latest_per_id

CANCELLED_SCHEMA: Final = pa.schema([("position", pa.int64()), ("ordinal", pa.int64()), ("added", pa.bool_())])
"""Schema of cancelled halves of changes. `added` is true for the half that adds `after`, false for the half that
removes `before`.
"""
_COLUMNS: Final = ("relation", "op", "key", "position", "ordinal", "partial", "payload", "before", "after")
_NARROW: Final = ["relation", "op", "position", "ordinal"]
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_AT_ONCE: Final = 64 << 20
"""Approximate bytes of the rows whose images are converted to text in one step."""
_NUMBER: Final = "number"


def find_cancelled_halves(files: Sequence[LogFile], floor: Position) -> pa.Table:
    """Find the added and removed row images up to the floor that cancel each other out, in tables without a key.

    The result has the columns of CANCELLED_SCHEMA.
    files: the files of all runs of the log. Tables are read one after the other, with 50 bytes of memory per row.
    """
    found = (_cancelled_of_table(files, relation, floor) for relation in (_keyless_relations(files) if floor else ()))
    return pa.concat_tables([CANCELLED_SCHEMA.empty_table(), *found])


def remove_cancelled_halves(rows: pa.Table, cancelled: pa.Table) -> pa.Table:
    """Remove the row images listed in `cancelled` from the changes in `rows`.

    An update that loses only its before image becomes an insert; one that loses only its after image, a delete.
    """
    adds, removes = pc.not_equal(rows["op"], Operation.DELETE.value).to_numpy(), pc.is_valid(rows["before"]).to_numpy()
    numbered = rows.select(["position", "ordinal"]).append_column(_NUMBER, pa.arange(0, rows.num_rows))
    matched = cancelled.join(numbered, ["position", "ordinal"], join_type="inner")
    if not matched.num_rows:
        return rows
    numbers, is_added = matched[_NUMBER].to_numpy(), matched["added"].to_numpy()
    still_adds, still_removes = adds.copy(), removes.copy()
    still_adds[numbers[is_added]] = still_removes[numbers[~is_added]] = False
    only_adds = pa.array(still_adds & ~still_removes & removes)
    only_removes = pa.array(still_removes & ~still_adds & adds)
    rows = _replace(rows, "op", pc.if_else(only_removes, "d", pc.if_else(only_adds, "c", rows["op"])))
    rows = _replace(rows, "before", _null_where(only_adds, rows["before"]))
    rows = _replace(rows, "after", _null_where(only_removes, rows["after"]))
    is_changed = np.zeros(rows.num_rows, bool)
    is_changed[numbers] = True
    return rows.filter(pa.array(still_adds | still_removes | ~is_changed))


def _keyless_relations(files: Iterable[LogFile]) -> list[int]:
    """Return the relations that never had a key."""
    keyed: dict[int, bool] = {}
    for file in files:
        if file.schemas_only:
            for payload in read_file(file, Position(0), file.last, ["payload"])["payload"].to_pylist():
                schema = TableSchema.from_json(payload)
                keyed[schema.relation] = keyed.get(schema.relation, False) or bool(schema.key)
    return sorted(relation for relation, has_key in keyed.items() if not has_key)


def _cancelled_of_table(files: Sequence[LogFile], relation: int, floor: Position) -> pa.Table:
    only = TableSelection(relations=(relation, relation))
    found = [
        part
        for file in only.narrowed(file for file in files if not file.schemas_only)
        for rows in stream_file(file, Position(0), floor, _COLUMNS, only)
        for part in _halves(rows)
    ]
    if not found:
        return CANCELLED_SCHEMA.empty_table()
    # rows that a truncate or a copy has removed must not cancel later ones
    rows = pa.concat_tables(found)
    is_half = pc.is_valid(rows["image"])
    halves = remove_fenced_rows(rows.filter(is_half), rows.filter(pc.invert(is_half)))
    ids = halves["image"].combine_chunks().dictionary_encode().indices.to_numpy()
    added = halves["added"].to_numpy()
    count = [np.bincount(ids[which], minlength=ids.max(initial=0) + 1) for which in (~added, added)]
    pairs = np.minimum(*count)
    # number of halves that stay, by image and then by removed or added
    remaining = np.stack([count[0] - pairs, count[1] - pairs], axis=1).ravel()
    kept = keep_latest_per_id(halves.append_column(_NUMBER, pa.arange(0, halves.num_rows)), ids * 2 + added, remaining)
    is_cancelled = np.ones(halves.num_rows, bool)
    is_cancelled[kept[_NUMBER].to_numpy()] = False
    return halves.filter(pa.array(is_cancelled)).select(CANCELLED_SCHEMA.names).cast(CANCELLED_SCHEMA)


def _halves(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield one row for each added and each removed image, with a digest of the image in 16 bytes.

    Truncates and ends of full copies are rows with a null digest.
    """
    fences = rows.filter(pc.is_in(rows["op"], _FENCES))
    yield _with_digests(fences, added=False, digests=pa.nulls(fences.num_rows, pa.binary(16)))
    is_row = pc.and_(pc.is_in(rows["op"], _ROWS), pc.is_null(rows["key"]))
    images = rows.filter(pc.and_(is_row, pc.invert(rows["partial"])))
    step = max(1, images.num_rows * _AT_ONCE // max(1, images.nbytes))
    for start in range(0, images.num_rows, step):
        some = images.slice(start, step)
        own = some.filter(pc.and_(pc.not_equal(some["op"], Operation.DELETE.value), pc.is_valid(some["after"])))
        yield _with_digests(own, added=True, digests=_digests(own["after"]))
        own = some.filter(pc.is_valid(some["before"]))
        yield _with_digests(own, added=False, digests=_digests(own["before"]))


def _with_digests(rows: pa.Table, *, added: bool, digests: pa.Array) -> pa.Table:
    half = rows.select([*_NARROW, "payload"])
    return half.append_column("added", pa.repeat(pa.scalar(added), rows.num_rows)).append_column("image", digests)


def _digests(images: pa.ChunkedArray) -> pa.Array:
    """Return one digest of 16 bytes per image; equal images have equal digests.

    A column with the value NULL and an absent column give different digests.
    """
    maps = images.combine_chunks()
    ids, values = pc.cast(maps.keys, pa.string()), maps.items
    # Postgres text never contains a NUL
    entries = pc.binary_join_element_wise(ids, values, "=", null_handling="skip")
    texts = pc.binary_join(pa.ListArray.from_arrays(maps.offsets, entries), "\0")
    return pa.array([blake2b(text.encode(), digest_size=16).digest() for text in texts.to_pylist()], pa.binary(16))


def _replace(rows: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)


def _null_where(is_null: pa.Array, images: pa.ChunkedArray) -> pa.Array:
    return pc.if_else(is_null, pa.nulls(len(is_null), images.type), images.combine_chunks())
