"""Changes of one table, column by column: what a format gets to encode.

A log row contains its images as maps from column id to text. A format needs each column as one array, because Arrow
converts whole arrays several times faster than Python converts single values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cdc.table import Column, TableSchema


@dataclass(frozen=True, slots=True)
class ImageColumn:
    """The values of one column in one image (`before` or `after`) of some changes."""

    texts: pa.StringArray
    """Text that Postgres sent; null for SQL NULL, for an unsent column, and for a change without this image."""
    unsent: np.ndarray | None = None
    """Booleans: True for a change whose image exists, but does not contain the column; None if there is none."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of some changes."""

    exists: np.ndarray
    """Booleans: True for a change that has this image."""
    columns: Mapping[int, ImageColumn]
    """Column id → values, for every column of the schema that pgoutput sends."""


class TransactionNumbers(NamedTuple):
    """Numbers of changes in their source transaction, from 1; null for a change that belongs to none."""

    total: pa.Int64Array
    """Number among the events of the transaction."""
    in_table: pa.Int64Array
    """Number among those of the same table."""

    def take(self, changes: np.ndarray) -> TransactionNumbers:
        """Return the numbers of some of the changes."""
        return TransactionNumbers(*(column.take(pa.array(changes)) for column in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """Changes of one table under one version of its schema, in log order; every array has the same length."""

    schema: TableSchema
    """The schema in force, after the drops and renames of the delivery's rule."""
    topic: str
    """Topic of the events."""
    rows: pa.Table
    """The log rows, with the columns of LOG_SCHEMA and one chunk per column."""
    before: Image
    after: Image
    key: tuple[pa.StringArray, ...]
    """Texts of the key columns, in key order; all null for a change without key (`t`, or a table without a key)."""
    old_key: tuple[pa.StringArray, ...]
    """Texts of the key before a key change; all null for every other change."""
    numbers: TransactionNumbers | None = None
    """Numbers in the transactions; None if the delivery does not send them."""

    @property
    def count(self) -> int:
        """Number of changes."""
        return self.rows.num_rows

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that pgoutput sends, in the order of the table."""
        return self.schema.sent

    def array(self, name: str) -> pa.Array:
        """Return one column of the log rows."""
        column = self.rows.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def table_changes(schema: TableSchema, topic: str, rows: pa.Table) -> TableChanges:
    """Divide the log rows of one table into columns. rows: rows of this table under this schema, in log order."""
    rows = rows.combine_chunks()
    width = len(schema.key)
    return TableChanges(
        schema=schema,
        topic=topic,
        rows=rows,
        before=_image(_one_chunk(rows, "before"), schema),
        after=_image(_one_chunk(rows, "after"), schema),
        key=_key(_one_chunk(rows, "key"), width),
        old_key=_key(_one_chunk(rows, "old_key"), width),
    )


def _one_chunk(rows: pa.Table, name: str) -> pa.Array:
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([column.combine_chunks()])


def _image(maps: pa.MapArray, schema: TableSchema) -> Image:
    count = len(maps)
    exists = maps.is_valid().to_numpy(zero_copy_only=False)
    ids = [column.id for column in schema.sent]
    if not exists.any():
        nothing = ImageColumn(pa.nulls(count, pa.string()))
        return Image(exists, dict.fromkeys(ids, nothing))
    offsets = maps.offsets.to_numpy()
    lengths = np.where(exists, np.diff(offsets), 0)
    # a null map may have entries in the buffers
    entries = np.repeat(offsets[:-1] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths) + np.arange(
        lengths.sum()
    )
    numbers = maps.keys.to_numpy()[entries]
    rows = np.flatnonzero(exists)
    if ids and len(numbers) == len(ids) * len(rows) and (numbers.reshape(-1, len(ids)) == ids).all():
        # the images have all columns, in the order of the table
        places = entries.reshape(-1, len(ids)).T
        columns = [ImageColumn(_taken(maps.items, count, rows, of_column)) for of_column in places]
        return Image(exists, dict(zip(ids, columns, strict=True)))
    owners = np.repeat(np.arange(count), lengths)
    order = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[order], ids, side="left")
    ends = np.searchsorted(numbers[order], ids, side="right")
    found: dict[int, ImageColumn] = {}
    for number, start, end in zip(ids, starts, ends, strict=True):
        chosen = order[start:end]
        texts = _taken(maps.items, count, owners[chosen], entries[chosen])
        unsent = exists.copy()
        unsent[owners[chosen]] = False
        found[number] = ImageColumn(texts, unsent if unsent.any() else None)
    return Image(exists, found)


def _taken(items: pa.StringArray, count: int, rows: np.ndarray, places: np.ndarray) -> pa.StringArray:
    """Return the items at some places, each in the row of the result that is named with it; the other rows are null."""
    if len(rows) == count:
        return items.take(pa.array(places))
    source = np.full(count, -1, dtype=np.int64)
    source[rows] = places
    return items.take(pa.array(source, mask=source < 0))


def _key(lists: pa.ListArray, width: int) -> tuple[pa.StringArray, ...]:
    """Return the elements of lists of `width` texts as `width` arrays. A list of another length counts as null."""
    offsets = lists.offsets.to_numpy()
    complete = lists.is_valid().to_numpy(zero_copy_only=False) & (np.diff(offsets) == width)
    parts = (pa.array(offsets[:-1] + place, mask=~complete) for place in range(width))
    return tuple(lists.values.take(part) for part in parts)
