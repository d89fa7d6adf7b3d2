"""Merge source: the rows that a merge compares with its target, made from folded rows.

A source has the target's columns and `_op` (`u` upsert, `d` delete). Deletes and complete images become rows directly.
A partial image is completed with its base row (overlay): the unsent columns get the values of that row.

The base row is the target's row of the same key, or of the old key if the row moved to a new key. It is read in the
version of the target **before the range was applied**, because the range deletes old keys and may give them to new
rows. After a crash this is the older version that the published record names.

A table without a key may have equal rows. A delete then removes any row of the target that is equal in every column;
the merge finds that row by position and ordinal.

Keys are compared as Postgres, Spark and delta-rs compare them: the texts `-0` and `0` of a float are one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import DeltaTable

from cdc.errors import MissingBase, SchemaNotApplicable
from cdc.position import Position
from cdc.table import TableState
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.folding.fold import has_base_key
from pipelines.folding.keyless_fold import keep_latest_per_id, net_changes, row_ids
from pipelines.sinks.delta.schema_evolution import evolved_batch, read_plan, sources
from pipelines.sinks.delta.spark_target import frame_of
from pipelines.sinks.delta.target_columns import OP, RowShape
from pipelines.sinks.delta.target_layout import backticked, double_quoted
from pipelines.sinks.delta.target_part import RowReader, columns_of_part
from pipelines.types.typed_rows import sent_cells, typed_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAX_LISTED: Final = 1_000
"""Maximum number of keys that the predicate of a scan lists. With more integer keys, the predicate is their range; with
more text keys, there is no predicate. The rows read are then matched in memory.
"""
_RANK: Final = "_rank"
_ROW: Final = "_row"
_NUMBER: Final = "_number"

RowFinder = Callable[[pa.Table, pa.Schema], pa.Table | None]
"""Function (keys, columns to return) → the rows with these keys; None if it cannot find rows of this table."""

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class BaseLookup:
    """The version of a target in which the base rows of a batch are searched, and the conditions of the search."""

    read_table: Callable[[], DeltaTable] | None
    """Function that returns the target at the version to read; None if there was no target before the batch."""
    exact: bool = True
    """False if the target already contains some changes of the batch's range. A row with an unchanged key then still
    has a valid base row. A moved row has none: a newer row may have got its old key.
    """
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of a truncate in the batch's range; rows older than it are not used as base rows."""
    relation: int | None = None
    """The relation whose rows are read in a shared target; None if the target belongs to one source table."""
    read_rows: RowReader | None = None
    """Function that reads the target's rows with Spark; None if delta-rs can read them."""
    find_rows: RowFinder | None = None
    """Function that finds rows of this version by their complete keys in an index; None if there is no index."""
    received: pa.Table | None = None
    """In a task of Spark: rows of the target, among them the base rows, with the columns of base rows."""
    present: pa.Schema | None = None
    """In a task of Spark: the columns of the target."""

    @property
    def columns(self) -> pa.Schema | None:
        """The columns of the target; None if there was no target."""
        if self.read_table is None:
            return self.present
        return _columns(self.read_table(), self.relation)


def table_source(images: pa.Table, bases: BaseLookup, shape: RowShape) -> pa.Table:
    """Return the merge source for folded rows with op `u` and `d`: the latest row of each key, with partial images
    completed.

    Raises MissingBase as `overlay` does.
    """
    complete, partial = split_partial(images)
    source = source_rows(complete, shape)
    if partial.num_rows:
        source = pa.concat_tables([source, as_upserts(overlay(partial, bases, shape), shape)])
    return one_row_per_key(source, shape.key)


def frame_source(
    frame: DataFrame,
    bases: BaseLookup,
    shape: RowShape,
    apply_filter: Callable[[pa.Table], pa.Table] = lambda images: images,
) -> DataFrame:
    """Return the merge source of a batch as a Spark frame; only partial images are processed on the driver.

    apply_filter: function that is applied to the partial images before their base rows are read. Raises MissingBase as
    `overlay` does.
    """
    partial = frame.where("op = 'u' AND NOT complete").toArrow()
    source = source_frame(frame.where("op = 'd' OR coalesce(complete, true)"), shape)
    if partial.num_rows:
        rows = table_source(apply_filter(partial), bases, shape)
        source = source.unionByName(frame_of(frame.sparkSession, rows))
    return one_row_per_key_in_spark(source, shape.key)


