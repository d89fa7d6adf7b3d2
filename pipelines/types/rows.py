"""Images to typed columns: Postgres text by column id becomes an Arrow table of exactly the target's schema.

The map column is taken apart once, as three flat arrays. One scatter notes for every (column, row)
where its entry stands; each column is then one `take` and one conversion. No Python per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.errors import SchemaNotApplicable, ValueNotRepresentable
from cdc.position import Position
from cdc.table import Column, TableSchema
from cdc.target_names import COLUMN_ID_KEY, ORDINAL_COLUMN, POSITION_COLUMN, column_name
from pipelines.types import Family, Policy, family_of

TYPE_KEY: Final = b"postgres.type"
"""Field metadata: the type as `format_type` prints it without modifier."""

COPY_AGAIN: Final = "copy the table again: 'cdc tables resync TABLE'; it continues without a restart after the copy"
"""What to do about a table of which older rows do not go with newer ones."""
MOST_TEXT: Final = 1 << 30
"""Bytes of images that are taken apart at once: an array of text, and of maps of it, holds 2 GiB."""
_ABSENT: Final = -1


def target_schema(schema: TableSchema, policy: Policy) -> pa.Schema:
    """The target's Arrow schema: one nullable field per sent column under its Delta name, then `_position`, `_ordinal`.

    Generated columns are not sent by pgoutput and are left out. Raises SchemaNotApplicable when two
    names differ only in case, which Delta cannot hold.
    """
    fields = [_field(column, policy) for column in schema.sent]
    folded: dict[str, str] = {}
    for field in fields:
        other = folded.setdefault(field.name.casefold(), field.name)
        if other != field.name:
            raise SchemaNotApplicable(
                f"columns {other!r} and {field.name!r} of table {schema.topic!r} differ only in case",
                remedy="rename one of them at the source, or exclude the table from this sink",
            )
    places = [pa.field(name, pa.int64()) for name in (POSITION_COLUMN, ORDINAL_COLUMN)]
    return pa.schema([*fields, *places])


def typed_rows(images: pa.Table, schema: TableSchema, policy: Policy) -> pa.Table:
    """Upserts in the folded shape, of any number of rows, as a table of exactly target_schema.

    A column that an image lacks takes what rows older than the column hold (`Column.missing`, else
    null); for incomplete images that is a place holder, to be laid over their base: see sent_cells.
    Raises ValueNotRepresentable naming column, type and position of the first value that does not fit.
    """
    return pa.concat_tables([_typed_part(part, schema, policy) for part in _parts(images)])


def _parts(images: pa.Table) -> list[pa.Table]:
    """Images in parts of which each has no more text than one array can hold."""
    if images.column("after").nbytes <= MOST_TEXT:
        return [images]
    held, parts = 0, list[list[pa.RecordBatch]]()
    for batch in images.to_batches():
        held += batch.nbytes
        if not parts or held > MOST_TEXT:
            parts.append([])
            held = batch.nbytes
        parts[-1].append(batch)
    return [pa.Table.from_batches(part) for part in parts]


def _typed_part(images: pa.Table, schema: TableSchema, policy: Policy) -> pa.Table:
    positions = images.column("position")
    columns = [
        _typed(texts, column, family_of(column, policy), positions)
        for texts, column in zip(text_columns(images, schema), schema.sent, strict=True)
    ]
    return pa.Table.from_arrays(
        [*columns, _flat(positions), _flat(images.column("ordinal"))], schema=target_schema(schema, policy)
    )


def text_columns(images: pa.Table, schema: TableSchema) -> list[pa.Array]:
    """The sent columns of images in the folded shape as text, as typed_rows completes and takes them."""
    entries = _Entries(images.column("after"))
    slots = entries.slots([column.id for column in schema.sent])
    return [_texts(entries, slots[place], column) for place, column in enumerate(schema.sent)]


def sent_cells(images: pa.Table, schema: TableSchema) -> np.ndarray:
    """Which cells the images hold: bool, shape (sent columns, rows)."""
    entries = _Entries(images.column("after"))
    return entries.slots([column.id for column in schema.sent]) != _ABSENT


def typed_keys(
    keys: pa.Array | pa.ChunkedArray, schema: TableSchema, policy: Policy, positions: pa.ChunkedArray | None = None
) -> pa.Table:
    """Keys (list of text, in key order) as a table of the key columns under their Delta names, in key order.

    `positions`, of the same length, only names the place in an error. Raises ValueNotRepresentable
    as typed_rows does, and SchemaNotApplicable when a key does not have one part per key column: it is another one.
    """
    keys = _flat(keys)
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
        _typed(parts.take(pa.array(rows + place)), column, family_of(column, policy), positions)
        for place, column in enumerate(schema.key)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema([_field(column, policy) for column in schema.key]))


class _Entries:
    """The entries of a map column as flat arrays."""

    def __init__(self, images: pa.Array | pa.ChunkedArray) -> None:
        maps = _flat(images)
        # the children of a sliced array are those of the whole: offsets say which part is ours
        offsets = maps.offsets.to_numpy()
        self.rows = len(maps)
        self._first, self._lengths = int(offsets[0]) if len(offsets) else 0, np.diff(offsets)
        last = int(offsets[-1]) if len(offsets) else 0
        self._ids = maps.keys.slice(self._first, last - self._first).to_numpy()
        self.texts = maps.items.slice(self._first, last - self._first).cast(pa.string())

    def slots(self, wanted: Sequence[int]) -> np.ndarray:
        """For every wanted column id and row the entry's place in `texts`, or -1: int64, (ids, rows)."""
        slots = np.full((len(wanted), self.rows), _ABSENT, dtype=np.int64)
        if not len(self._ids):
            return slots
        width = int(self._lengths[0])
        if width and (self._lengths == width).all():
            grid = self._ids.reshape(self.rows, width)
            if (grid == grid[0]).all():
                return self._regular(slots, wanted, grid[0])
        place_of = np.full(max(int(self._ids.max()), *wanted, 0) + 1, _ABSENT, dtype=np.int64)
        place_of[list(wanted)] = np.arange(len(wanted))
        places = place_of[self._ids]
        known = np.flatnonzero(places != _ABSENT)
        rows = np.repeat(np.arange(self.rows, dtype=np.int64), self._lengths)
        slots[places[known], rows[known]] = known
        return slots

    def _regular(self, slots: np.ndarray, wanted: Sequence[int], ids: np.ndarray) -> np.ndarray:
        """As slots, when every row has the same ids in the same order."""
        starts = np.arange(self.rows, dtype=np.int64) * len(ids)
        at = {int(column): place for place, column in enumerate(ids)}
        for place, column in enumerate(wanted):
            if column in at:
                slots[place] = starts + at[column]
        return slots


