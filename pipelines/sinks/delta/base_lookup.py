"""Base lookup: partial images completed with the unsent columns of the target's row before the batch.

The base of a row is the target's row of the same key, or of the old key when the row moved to a new one. It is read in
the version of the target **before the range was applied**: the range deletes old keys and may give them to new rows.
After a crash that version is an older one, which the published record names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import DeltaTable

from cdc.errors import MissingBase
from cdc.position import Position
from cdc.table import TableState
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.folding.fold import has_base_key
from pipelines.sinks.delta.key_equality import comparable, comparable_keys, one_of_each, one_of_each_in_spark
from pipelines.sinks.delta.merge import double_quoted, frame_of
from pipelines.sinks.delta.merge_source import RowShape, as_upserts, source_frame, source_rows, split
from pipelines.sinks.delta.schema_evolution import evolved_batch, read_plan, sources
from pipelines.sinks.delta.shared import columns_of
from pipelines.sinks.delta.table import Reads
from pipelines.types.typed_rows import sent_cells, typed_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAX_LISTED: Final = 1_000
"""Keys listed in the scan's predicate; above it the predicate is their range, and rows are matched in memory."""
_ROW: Final = "_row"
_PLACE: Final = "_place"

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class BaseLookup:
    """The target from which a range's partial images take their unsent columns."""

    table: DeltaTable | None
    """None when there was no target."""
    exact: bool = True
    """False when the target is already inside the range: a row of the same key is then still the right base, but the
    old key of a moved row may belong to another row."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of a truncate in the range: an older row is no base."""
    part: int | None = None
    """The relation whose rows they are, in a shared target."""
    reads: Reads | None = None
    """Reads rows where delta-rs cannot."""


def table_source(images: pa.Table, before: BaseLookup, shape: RowShape) -> pa.Table:
    """Folded rows, op `u` and `d`, as a merge's source; arguments and errors as of complete."""
    whole, partial = split(images)
    source = source_rows(whole, shape)
    if partial.num_rows:
        source = pa.concat_tables([source, as_upserts(complete(partial, before, shape), shape)])
    return one_of_each(source, shape.key)


def frame_source(
    frame: DataFrame,
    before: BaseLookup,
    shape: RowShape,
    decided: Callable[[pa.Table], pa.Table] = lambda images: images,
) -> DataFrame:
    """As table_source for a batch that stays on the executors; only incomplete rows come to the driver.

    decided: applied to them before they are completed.
    """
    partial = frame.where("op = 'u' AND NOT complete").toArrow()
    source = source_frame(frame.where("op = 'd' OR coalesce(complete, true)"), shape)
    if partial.num_rows:
        rows = table_source(decided(partial), before, shape)
        source = source.unionByName(frame_of(frame.sparkSession, rows))
    return one_of_each_in_spark(source, shape.key)


def complete(images: pa.Table, before: BaseLookup, shape: RowShape) -> pa.Table:
    """Incomplete upserts (folded shape) as whole rows of exactly shape.held.

    While the table is being copied, an image whose base is not there is left out. Raises MissingBase naming the
    position of the first image whose base is not there otherwise, or cannot be proved.
    """
    schema, wanted = shape.schema, shape.held
    places, held = _found(images, before, shape)
    if schema.state is TableState.SNAPSHOTTING:
        kept = pa.array(~_waiting(images, places, before))
        if waiting := images.num_rows - (pc.sum(kept).as_py() or 0):
            log.debug("images wait for the copy of their rows", table=schema.topic, images=waiting)
        images, places = images.filter(kept), places.filter(kept)
    if not before.exact:
        places = pc.if_else(has_base_key(images["base"]), None, places)
    if places.null_count:
        first = int(np.flatnonzero(places.is_null().to_numpy(zero_copy_only=False))[0])
        position = Position(images["position"][first].as_py())
        raise MissingBase(
            f"the target of table {schema.topic!r} has no base row for {places.null_count} partial images, the "
            f"first at {position}"
        )
    rows = shape.rows(images)
    base = held.take(places)
    cells = sent_cells(images, schema)
    # a base older than a column has the column's default; so does `rows` where nothing was sent
    told = wanted.names if before.table is None else sources(columns_of(before.table, before.part), wanted)
    columns = [
        pc.if_else(pa.array(cells[place]), rows.column(place), base.column(place))
        if wanted.names[place] in told
        else rows.column(place)
        for place in range(len(schema.sent))
    ]
    return pa.Table.from_arrays([*columns, rows[POSITION_COLUMN], rows[ORDINAL_COLUMN]], schema=wanted)


def without_base(images: pa.Table, before: BaseLookup, shape: RowShape) -> np.ndarray:
    """Which incomplete upserts `complete` raises MissingBase for: bool, one for each."""
    places, _ = _found(images, before, shape)
    lacking: np.ndarray = places.is_null().to_numpy(zero_copy_only=False)
    if not before.exact:
        lacking = lacking | has_base_key(images["base"]).to_numpy(zero_copy_only=False)
    if shape.schema.state is TableState.SNAPSHOTTING:
        lacking = lacking & ~_waiting(images, places, before)
    return lacking


