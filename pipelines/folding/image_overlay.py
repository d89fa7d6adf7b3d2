"""Overlay of partial images: merges the images of each key column by column, without a Python object per row.

An update of a row with an unchanged large value is a partial image: the value is missing. The result of a key begins
with its latest complete image, if the rows have one. Each later partial image replaces the columns that it has.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import LOG_SCHEMA, Operation

_IMAGE: Final = LOG_SCHEMA.field("after").type
_LARGE_IMAGE: Final = pa.map_(pa.int32(), pa.large_string())
"""The type of images while they are merged: the texts of one Arrow array of strings cannot exceed 2 GiB."""
PART_BYTES: Final = 1 << 30
"""Bytes of images that are merged at once, so that no array of the result exceeds 2 GiB."""


def latest_images(rows: pa.Table, keys: np.ndarray, part_bytes: int = PART_BYTES) -> pa.Table:
    """Return one row per key: `row`, the number of its latest row, `after`, its merged image, and `complete`.

    rows: log rows in any order; each partial image is an update that moved no row. keys: number of each row's key.
    `after` is null if the latest row is a delete. `complete` is true for a delete, and if the image has every column.
    part_bytes: bytes of images that are merged at once.
    """
    parts = rows["after"].nbytes // part_bytes + 1
    order = np.lexsort((rows["ordinal"].to_numpy(), rows["position"].to_numpy(), keys))
    found = [_of_ordered(rows, order[keys[order] % parts == part], keys) for part in range(parts)]
    return pa.concat_tables(found)


def _of_ordered(rows: pa.Table, order: np.ndarray, keys: np.ndarray) -> pa.Table:
    """Return the result for the rows with the numbers `order`, which are sorted by key and by the order of the log."""
    places, sorted_keys = np.arange(len(order)), keys[order]
    first = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
    last = np.append(first, len(order))[1:] - 1
    is_partial = rows["partial"].to_numpy()[order]
    is_delete = pc.equal(rows["op"], Operation.DELETE.value).to_numpy()[order]
    # the latest row of each key that needs no image before it, else -1
    start = np.maximum.reduceat(np.where(is_partial, -1, places), first)
    is_deleted = is_delete[last]
    has_start = (start >= 0) & ~is_delete[start]
    merged = ~is_deleted & (np.maximum(start, first) < last)
    alone = ~is_deleted & ~merged
    size = last - first + 1
    in_merged = np.repeat(merged, size) & (places >= np.repeat(start, size))
    latest = np.concatenate([last[merged], last[alone], last[is_deleted]])
    after = [
        *_merged_images(rows, order[in_merged], np.repeat(np.cumsum(merged) - 1, size)[in_merged]),
        *rows["after"].take(pa.array(order[last[alone]])).chunks,
        pa.nulls(int(is_deleted.sum()), _IMAGE),
    ]
    complete = np.concatenate([has_start[merged], has_start[alone], is_delete[last[is_deleted]]])
    return pa.table({"row": order[latest], "after": pa.chunked_array(after, _IMAGE), "complete": complete})


def _merged_images(rows: pa.Table, numbers: np.ndarray, results: np.ndarray) -> list[Any]:
    """Return one image per result, in order.

    numbers: the rows with images, sorted by result and by the order of the log. results: number of each row's result.
    """
    if not len(numbers):
        return []
    images = rows["after"].cast(_LARGE_IMAGE).take(pa.array(numbers)).combine_chunks()
    entries = np.repeat(results, np.diff(images.offsets.to_numpy()))
    columns = images.keys.to_numpy()
    # the latest entry of each column of each result
    place = entries * (int(columns.max(initial=0)) + 1) + columns
    by_place = np.argsort(place, kind="stable")
    is_latest = np.diff(place[by_place], append=-1) != 0
    chosen = by_place[is_latest]
    counts = np.bincount(entries[chosen], minlength=int(results[-1]) + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    items = images.items.take(pa.array(chosen)).cast(pa.string())
    return [pa.MapArray.from_arrays(pa.array(offsets), images.keys.take(pa.array(chosen)), items).cast(_IMAGE)]
