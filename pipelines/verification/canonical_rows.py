"""Sides: log rows, Delta batches and search documents as batches of canonical text in one column order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import Column
from pipelines.verification.canonical_text import source_text, target_text

DOCUMENTS_AT_ONCE: Final = 4096
"""Search documents per batch."""


class SearchDocument(Protocol):
    """One row of a search index."""

    @property
    def source(self) -> Mapping[str, str | None]:
        """Column name → text."""


def source_batch(rows: pa.RecordBatch, places: Sequence[int], kinds: Sequence[pa.DataType]) -> pa.RecordBatch:
    """Copied log rows as text columns.

    `places`: which of the sent columns, in the order wanted; `kinds`: the target's type of each.
    Every image of a copy holds every sent column in the same order.
    """
    images = rows.column("after")
    offsets = images.offsets.to_numpy()
    if not len(images):
        return text_batch([pa.array([], pa.string()) for _ in places])
    width = int(offsets[1] - offsets[0])
    starts = np.arange(len(images), dtype=np.int64) * width + int(offsets[0])
    columns = [images.items.take(pa.array(starts + place)) for place in places]
    return text_batch([source_text(text, kind) for text, kind in zip(columns, kinds, strict=True)])


def image_batch(images: pa.Array, columns: Sequence[Column], kinds: Sequence[pa.DataType]) -> pa.RecordBatch:
    """Images of the log (column id → text) as text columns; `kinds`: the target's type of each.

    An image that lacks a column is of a row older than it, and has what Postgres says such rows have.
    """
    maps = images.combine_chunks() if isinstance(images, pa.ChunkedArray) else images
    offsets = maps.offsets.to_numpy()
    ids = maps.keys.to_numpy()[offsets[0] : offsets[-1]]
    row_of = np.repeat(np.arange(len(maps)), np.diff(offsets))
    texts = []
    for column in columns:
        of_column = np.flatnonzero(ids == column.id)
        places = np.full(len(maps), -1, np.int64)
        places[row_of[of_column]] = of_column + offsets[0]
        found = maps.items.take(pa.array(places, mask=places < 0))
        texts.append(pc.if_else(pa.array(places < 0), pa.scalar(column.missing, pa.string()), found.cast(pa.string())))
    return text_batch([source_text(text, kind) for text, kind in zip(texts, kinds, strict=True)])


def target_batch(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Typed rows of a target as text columns, those of the given names in their order."""
    return text_batch([target_text(rows.column(name)) for name in names])


def document_batches(documents: Iterable[SearchDocument], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Search documents as text columns; a column that a document lacks is null."""
    remaining = iter(documents)
    while some := list(islice(remaining, DOCUMENTS_AT_ONCE)):
        yield text_batch([pa.array([row.source.get(name) for row in some], pa.string()) for name in names])


def text_batch(columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Columns known by their places."""
    return pa.RecordBatch.from_arrays(list(columns), names=[str(place) for place in range(len(columns))])
