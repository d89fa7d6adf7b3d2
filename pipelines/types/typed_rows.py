"""Typed rows: row images, which map column ids to Postgres text, become an Arrow table with the target's schema.

The images are one Arrow map column. It is split once into flat arrays of column ids and texts. One pass finds, for each
column and row, the index of its entry. Then each column needs one `take` and one conversion. No Python code runs per
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.errors import SchemaNotApplicable, ValueNotRepresentable
from cdc.position import Position
from cdc.table import Column, TableSchema
from cdc.target_names import COLUMN_ID_KEY, ORDINAL_COLUMN, POSITION_COLUMN, column_name
from pipelines.types.families import Family, Policy, family_of

TYPE_KEY: Final = b"postgres.type"
"""Key of the field metadata with the Postgres type, as `format_type` prints it without modifier."""

COPY_AGAIN: Final = (
    "copy the table again: 'cdc tables resync TABLE'; after the copy the table continues without a restart"
)
"""Remedy of errors that a new full copy of the table resolves."""
AT_ONCE: Final = 1 << 14
"""Number of rows that are converted at once: their texts are then still in the processor's cache."""
MOST_TEXT: Final = 1 << 30
"""Maximum bytes of images that are converted at once; an Arrow array of text or of maps contains at most 2 GiB."""
_ABSENT: Final = -1


@lru_cache(maxsize=1024)
def target_schema(schema: TableSchema, policy: Policy) -> pa.Schema:
    """Return the target's Arrow schema: one nullable field per column of `schema.sent`, then `_position`, `_ordinal`.

    A field is named `column_name(column.name)`. Generated columns are left out, because pgoutput does not send them.
    Raises SchemaNotApplicable if two names differ only in case, which Delta does not support.
    """
    fields = [_field(column, policy) for column in schema.sent]
    folded: dict[str, str] = {}
    for field in fields:
        other = folded.setdefault(field.name.casefold(), field.name)
        if other != field.name:
            raise SchemaNotApplicable(
                f"the names of columns {other!r} and {field.name!r} of table {schema.topic!r} differ only in case",
                remedy="rename one of them at the source, or exclude the table from this sink",
            )
    order = [pa.field(name, pa.int64()) for name in (POSITION_COLUMN, ORDINAL_COLUMN)]
    return pa.schema([*fields, *order])


def typed_rows(images: pa.Table, schema: TableSchema, policy: Policy) -> pa.Table:
    """Convert folded upserts (FOLDED_ARROW) to a table with the schema `target_schema`.

    A column without an entry in an image gets `Column.missing`, its value in rows older than ADD COLUMN … DEFAULT; null
    without such a default. In a partial image that value is a placeholder, which the caller replaces by the value of
    the base row; `sent_cells` shows where. Raises ValueNotRepresentable with column, type and position of the first
    value that cannot be represented.
    """
    return pa.concat_tables([_typed_part(part, schema, policy) for part in _divided(images)])


def _divided(images: pa.Table) -> list[pa.Table]:
    """Divide images into tables of AT_ONCE rows, and of at most MOST_TEXT bytes.

    A single record batch is divided only by rows.
    """
    parts = [images.slice(start, AT_ONCE) for start in range(0, max(1, images.num_rows), AT_ONCE)]
    return [smaller for part in parts for smaller in _split_by_size(part)]


def _split_by_size(images: pa.Table) -> list[pa.Table]:
    if images.column("after").nbytes <= MOST_TEXT:
        return [images]
    size, parts = 0, list[list[pa.RecordBatch]]()
    for batch in images.to_batches():
        size += batch.nbytes
        if not parts or size > MOST_TEXT:
            parts.append([])
            size = batch.nbytes
        parts[-1].append(batch)
    return [pa.Table.from_batches(part) for part in parts]


def _typed_part(images: pa.Table, schema: TableSchema, policy: Policy) -> pa.Table:
    positions = images.column("position")
    columns = [
        _convert(texts, column, family_of(column, policy), positions)
        for texts, column in zip(text_columns(images, schema), schema.sent, strict=True)
    ]
    return pa.Table.from_arrays(
        [*columns, _one_chunk(positions), _one_chunk(images.column("ordinal"))], schema=target_schema(schema, policy)
    )


def text_columns(images: pa.Table, schema: TableSchema) -> list[pa.Array]:
    """Return one text array per column of `schema.sent`. Absent entries become `Column.missing`, as in `typed_rows`."""
    entries = _MapEntries(images.column("after"))
    indexes = entries.indexes([column.id for column in schema.sent])
    return [_texts(entries, indexes[number], column) for number, column in enumerate(schema.sent)]


def sent_cells(images: pa.Table, schema: TableSchema) -> np.ndarray:
    """Return, for each column and row, whether the row's image has a value or NULL for the column.

    In a partial image, False marks an unsent column. The result has shape (columns of `schema.sent`, rows).
    """
    entries = _MapEntries(images.column("after"))
    return entries.indexes([column.id for column in schema.sent]) != _ABSENT


