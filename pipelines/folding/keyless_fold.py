"""The fold of tables without a key, whose rows form a multiset: a row is identified only by all of its values.

Equal rows may occur more than once, and a delete removes any one of them. So added and removed rows are counted per
image.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import TableSchema
from pipelines.types.typed_rows import text_columns


def net_changes(images: pa.Table, schema: TableSchema) -> pa.Table:
    """Cancel added rows against removed rows with equal images; return the rows that remain.

    images: FOLDED_ARROW rows of one table. If a column was added after an image was written, the comparison uses the
    value that Postgres gave existing rows for this column. Of several rows with equal images the latest remain.
    """
    ids = row_ids(text_columns(images, schema), images.num_rows)
    removed = pc.equal(images["op"], "d").to_numpy()
    left = np.bincount(ids, np.where(removed, -1, 1)).astype(np.int64)[ids]
    wanted = np.where(removed, -left, left)
    # one group per image and kind of row
    return images.filter(pa.array(_ranks(ids * 2 + removed, images) < wanted))


def image_texts(images: pa.Table, schema: TableSchema) -> pa.Array:
    """Return one text per row image; equal images have equal texts, and different images almost always differ."""
    columns = text_columns(images, schema)
    return pc.binary_join_element_wise(*columns, "\0", null_handling="replace", null_replacement="")


def keep_latest_per_id(rows: pa.Table, ids: np.ndarray, wanted: np.ndarray) -> pa.Table:
    """Keep the latest `wanted[id]` rows of every id, in the order of `position` and `ordinal`.

    ids: the id of each row.
    """
    return rows.filter(pa.array(_ranks(ids, rows) < wanted[ids]))


def row_ids(columns: Iterable[pa.Array | pa.ChunkedArray], rows: int) -> np.ndarray:
    """Return one number per row; rows with equal values in all columns get the same number. NULL equals NULL.

    rows: number of rows.
    """
    ids = np.zeros(rows, np.int64)
    for column in columns:
        values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if pa.types.is_floating(values.type):  # as bits: 0 and -0 differ, NaN equals NaN
            values = values.view(pa.int64() if values.type == pa.float64() else pa.int32())
        elif pa.types.is_list(values.type):  # Arrow cannot dictionary-encode lists
            values = pa.array([None if value is None else repr(value) for value in values.to_pylist()], pa.string())
        codes = values.dictionary_encode(null_encoding="encode")
        both = ids * max(1, len(codes.dictionary)) + codes.indices.to_numpy()
        ids = np.unique(both, return_inverse=True)[1]
    return ids


def _ranks(groups: np.ndarray, rows: pa.Table) -> np.ndarray:
    """Return, for each row, how many rows of its group are later by (position, ordinal)."""
    sort_keys = (-rows["ordinal"].to_numpy(), -rows["position"].to_numpy(), groups)
    order = np.lexsort(sort_keys)
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lengths = np.diff(begins, append=len(order))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(begins, lengths)
    return ranks