def keyless_source(
    images: pa.Table, table: DeltaTable, shape: RowShape, truncated: tuple[int, int] | None = None, *, lenient: bool
) -> pa.Table:
    """Return the merge source for folded rows of a table without a key.

    images: rows that the target does not have yet. table: the target. truncated: (position, ordinal) of a truncate in
    the range; a delete does not match rows older than it. lenient: ignore a delete whose row is missing in the target.

    Raises MissingBase for such a delete if not lenient, SchemaNotApplicable for rows with a key.
    """
    if images["key"].null_count < images.num_rows:
        raise SchemaNotApplicable(f"the key of table {shape.schema.topic!r} was dropped within a batch")
    net = net_changes(images, shape.schema)
    inserted, deleted = (net.filter(pc.equal(net["op"], op)) for op in ("u", "d"))
    rows = as_upserts(shape.rows(inserted), shape)
    if not deleted.num_rows:
        return rows
    typed = shape.rows(deleted)
    candidates = rows_with_keys(table, _most_selective_column(typed), shape.columns)
    if truncated is not None:
        candidates = candidates.filter(is_after(candidates, truncated))
    return pa.concat_tables([rows, _keyless_deletes(typed, candidates, shape, lenient=lenient)])


def split_partial(images: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Split folded rows into two tables: first deletes and complete upserts, then partial upserts."""
    complete = images["complete"]
    if not any(chunk.false_count for chunk in complete.chunks):
        return images, images.slice(0, 0)
    partial = pc.and_(pc.equal(images["op"], "u"), pc.invert(pc.fill_null(complete, fill_value=True)))
    return images.filter(pc.invert(partial)), images.filter(partial)


def source_rows(images: pa.Table, shape: RowShape) -> pa.Table:
    """Convert folded deletes and complete upserts to typed rows of a merge source."""
    deleted = pc.equal(images["op"], "d")
    if not pc.any(deleted).as_py():
        return as_upserts(shape.rows(images), shape)
    upserts, deletes = images.filter(pc.invert(deleted)), images.filter(deleted)
    return pa.concat_tables([as_upserts(shape.rows(upserts), shape), _delete_rows(deletes, shape)])


def as_upserts(rows: pa.Table, shape: RowShape) -> pa.Table:
    """Add the column `_op` with the value `u` to complete typed rows."""
    return pa.Table.from_arrays([*rows.columns, _op_column("u", rows.num_rows)], schema=shape.source)


def source_frame(frame: DataFrame, shape: RowShape) -> DataFrame:
    """Convert a frame of folded deletes and complete upserts to a frame of merge source rows; the executors do the
    work.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    def typed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from source_rows(pa.Table.from_batches([batch]), shape).to_batches()

    return frame.mapInArrow(typed, from_arrow_schema(shape.source))


def overlay(images: pa.Table, bases: BaseLookup, shape: RowShape) -> pa.Table:
    """Fill in the unsent columns of partial images from their base rows, and return complete rows.

    While the source table is being copied, an image without a base row is left out, because the copy will write its
    row. Otherwise MissingBase is raised with the position of the first image whose base row is missing or uncertain.
    """
    schema, wanted = shape.schema, shape.image_columns
    places, rows_before = find_base_rows(images, bases, shape)
    if schema.state is TableState.SNAPSHOTTING:
        kept = pa.array(~_awaits_copy(images, places, bases))
        if left_out := images.num_rows - (pc.sum(kept).as_py() or 0):
            log.debug(
                "partial images are left out, because the running full copy will write their rows",
                table=schema.topic,
                images=left_out,
            )
        images, places = images.filter(kept), places.filter(kept)
    if not bases.exact:
        places = pc.if_else(has_base_key(images["base"]), None, places)
    if places.null_count:
        first = int(np.flatnonzero(places.is_null().to_numpy(zero_copy_only=False))[0])
        position = Position(images["position"][first].as_py())
        raise MissingBase(
            f"the target of table {schema.topic!r} has no base row for {places.null_count} partial images, the "
            f"first at {position}"
        )
    rows = shape.rows(images)
    base = rows_before.take(places)
    cells = sent_cells(images, schema)
    # for a column that the target does not have, `rows` has the default of unsent values
    present = bases.columns
    known = wanted.names if present is None else sources(present, wanted)
    columns = [
        pc.if_else(pa.array(cells[number]), rows.column(number), base.column(number))
        if wanted.names[number] in known
        else rows.column(number)
        for number in range(len(schema.sent))
    ]
    return pa.Table.from_arrays([*columns, rows[POSITION_COLUMN], rows[ORDINAL_COLUMN]], schema=wanted)


def has_no_base(images: pa.Table, bases: BaseLookup, shape: RowShape) -> np.ndarray:
    """Return one bool per image: whether `overlay` raises MissingBase for this partial upsert."""
    places, _ = find_base_rows(images, bases, shape)
    missing: np.ndarray = places.is_null().to_numpy(zero_copy_only=False)
    if not bases.exact:
        missing = missing | has_base_key(images["base"]).to_numpy(zero_copy_only=False)
    if shape.schema.state is TableState.SNAPSHOTTING:
        missing = missing & ~_awaits_copy(images, places, bases)
    return missing


def find_base_rows(images: pa.Table, bases: BaseLookup, shape: RowShape) -> tuple[pa.Array, pa.Table]:
    """Find the base row of each image; return (indexes, rows).

    `indexes` has, for each image, the index of its base row in `rows`; null if the image has no base row.
    """
    wanted = shape.image_columns
    base_keys = pc.coalesce(images["base"].combine_chunks(), images["key"].combine_chunks())
    keys = typed_keys(base_keys, shape.schema, shape.policy, images["position"])
    if bases.read_table is not None:
        rows = _rows_before(bases, bases.read_table(), keys, wanted)
    else:
        rows = wanted.empty_table() if bases.received is None else bases.received
    if bases.truncated is not None:
        rows = rows.filter(is_after(rows, bases.truncated))
    return _match(keys, rows), rows


def rows_with_keys(
    table: DeltaTable, keys: pa.Table, wanted: pa.Schema, where: str | None = None, relation: int | None = None
) -> pa.Table:
    """Read the rows of a target whose first key column has one of the values in `keys`; all rows if `keys` has no
    column.

    The rows have the columns of `wanted`. Columns are found by column id, because `table` may be a version from before
    a rename. where: a further SQL condition. relation: the relation whose rows are read in a shared target.
    """
    present = _columns(table, relation)
    own = None if relation is None else f"{RELATION_COLUMN} = {int(relation)}"
    columns = read_plan(present, wanted)
    name_of = {column.field.name: column.source for column in columns if column.source is not None}
    first = next(iter(keys.column_names), None)
    values = None if first is None else pc.unique(comparable(keys[first]))
    same = first in name_of and present.field(name_of[first]).type == keys.schema.field(first).type
    narrowing = _predicate(name_of[first], values) if first is not None and same else None
    predicate = " AND ".join(condition for condition in (own, narrowing, where) if condition) or None
    found = []
    for batch in pa.RecordBatchReader.from_stream(table.scan(columns=list(name_of.values()), predicate=predicate)):
        # pyarrow cannot filter the string views of delta-rs: convert to the wanted types first
        rows = pa.Table.from_batches([evolved_batch(batch, present, columns)])
        found.append(rows if first is None else rows.filter(pc.is_in(comparable(rows[first]), values)))
    return pa.concat_tables(found) if found else wanted.empty_table()


def find_by_index(
    find_rows: RowFinder | None, table: DeltaTable, keys: pa.Table, wanted: pa.Schema, relation: int | None = None
) -> pa.Table | None:
    """Find the rows with the given keys by an index; None if no index can be used. Arguments as in `rows_with_keys`."""
    if find_rows is None:
        return None
    present = _columns(table, relation)
    columns = read_plan(present, wanted)
    name_of = {column.field.name: column.source for column in columns if column.source is not None}
    if not all(_is_unchanged(field, name_of, present) for field in keys.schema):
        return None
    found = find_rows(keys, pa.schema([present.field(name) for name in dict.fromkeys(name_of.values())]))
    if found is None:
        return None
    batch = found.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], found.schema)]
    return pa.Table.from_batches([evolved_batch(batch[0], present, columns)])