def _found(images: pa.Table, before: BaseLookup, shape: RowShape) -> tuple[pa.Array, pa.Table]:
    """(for every image the index of its base row, null where there is none; the rows)."""
    wanted = shape.held
    bases = pc.coalesce(images["base"].combine_chunks(), images["key"].combine_chunks())
    keys = typed_keys(bases, shape.schema, shape.policy, images["position"])
    held = wanted.empty_table() if before.table is None else _rows(before, before.table, keys, wanted)
    if before.truncated is not None:
        held = held.filter(is_after(held, before.truncated))
    return _match(keys, held), held


def _waiting(images: pa.Table, places: pa.Array, before: BaseLookup) -> np.ndarray:
    """Which images of a table that is being copied make no row: the copy will write it."""
    absent: np.ndarray = places.is_null().to_numpy(zero_copy_only=False)
    if before.exact:
        return absent
    moved: np.ndarray = has_base_key(images["base"]).to_numpy(zero_copy_only=False)
    return absent & ~moved


def rows_with_keys(
    table: DeltaTable, keys: pa.Table, wanted: pa.Schema, where: str | None = None, part: int | None = None
) -> pa.Table:
    """The table's rows whose first key part is among those of `keys`, in the wanted schema; all rows for no column.

    Columns are found by id: the table may be an older version, from before a rename. where: a further condition.
    part: the relation whose rows are read, in a shared target.
    """
    held = columns_of(table, part)
    mine = None if part is None else f"{RELATION_COLUMN} = {int(part)}"
    columns = read_plan(held, wanted)
    name_of = {column.field.name: column.held for column in columns if column.held is not None}
    first = next(iter(keys.column_names), None)
    values = None if first is None else pc.unique(comparable(keys[first]))
    same = first in name_of and held.field(name_of[first]).type == keys.schema.field(first).type
    narrowing = _predicate(name_of[first], values) if first is not None and same else None
    predicate = " AND ".join(condition for condition in (mine, narrowing, where) if condition) or None
    found = []
    for batch in pa.RecordBatchReader.from_stream(table.scan(columns=list(name_of.values()), predicate=predicate)):
        # string views of the engine have no filter yet: convert to the wanted types first
        rows = pa.Table.from_batches([evolved_batch(batch, held, columns)])
        found.append(rows if first is None else rows.filter(pc.is_in(comparable(rows[first]), values)))
    return pa.concat_tables(found) if found else wanted.empty_table()


def _rows(before: BaseLookup, table: DeltaTable, keys: pa.Table, wanted: pa.Schema) -> pa.Table:
    if before.reads is None:
        return rows_with_keys(table, keys, wanted, part=before.part)
    held = columns_of(table, before.part)
    columns = read_plan(held, wanted)
    name_of = {column.field.name: column.held for column in columns if column.held is not None}
    first = keys.column_names[0]
    same = first in name_of and held.field(name_of[first]).type == keys.schema.field(first).type
    key = name_of[first] if same else None
    batches = before.reads(table.version(), list(name_of.values()), key, keys[first])
    found = [pa.Table.from_batches([evolved_batch(batch, held, columns)]) for batch in batches]
    return pa.concat_tables(found) if found else wanted.empty_table()


def _predicate(name: str, values: pa.Array) -> str | None:
    """SQL that is true for the wanted rows; None where the key's type has no plain literal."""
    column, values = double_quoted(name), values.drop_null()
    if not len(values):
        return "false"
    if pa.types.is_integer(values.type):
        if len(values) <= MAX_LISTED:
            return f"{column} IN ({', '.join(str(value) for value in values.to_pylist())})"
        ends = pc.min_max(values).as_py()
        return f"{column} BETWEEN {ends['min']} AND {ends['max']}"
    if pa.types.is_string(values.type) and len(values) <= MAX_LISTED:
        return f"{column} IN ({', '.join(_quoted(value) for value in values.to_pylist())})"
    return None


def _match(keys: pa.Table, held: pa.Table) -> pa.Array:
    """For every key the index of the row of `held` with it, null where there is none."""
    names = keys.column_names
    left = comparable_keys(keys).append_column(_PLACE, pa.array(np.arange(keys.num_rows)))
    right = comparable_keys(held.select(names)).append_column(_ROW, pa.array(np.arange(held.num_rows)))
    joined = left.join(right, names, join_type="left outer").sort_by(_PLACE)
    return joined[_ROW].combine_chunks()


def is_after(rows: pa.Table, place: tuple[int, int]) -> pa.ChunkedArray:
    """Which rows of a target are later than a (position, ordinal)."""
    same = pc.and_(pc.equal(rows[POSITION_COLUMN], place[0]), pc.greater(rows[ORDINAL_COLUMN], place[1]))
    return pc.or_(pc.greater(rows[POSITION_COLUMN], place[0]), same)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