def _texts(entries: _Entries, slots: np.ndarray, column: Column) -> pa.Array:
    absent = slots == _ABSENT
    if not absent.any():
        return entries.texts.take(pa.array(slots))
    texts = entries.texts.take(pa.array(slots, mask=absent))
    if column.missing is None:
        return texts
    return pa.compute.if_else(pa.array(absent), pa.scalar(column.missing, pa.string()), texts)


def _typed(texts: pa.Array, column: Column, family: Family, positions: pa.ChunkedArray | None) -> pa.Array:
    try:
        return family.convert(texts)
    except pa.ArrowInvalid:
        row = _first_failure(family.convert, texts)
        where = "" if positions is None else f" at position {Position(positions[row].as_py())}"
    # raised outside of the handler: Arrow's message holds the value itself
    raise ValueNotRepresentable(
        f"column {column.name!r} has a value of type {column.type_name!r}{where} that {family.arrow!s} cannot represent"
    )


def _first_failure(convert: Callable[[pa.Array], pa.Array], texts: pa.Array) -> int:
    low, high = 0, len(texts)  # the first failing row is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if _converts(convert, texts.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _converts(convert: Callable[[pa.Array], pa.Array], texts: pa.Array) -> bool:
    try:
        convert(texts)
    except pa.ArrowInvalid:
        return False
    return True


def _field(column: Column, policy: Policy) -> pa.Field:
    metadata = {TYPE_KEY: column.type_name.encode(), COLUMN_ID_KEY: str(column.id).encode()}
    return pa.field(column_name(column.name), family_of(column, policy).arrow, metadata=metadata)


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