def comparable(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Convert the values of a key column so that equal values have equal bits: the float -0 becomes 0."""
    return pc.add(values, pa.scalar(0, values.type)) if pa.types.is_floating(values.type) else values


def key_numbers(keys: pa.Table) -> np.ndarray:
    """Return an array with a number for each row of `keys`, int64; rows with equal keys have the same number."""
    return row_ids(_comparable_keys(keys).columns, keys.num_rows)


def latest_per_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the row with the highest position and ordinal of each key; rows: rows of a target or of a merge source."""
    numbers = key_numbers(rows.select(list(key)))
    order = np.lexsort((rows[ORDINAL_COLUMN].to_numpy(), rows[POSITION_COLUMN].to_numpy()))
    last = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    last[numbers[order]] = order  # numpy assigns in order, so the last row of a key stays
    return rows.take(pa.array(last))


def one_row_per_key(source: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return a merge source with only the latest row of each key.

    Only float keys need this, because folding treats their texts `-0` and `0` as two keys.
    """
    return latest_per_key(source, key) if has_float_key(source.schema, key) else source


def has_float_key(columns: pa.Schema, key: Sequence[str]) -> bool:
    """Return whether a key column is a float, so that rows with the key texts `-0` and `0` have one key."""
    return any(pa.types.is_floating(columns.field(name).type) for name in key)


def one_row_per_key_in_spark(source: DataFrame, key: Sequence[str]) -> DataFrame:
    """Return a merge source as in `one_row_per_key`, for a Spark frame."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F
    from pyspark.sql.types import DoubleType, FloatType

    if not any(isinstance(source.schema[name].dataType, DoubleType | FloatType) for name in key):
        return source
    latest_first = [F.col(POSITION_COLUMN).desc(), F.col(ORDINAL_COLUMN).desc()]
    same_key = Window.partitionBy(*(backticked(name) for name in key)).orderBy(*latest_first)
    return source.withColumn(_RANK, F.row_number().over(same_key)).where(F.col(_RANK) == 1).drop(_RANK)


def is_after(rows: pa.Table, moment: tuple[int, int]) -> pa.ChunkedArray:
    """Return one bool per row of a target: whether the row is later than `moment`, a pair (position, ordinal)."""
    position, ordinal = moment
    same = pc.and_(pc.equal(rows[POSITION_COLUMN], position), pc.greater(rows[ORDINAL_COLUMN], ordinal))
    return pc.or_(pc.greater(rows[POSITION_COLUMN], position), same)


def _delete_rows(images: pa.Table, shape: RowShape) -> pa.Table:
    keys = typed_keys(images["key"], shape.schema, shape.policy, images["position"])
    known = {
        POSITION_COLUMN: images["position"],
        ORDINAL_COLUMN: images["ordinal"],
        OP: _op_column("d", images.num_rows),
    }
    known |= {name: keys[name] for name in keys.column_names}
    columns = [
        known[field.name] if field.name in known else pa.nulls(images.num_rows, field.type) for field in shape.source
    ]
    return pa.Table.from_arrays(columns, schema=shape.source)


def _op_column(op: str, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(op, pa.string()), rows)


def _awaits_copy(images: pa.Table, places: pa.Array, bases: BaseLookup) -> np.ndarray:
    """Return one bool per image: whether the image is left out, because a running full copy will write its row."""
    absent: np.ndarray = places.is_null().to_numpy(zero_copy_only=False)
    if bases.exact:
        return absent
    moved: np.ndarray = has_base_key(images["base"]).to_numpy(zero_copy_only=False)
    return absent & ~moved


def _rows_before(bases: BaseLookup, table: DeltaTable, keys: pa.Table, wanted: pa.Schema) -> pa.Table:
    if (rows := find_by_index(bases.find_rows, table, keys, wanted, bases.relation)) is not None:
        return rows
    if bases.read_rows is None:
        return rows_with_keys(table, keys, wanted, relation=bases.relation)
    present = _columns(table, bases.relation)
    columns = read_plan(present, wanted)
    name_of = {column.field.name: column.source for column in columns if column.source is not None}
    first = keys.column_names[0]
    same = first in name_of and present.field(name_of[first]).type == keys.schema.field(first).type
    key = name_of[first] if same else None
    batches = bases.read_rows(table.version(), list(name_of.values()), key, keys[first])
    found = [pa.Table.from_batches([evolved_batch(batch, present, columns)]) for batch in batches]
    return pa.concat_tables(found) if found else wanted.empty_table()


def _is_unchanged(field: pa.Field, name_of: Mapping[str, str], present: pa.Schema) -> bool:
    """Return whether a key column has the same name and type in the target as in the batch."""
    return name_of.get(field.name) == field.name and present.field(field.name).type == field.type


def _columns(table: DeltaTable, relation: int | None) -> pa.Schema:
    return columns_of_part(pa.schema(table.schema().to_arrow()), relation)


def _predicate(name: str, values: pa.Array) -> str | None:
    """Return an SQL predicate on column `name` that is true for all rows with one of the values; None if there is no
    such predicate for the type or number of values.
    """
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


def _match(keys: pa.Table, rows: pa.Table) -> pa.Array:
    """Return for each key the index of the row in `rows` with the same key; null if no row has it."""
    names = keys.column_names
    left = _comparable_keys(keys).append_column(_NUMBER, pa.array(np.arange(keys.num_rows)))
    right = _comparable_keys(rows.select(names)).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    joined = left.join(right, names, join_type="left outer").sort_by(_NUMBER)
    return joined[_ROW].combine_chunks()


def _comparable_keys(keys: pa.Table) -> pa.Table:
    return pa.table([comparable(column) for column in keys.columns], keys.column_names)


def _keyless_deletes(typed: pa.Table, rows: pa.Table, shape: RowShape, *, lenient: bool) -> pa.Table:
    """Return merge source rows that delete, for each row of `typed`, one equal row of the target.

    Each merge source row has position and ordinal of the row to delete. rows: rows of the target. If the target has too
    few equal rows, MissingBase is raised; if `lenient` is true, the surplus deletes are ignored instead.
    """
    names = [name for name in shape.columns.names if name not in (POSITION_COLUMN, ORDINAL_COLUMN)]
    both = pa.concat_tables([typed, rows])
    ids = row_ids((both[name] for name in names), both.num_rows)
    deleted, stored = ids[: typed.num_rows], ids[typed.num_rows :]
    kinds = int(ids.max()) + 1
    wanted, present = np.bincount(deleted, minlength=kinds), np.bincount(stored, minlength=kinds)
    if (wanted > present).any() and not lenient:
        first = Position(typed[POSITION_COLUMN][int(np.flatnonzero((wanted > present)[deleted])[0])].as_py())
        raise missing_rows(shape.schema.topic, int((wanted - present).clip(0).sum()), first)
    latest = keep_latest_per_id(_positions(rows), stored, wanted)
    return keyless_delete_rows(latest.rename_columns([POSITION_COLUMN, ORDINAL_COLUMN]), shape)


def keyless_delete_rows(places: pa.Table, shape: RowShape) -> pa.Table:
    """Return merge source rows that delete rows of a table without a key. places: position and ordinal of each row."""
    known = {name: places[name] for name in places.column_names} | {OP: _op_column("d", places.num_rows)}
    columns = [known.get(field.name, pa.nulls(places.num_rows, field.type)) for field in shape.source]
    return pa.Table.from_arrays(columns, schema=shape.source)


def missing_rows(topic: str, count: int, first: Position) -> MissingBase:
    """Return the error for rows of a table without a key that the log deletes, and the target does not contain.

    count: number of these rows. first: position of the first of these deletes.
    """
    return MissingBase(
        f"the log deletes {count} rows that the target of table {topic!r} does not contain; the first delete is at "
        f"position {first}"
    )


def _positions(rows: pa.Table) -> pa.Table:
    return pa.table({"position": rows[POSITION_COLUMN], "ordinal": rows[ORDINAL_COLUMN]})


def _most_selective_column(typed: pa.Table) -> pa.Table:
    """Return `typed` with only one column: the integer or text column without nulls that has most distinct values.

    Returns a table without columns if no column qualifies.
    """
    narrowing = [
        field.name
        for field in typed.schema
        if field.name not in (POSITION_COLUMN, ORDINAL_COLUMN)
        and (pa.types.is_integer(field.type) or pa.types.is_string(field.type))
        and not typed[field.name].null_count
    ]
    best = max(narrowing, key=lambda name: pc.count_distinct(typed[name]).as_py(), default=None)
    return typed.select([] if best is None else [best])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