def typed_keys(
    keys: pa.Array | pa.ChunkedArray, schema: TableSchema, policy: Policy, positions: pa.ChunkedArray | None = None
) -> pa.Table:
    """Convert keys, which are lists of texts, to a typed table of the target's key columns, in key order.

    positions: the position of each key, for errors. Raises ValueNotRepresentable as `typed_rows` does. Raises
    SchemaNotApplicable if the length of a key is not the number of key columns: then the table's key has changed.
    """
    keys = _one_chunk(keys)
    width = len(schema.key)
    lengths = keys.value_lengths()
    if keys.null_count or (len(keys) and lengths.unique().to_pylist() != [width]):
        raise SchemaNotApplicable(
            f"the key of table {schema.topic!r} changed within a batch: expected {width} key columns",
            remedy=COPY_AGAIN,
        )
    parts = keys.flatten()
    rows = np.arange(len(keys), dtype=np.int64) * width
    columns = [
        _convert(parts.take(pa.array(rows + number)), column, family_of(column, policy), positions)
        for number, column in enumerate(schema.key)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema([_field(column, policy) for column in schema.key]))


class _MapEntries:
    """The entries of a map column as flat arrays."""

    def __init__(self, images: pa.Array | pa.ChunkedArray) -> None:
        maps = _one_chunk(images)
        # a sliced array has the children of the whole array: the offsets select its part
        offsets = maps.offsets.to_numpy()
        self.rows = len(maps)
        self._first, self._lengths = int(offsets[0]) if len(offsets) else 0, np.diff(offsets)
        last = int(offsets[-1]) if len(offsets) else 0
        self._ids = maps.keys.slice(self._first, last - self._first).to_numpy()
        self.texts = maps.items.slice(self._first, last - self._first).cast(pa.string())

    def indexes(self, wanted: Sequence[int]) -> np.ndarray:
        """Return, for each wanted column id and row, the index of the entry in `texts`; -1 if the row has no entry.

        The result is an int64 array with shape (wanted ids, rows).
        """
        indexes = np.full((len(wanted), self.rows), _ABSENT, dtype=np.int64)
        if not len(self._ids):
            return indexes
        width = int(self._lengths[0])
        if width and (self._lengths == width).all():
            grid = self._ids.reshape(self.rows, width)
            if (grid == grid[0]).all():
                return self._fill_uniform(indexes, wanted, grid[0])
        number_of = np.full(max(int(self._ids.max()), *wanted, 0) + 1, _ABSENT, dtype=np.int64)
        number_of[list(wanted)] = np.arange(len(wanted))
        numbers = number_of[self._ids]
        known = np.flatnonzero(numbers != _ABSENT)
        rows = np.repeat(np.arange(self.rows, dtype=np.int64), self._lengths)
        indexes[numbers[known], rows[known]] = known
        return indexes

    def _fill_uniform(self, indexes: np.ndarray, wanted: Sequence[int], ids: np.ndarray) -> np.ndarray:
        """Do the same as `indexes()` for rows that all have entries for the same `ids` in the same order.

        indexes: an array in which every element is -1. wanted: as in `indexes()`.
        """
        starts = np.arange(self.rows, dtype=np.int64) * len(ids)
        offset_of = {int(column): offset for offset, column in enumerate(ids)}
        for number, column in enumerate(wanted):
            if column in offset_of:
                indexes[number] = starts + offset_of[column]
        return indexes


def _texts(entries: _MapEntries, indexes: np.ndarray, column: Column) -> pa.Array:
    absent = indexes == _ABSENT
    if not absent.any():
        return entries.texts.take(pa.array(indexes))
    texts = entries.texts.take(pa.array(indexes, mask=absent))
    if column.missing is None:
        return texts
    return pa.compute.if_else(pa.array(absent), pa.scalar(column.missing, pa.string()), texts)


def _convert(texts: pa.Array, column: Column, family: Family, positions: pa.ChunkedArray | None) -> pa.Array:
    try:
        return family.convert(texts)
    except pa.ArrowInvalid:
        row = _first_failure(family.convert, texts)
        where = "" if positions is None else f" at position {Position(positions[row].as_py())}"
    # raised outside of the handler, because Arrow's message contains the value
    raise ValueNotRepresentable(
        f"column {column.name!r}: a value of type {column.type_name!r}{where} cannot be represented as {family.arrow!s}"
    )


def _first_failure(convert: Callable[[pa.Array], pa.Array], texts: pa.Array) -> int:
    low, high = 0, len(texts)  # the first failing row is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if _is_convertible(convert, texts.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _is_convertible(convert: Callable[[pa.Array], pa.Array], texts: pa.Array) -> bool:
    try:
        convert(texts)
    except pa.ArrowInvalid:
        return False
    return True


def _field(column: Column, policy: Policy) -> pa.Field:
    metadata = {TYPE_KEY: column.type_name.encode(), COLUMN_ID_KEY: str(column.id).encode()}
    return pa.field(column_name(column.name), family_of(column, policy).arrow, metadata=metadata)


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
