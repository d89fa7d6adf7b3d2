"""Groups of numpy arrays that the kernels read and fill: log rows, tuple layouts, and the values of one tuple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, Self

import numpy as np

from cdc.table import TableSchema

IGNORED: Final = -1
"""Relation number in the layout of a table that is not captured; the kernel skips its rows."""


class Texts(NamedTuple):
    """Buffers of one nested Arrow column (list or map of texts) that a kernel fills.

    A child is one item of a row's list, or one entry of a row's map.
    """

    ends: np.ndarray
    """int32, rows + 1 entries: entry i + 1 is the index after the last child of row i."""
    valid: np.ndarray
    """uint8 per row; 0 means null."""
    ids: np.ndarray
    """int32 per child: column id, which is the key in a map; unused in a list."""
    offsets: np.ndarray
    """int32, children + 1 entries: offsets of the children's texts in `text`."""
    present: np.ndarray
    """uint8 per child; 0 means null."""
    text: np.ndarray
    """uint8: the texts of all children in UTF-8."""
    used: np.ndarray
    """int64, two entries: the number of children so far, and the number of bytes in `text`."""


class Rows(NamedTuple):
    """Buffers of the columns of log rows that a kernel fills; Python code adds the columns payload and address."""

    position: np.ndarray
    ordinal: np.ndarray
    xid: np.ndarray
    committed_at: np.ndarray
    relation: np.ndarray
    """int64: relation number; a negative value means null."""
    topic: np.ndarray
    """int32: index of the topic; a negative value means null."""
    op: np.ndarray
    """int8: index of the operation in OPERATIONS."""
    partial: np.ndarray
    """uint8: 1 if the row image is partial."""
    key: Texts
    old_key: Texts
    before: Texts
    after: Texts


class Layouts(NamedTuple):
    """Arrays of all defined tuple layouts, sorted by OID; entry i of `oid`, `relation` and `topic` is layout i."""

    oid: np.ndarray
    relation: np.ndarray
    topic: np.ndarray
    first: np.ndarray
    """int64, number of layouts + 1 entries: index of each layout's first column in `ids` and `is_key`."""
    key_first: np.ndarray
    """int64, number of layouts + 1 entries: index of each layout's first key column in `keys`."""
    ids: np.ndarray
    is_key: np.ndarray
    keys: np.ndarray
    """int64: indices of the key columns in the tuple, in key order, for all layouts."""


class Values(NamedTuple):
    """Values of one tuple: the kind of each, and offset and size of its text in the frame buffer."""

    kind: np.ndarray
    at: np.ndarray
    size: np.ndarray


@dataclass(frozen=True, slots=True)
class TupleLayout:
    """Columns and key of one version of a relation, with which a decoder reads its tuples."""

    oid: int
    relation: int
    topic: str
    ids: tuple[int, ...]
    """Ids of the columns, in the order of the tuple."""
    key: tuple[int, ...]
    """Indices of the key columns in the tuple, in key order; empty for a table without a key."""

    @classmethod
    def of(cls, schema: TableSchema) -> Self:
        """Return the layout of the tuples that pgoutput sends; raises ValueError if a key column is not sent."""
        places = {column.id: index for index, column in enumerate(schema.sent)}
        unsent = [column.name for column in schema.key if column.id not in places]
        if unsent:
            raise ValueError(
                f"key column {unsent[0]!r} of table {schema.topic!r} is not sent by pgoutput: a key must consist of "
                "stored columns"
            )
        key = tuple(places[column.id] for column in schema.key)
        return cls(schema.oid, schema.relation, schema.topic, tuple(places), key)

    @classmethod
    def ignored(cls, oid: int) -> Self:
        """Return the layout of a relation that is not captured."""
        return cls(oid, IGNORED, "", (), ())


def pack_layouts(layouts: Sequence[tuple[TupleLayout, int]]) -> Layouts:
    """Return the arrays for the kernels from pairs of a layout and its topic index."""
    layouts = sorted(layouts, key=lambda pair: pair[0].oid)
    shapes = [layout for layout, _ in layouts]
    return Layouts(
        np.array([layout.oid for layout in shapes], np.int64),
        np.array([layout.relation for layout in shapes], np.int64),
        np.array([topic for _, topic in layouts], np.int32),
        np.array([0, *accumulate(len(layout.ids) for layout in shapes)], np.int64),
        np.array([0, *accumulate(len(layout.key) for layout in shapes)], np.int64),
        np.array([column for layout in shapes for column in layout.ids], np.int32),
        np.array([index in layout.key for layout in shapes for index in range(len(layout.ids))], np.uint8),
        np.array([index for layout in shapes for index in layout.key], np.int64),
    )


def without_layout(layouts: Layouts, oid: int) -> Layouts:
    """Return the arrays without the layout of the OID, or the same arrays if the OID has none; runs no Python loop."""
    at = int(np.searchsorted(layouts.oid, oid))
    if at == len(layouts.oid) or layouts.oid[at] != oid:
        return layouts
    (first, end), (key, key_end) = layouts.first[at : at + 2], layouts.key_first[at : at + 2]
    return Layouts(
        np.delete(layouts.oid, at),
        np.delete(layouts.relation, at),
        np.delete(layouts.topic, at),
        np.delete(layouts.first, at + 1) - np.where(np.arange(len(layouts.oid)) > at, end - first, 0),
        np.delete(layouts.key_first, at + 1) - np.where(np.arange(len(layouts.oid)) > at, key_end - key, 0),
        np.delete(layouts.ids, slice(first, end)),
        np.delete(layouts.is_key, slice(first, end)),
        np.delete(layouts.keys, slice(key, key_end)),
    )


def with_layout(layouts: Layouts, layout: TupleLayout, topic: int) -> Layouts:
    """Return the arrays with this layout, which replaces a layout with the same OID."""
    layouts, added = without_layout(layouts, layout.oid), pack_layouts([(layout, topic)])
    at = int(np.searchsorted(layouts.oid, layout.oid))
    first, key = layouts.first[at], layouts.key_first[at]

    def joined(whole: np.ndarray, index: int, part: np.ndarray) -> np.ndarray:
        return np.concatenate((whole[:index], part, whole[index:]))

    return Layouts(
        joined(layouts.oid, at, added.oid),
        joined(layouts.relation, at, added.relation),
        joined(layouts.topic, at, added.topic),
        np.concatenate((layouts.first[: at + 1], layouts.first[at:] + added.first[1])),
        np.concatenate((layouts.key_first[: at + 1], layouts.key_first[at:] + added.key_first[1])),
        joined(layouts.ids, first, added.ids),
        joined(layouts.is_key, first, added.is_key),
        joined(layouts.keys, key, added.keys),
    )
