"""Merge source: folded rows as the target's columns plus `_op`, built on the driver or on executors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from cdc.stores.dead_letter_rows import Image
from cdc.table import Column, TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN, column_name
from pipelines.sinks.delta.merge import OP, POSITION_KEY
from pipelines.sinks.delta.partition_values import checked_partition_column
from pipelines.transform.expressions import Expressions
from pipelines.transform.table_transform import TableTransform
from pipelines.types import Policy
from pipelines.types.typed_rows import target_schema, typed_keys, typed_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class RowShape:
    """The columns and types of a target's rows; pickled to executors."""

    schema: TableSchema
    """The table as the target names it: columns of the source after drops, renames and masks of the transform."""
    policy: Policy
    transform: TableTransform | None = None
    expressions: Expressions | None = None
    parted: tuple[str, ...] = ()
    """Text columns that partition the target's files, see pipelines.sinks.delta.partition_values."""
    part: int | None = None
    """The relation, if the target is shared and each row carries its relation."""

    @property
    def held(self) -> pa.Schema:
        """The columns of row images: the target's without the computed ones."""
        return (
            target_schema(self.schema, self.policy)
            if self.transform is None
            else self.transform.row_schema(self.policy)
        )

    @property
    def columns(self) -> pa.Schema:
        """The target's columns."""
        own = self.held if self.expressions is None else self.expressions.columns(self.held)
        return own if self.part is None else own.append(pa.field(RELATION_COLUMN, pa.int64()))

    @property
    def source(self) -> pa.Schema:
        """The columns of row images and `_op`."""
        return self.held.append(pa.field(OP, pa.string()))

    def rows(self, images: pa.Table) -> pa.Table:
        """Folded upserts in the columns of `held`; an unsent column has a placeholder, as in typed_rows."""
        if self.transform is None:
            return typed_rows(images, self.schema, self.policy)
        return self.transform.rows(images, self.policy)

    def beside(self, image: Image) -> dict[int, str | None]:
        """Mask an image, see pipelines.sinks.contract.ParkingSink.image_mask."""
        known = {column.id for column in self.schema.columns}
        masks = {} if self.transform is None else self.transform.masks
        own = {column: text for column, text in image.items() if column in known}
        return {column: masks[column].over(text) if column in masks else text for column, text in own.items()}

    def finished_frame(self, source: DataFrame) -> DataFrame:
        """A merge's source in the target's columns, as Shapes.finished."""
        made = source if self.expressions is None else self.expressions.apply_to_frame(source)
        for name in self.parted:
            made = made.withColumn(name, checked_partition_column(name))
        return made if self.part is None else made.selectExpr("*", f"{int(self.part)}L AS {RELATION_COLUMN}")

    def named(self, rows: pa.Table) -> pa.Table:
        """Rows of a merge's source with their relation, where the target is shared."""
        if self.part is None:
            return rows
        return rows.append_column(RELATION_COLUMN, pa.repeat(pa.scalar(self.part, pa.int64()), rows.num_rows))

    def missing(self, column: Column) -> str | None:
        """The value of a column in rows older than the column, as text."""
        return column.missing if self.transform is None else self.transform.missing(column)

    @property
    def by_rows(self) -> bool:
        """Whether every image can become a row, also the image of a delete; not so under a transform in Python."""
        return self.transform is None or self.transform.rule.python is None

    @property
    def key(self) -> tuple[str, ...]:
        """Delta names of the columns that find a row: the key in its order, or position and ordinal without a key."""
        return tuple(column_name(column.name) for column in self.schema.key) or POSITION_KEY


def split(images: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(deletes and complete upserts, incomplete upserts)."""
    incomplete = pc.and_(pc.equal(images["op"], "u"), pc.invert(pc.fill_null(images["complete"], fill_value=True)))
    return images.filter(pc.invert(incomplete)), images.filter(incomplete)


def source_rows(images: pa.Table, shape: RowShape) -> pa.Table:
    """Deletes and complete upserts in the folded shape as a merge's source."""
    upserts = images.filter(pc.equal(images["op"], "u"))
    deletes = images.filter(pc.equal(images["op"], "d"))
    rows = as_upserts(shape.rows(upserts), shape)
    return pa.concat_tables([rows, _deletes(deletes, shape)]) if deletes.num_rows else rows


def as_upserts(rows: pa.Table, shape: RowShape) -> pa.Table:
    """Whole typed rows as a merge's source."""
    return pa.Table.from_arrays([*rows.columns, _constant("u", rows.num_rows)], schema=shape.source)


def source_frame(frame: DataFrame, shape: RowShape) -> DataFrame:
    """As source_rows, typed by the executors; `frame` holds no incomplete upserts."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def typed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from source_rows(pa.Table.from_batches([batch]), shape).to_batches()

    return frame.mapInArrow(typed, from_arrow_schema(shape.source))


def _deletes(images: pa.Table, shape: RowShape) -> pa.Table:
    keys = typed_keys(images["key"], shape.schema, shape.policy, images["position"])
    held = {POSITION_COLUMN: images["position"], ORDINAL_COLUMN: images["ordinal"], OP: _constant("d", images.num_rows)}
    held |= {name: keys[name] for name in keys.column_names}
    columns = [
        held[field.name] if field.name in held else pa.nulls(images.num_rows, field.type) for field in shape.source
    ]
    return pa.Table.from_arrays(columns, schema=shape.source)


def _constant(op: str, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(op, pa.string()), rows)
