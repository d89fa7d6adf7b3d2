"""Multisets: the rows of a table without a key, each known by all that it holds and by nothing else.

Of equal rows it has as many as it has, and a delete takes away any one of them. So what came and what went is
counted by image, and a row of a target goes by its place, which no other one has.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import TableSchema
from pipelines.types.rows import text_columns


def netted(images: pa.Table, schema: TableSchema) -> pa.Table:
    """What is left of FOLDED_ARROW rows of one table when equal ones that came and went cancel each other out.

    An image that lacks a column is as rows are that are older than the column. Of more than one that came, or went,
    the latest stay.
    """
    ids = identities(text_columns(images, schema), images.num_rows)
    went = pc.equal(images["op"], "d").to_numpy()
    left = np.bincount(ids, np.where(went, -1, 1)).astype(np.int64)[ids]
    wanted = np.where(went, -left, left)
    # ids and kinds that were together already are numbered: a row is one of its group
    return images.filter(pa.array(_ranks(ids * 2 + went, images) < wanted))


def as_text(images: pa.Table, schema: TableSchema) -> pa.Array:
    """Every image as one text: the same for equal rows, and seldom for others."""
    columns = text_columns(images, schema)
    return pc.binary_join_element_wise(*columns, "\0", null_handling="replace", null_replacement="")


def latest_of(rows: pa.Table, ids: np.ndarray, wanted: np.ndarray) -> pa.Table:
    """Of rows with `position` and `ordinal`, and the id of each, the latest `wanted[id]` of every id."""
    return rows.filter(pa.array(_ranks(ids, rows) < wanted[ids]))


def identities(columns: Iterable[pa.Array | pa.ChunkedArray], rows: int) -> np.ndarray:
    """A number for every row, int64: equal for rows that are equal in all columns, bit by bit, nulls among them."""
    ids = np.zeros(rows, np.int64)
    for column in columns:
        values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if pa.types.is_floating(values.type):  # 0 and -0 differ, NaN is itself
            values = values.view(pa.int64() if values.type == pa.float64() else pa.int32())
        elif pa.types.is_list(values.type):  # which Arrow does not number
            values = pa.array([None if value is None else repr(value) for value in values.to_pylist()], pa.string())
        codes = values.dictionary_encode(null_encoding="encode")
        both = ids * max(1, len(codes.dictionary)) + codes.indices.to_numpy()
        ids = np.unique(both, return_inverse=True)[1]
    return ids


def _ranks(groups: np.ndarray, rows: pa.Table) -> np.ndarray:
    """How many later rows of its group each has."""
    places = (-rows["ordinal"].to_numpy(), -rows["position"].to_numpy(), groups)
    order = np.lexsort(places)
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lengths = np.diff(begins, append=len(order))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(begins, lengths)
    return ranks
