"""Table plan: what the rules of a Delta sink make of one table: the columns and types of its rows, path and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SinkRule, TableSettings, rule_of
from cdc.config.column_checks import (
    ColumnMismatch,
    left_out_key_columns,
    missing_key,
    unknown_columns,
    with_target_columns,
)
from cdc.config.sinks import HistoryMode
from cdc.errors import TransformFailed
from cdc.table import Column, TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN, column_name
from pipelines.sinks.contract import SparkAwaited
from pipelines.sinks.delta.target_layout import (
    MODE_COLUMNS,
    PLAIN,
    TargetLayout,
    check_partition_values,
    checked_partition_column,
    has_bounds,
    is_partition_type,
)
from pipelines.transform.expressions import Expressions, resolve_expressions
from pipelines.transform.table_transform import TableTransform, rename_columns
from pipelines.types import Policy
from pipelines.types.typed_rows import sent_cells, target_schema, typed_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OP: Final = "_op"
"""Column of a merge's source; a column of a source table never begins with an underscore."""
POSITION_KEY: Final = (POSITION_COLUMN, ORDINAL_COLUMN)
"""The columns that find a row of a table without a key."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The columns and types of a target's rows; pickled to executors."""

    schema: TableSchema
    """The table as the target names it: columns of the source after drops, renames and masks of the transform."""
    policy: Policy
    transform: TableTransform | None = None
    expressions: Expressions | None = None
    partition_texts: tuple[str, ...] = ()
    """Text columns that partition the target's files."""
    relation: int | None = None
    """The relation, if the target is shared and each row carries its relation."""

    @property
    def image_columns(self) -> pa.Schema:
        """The columns of row images: those of the target without the computed ones."""
        return (
            target_schema(self.schema, self.policy)
            if self.transform is None
            else self.transform.row_schema(self.policy)
        )

    @property
    def columns(self) -> pa.Schema:
        """The target's columns."""
        own = self.image_columns if self.expressions is None else self.expressions.columns(self.image_columns)
        return own if self.relation is None else own.append(pa.field(RELATION_COLUMN, pa.int64()))

    def columns_in_mode(self, mode: HistoryMode) -> pa.Schema:
        """The target's columns and those that a history mode adds."""
        return pa.schema([*self.columns, *MODE_COLUMNS[mode]])

    @property
    def source(self) -> pa.Schema:
        """The columns of row images and `_op`."""
        return self.image_columns.append(pa.field(OP, pa.string()))

    @property
    def key(self) -> tuple[str, ...]:
        """Delta names of the columns that find a row: the key in its order, or position and ordinal without a key."""
        return tuple(column_name(column.name) for column in self.schema.key) or POSITION_KEY

    @property
    def needs_complete_rows(self) -> bool:
        """Whether a transform in Python makes the rows: then the image of a delete cannot become a row."""
        return self.transform is not None and self.transform.rule.python is not None

    def rows(self, images: pa.Table) -> pa.Table:
        """Folded upserts in `image_columns`; an unsent column has a placeholder, as in typed_rows."""
        if self.transform is None:
            return typed_rows(images, self.schema, self.policy)
        return self.transform.rows(images, self.policy)

    def mask_image(self, image: Mapping[int, str | None]) -> dict[int, str | None]:
        """Mask an image, see pipelines.sinks.contract.ParkingSink.image_mask."""
        known = {column.id for column in self.schema.columns}
        masks = {} if self.transform is None else self.transform.masks
        own = {column: text for column, text in image.items() if column in known}
        return {column: masks[column].over(text) if column in masks else text for column, text in own.items()}

    def finished_frame(self, source: DataFrame) -> DataFrame:
        """A merge's source in the target's columns, as TablePlans.finish_source."""
        finished = source if self.expressions is None else self.expressions.apply_to_frame(source)
        for name in self.partition_texts:
            finished = finished.withColumn(name, checked_partition_column(name))
        if self.relation is None:
            return finished
        return finished.selectExpr("*", f"{int(self.relation)}L AS {RELATION_COLUMN}")

    def with_relation(self, rows: pa.Table) -> pa.Table:
        """Rows of a merge's source with their relation, if the target is shared."""
        if self.relation is None:
            return rows
        return rows.append_column(RELATION_COLUMN, pa.repeat(pa.scalar(self.relation, pa.int64()), rows.num_rows))

    def default_of(self, column: Column) -> str | None:
        """The value of a column in rows older than the column, as text."""
        return column.missing if self.transform is None else self.transform.missing(column)


class TablePlans:
    """The plans of one sink, made once for each version of a table; any thread may use them."""

    def __init__(self, rules: Sequence[SinkRule]) -> None:
        self._rules = rules
        self._shapes: dict[tuple[TableSchema, Policy], RowShape] = {}
        self._owners: dict[str, TableSchema] = {}
        """By target path."""
        self._owners_lock = Lock()
        self.spark: SparkSession | None = None

    def of(self, schema: TableSchema, policy: Policy) -> RowShape:
        """The shape of one table's rows.

        Raises TransformFailed for a transform that does not fit the table, SparkAwaited for expressions before Spark
        has started.
        """
        found = self._shapes.get((schema, policy))
        if found is None:
            found = self._shapes[schema, policy] = self._shape(schema, policy)
        return found

    def _shape(self, schema: TableSchema, policy: Policy) -> RowShape:
        shape = self._transformed_shape(schema, policy)
        if self._sharing_rule(schema.topic) is not None:
            shape = replace(shape, relation=schema.relation)
        columns = shape.columns
        texts = tuple(n for n in self.layout(shape).partition_by if pa.types.is_string(columns.field(n).type))
        return replace(shape, partition_texts=texts)

    def _transformed_shape(self, schema: TableSchema, policy: Policy) -> RowShape:
        rule = rule_of(schema.topic, self._rules)
        if rule is None or rule.transform is None:
            return RowShape(schema, policy)
        transform, policy = TableTransform.of(rule.transform, schema), rename_columns(policy, rule.transform.rename)
        if not rule.transform.needs_spark:
            return RowShape(transform.schema, policy, transform)
        if self.spark is None:
            raise SparkAwaited(f"the rule of table {schema.topic!r} has expressions: waiting for Spark")
        expressions = resolve_expressions(rule.transform, transform.row_schema(policy), schema.topic, self.spark)
        return RowShape(transform.schema, policy, transform, expressions)

    def claim_path(self, uri: str, schema: TableSchema) -> None:
        """Raise TransformFailed if the target of another table has the path, contains it, or is inside it.

        Tables of one rule with merge_tables may have the same path.
        """
        with self._owners_lock:
            for other, owner in self._owners.items():
                conflicts = owner.relation != schema.relation and owner.topic != schema.topic
                if other == uri and self._sharing_rule(owner.topic) is not None:
                    conflicts = self._sharing_rule(owner.topic) is not self._sharing_rule(schema.topic)
                if conflicts and (f"{uri}/".startswith(f"{other}/") or f"{other}/".startswith(f"{uri}/")):
                    raise TransformFailed(
                        f"path {uri!r} for the target of table {schema.topic!r} overlaps path {other!r} of the target "
                        f"of table {owner.topic!r}"
                    )
            self._owners[uri] = schema

    def _sharing_rule(self, topic: str) -> SinkRule | None:
        """The rule of a table, if it puts several tables into one target."""
        rule = rule_of(topic, self._rules)
        return rule if rule is not None and rule.merge_tables else None

    def layout(self, shape: RowShape) -> TargetLayout:
        """The layout with which the target of a table is created."""
        rule = rule_of(shape.schema.topic, self._rules)
        if rule is None:
            return PLAIN
        text = "text, a whole number, a date or a boolean"
        partitions = _columns("partition_by", rule.partition_by, shape, is_partition_type, text)
        ordered = _columns("cluster_by", rule.cluster_by, shape, has_bounds, "a type for which files have bounds")
        if both := sorted(set(partitions) & set(ordered)):
            raise TransformFailed(
                f"the rule of table {shape.schema.topic!r} names column {both[0]!r} in both cluster_by and partition_by"
            )
        transform = "" if shape.transform is None else shape.transform.fingerprint
        if rule.merge_tables:
            partitions = tuple(dict.fromkeys((RELATION_COLUMN, *partitions)))
        return TargetLayout(partitions, rule.properties, transform, cluster_by=ordered, is_shared=rule.merge_tables)

    def apply_filter(self, images: pa.Table, shape: RowShape) -> pa.Table:
        """The images with the transform's filter applied: a rejected row becomes a delete.

        An image with all columns that the target needs becomes complete. A row that the filter kept out has no base
        row in the target, and needs none as long as it stays out.
        """
        if shape.transform is None:
            return images
        images = shape.transform.settled(images)
        expressions = shape.expressions
        if expressions is None or expressions.where is None:
            return images
        number_of = {column_name(column.name): number for number, column in enumerate(shape.schema.sent)}
        needed = [number_of[name] for name in expressions.decides if name in number_of]
        partial = pc.and_(pc.equal(images["op"], "u"), pc.invert(pc.fill_null(images["complete"], fill_value=True)))
        decidable = partial.to_numpy(zero_copy_only=False) & sent_cells(images, shape.schema)[needed].all(axis=0)
        if not decidable.any():
            return images
        numbers = np.flatnonzero(decidable)
        rows = shape.rows(images.take(pa.array(numbers)))
        rejected = expressions.rejects(rows, self._session()).to_numpy(zero_copy_only=False).astype(bool)
        deleted = np.zeros(images.num_rows, bool)
        deleted[numbers[rejected]] = True
        ops = pc.if_else(pa.array(deleted), "d", images["op"].combine_chunks())
        return images.set_column(images.column_names.index("op"), "op", ops)

    def finish_source(self, source: pa.Table, shape: RowShape) -> pa.Table:
        """A merge's source in the target's columns; raises ValueNotRepresentable as check_partition_values does."""
        finished = source if shape.expressions is None else shape.expressions.apply(source, self._session())
        check_partition_values(finished, shape.partition_texts, shape.schema.topic)
        return shape.with_relation(finished)

    def _session(self) -> SparkSession:
        if self.spark is None:
            raise SparkAwaited("a rule has expressions: waiting for Spark")
        return self.spark


def _columns(
    key: str, names_in_rule: Sequence[str], shape: RowShape, fits: Callable[[pa.DataType], bool], expected: str
) -> tuple[str, ...]:
    """The columns of a target that a key of its rule names; raises TransformFailed for an unknown or unfit column."""
    names = tuple(
        dict.fromkeys(column_name(name) if name not in shape.columns.names else name for name in names_in_rule)
    )
    if unknown := sorted(set(names) - set(shape.columns.names)):
        raise TransformFailed(f"{key}: the target of table {shape.schema.topic!r} has no column {unknown[0]!r}")
    for name in names:
        if not fits(kind := shape.columns.field(name).type):
            raise TransformFailed(
                f"{key}: column {name!r} in the target of table {shape.schema.topic!r} has type {kind!s}, "
                f"but {key} needs {expected}"
            )
    return names


def with_selected_columns(schema: TableSchema, settings: TableSettings) -> TableSchema:
    """The table with only the columns of its target; raises SchemaNotApplicable if that leaves out a key column.

    An unknown name in the settings is no error here; see check_named.
    """
    _raise_first(left_out_key_columns(schema, settings))
    return with_target_columns(schema, settings)


def check_named(schema: TableSchema, rules: Sequence[SinkRule]) -> None:
    """Raise SchemaNotApplicable for a column name in the rule of a table that the table does not have."""
    _raise_first(unknown_columns(schema, rule_of(schema.topic, rules)))


def check_history_mode(schema: TableSchema, mode: HistoryMode) -> None:
    """Raise SchemaNotApplicable for a table without a key in a history mode that needs one."""
    _raise_first(missing_key(schema, mode))


def _raise_first(found: Iterator[ColumnMismatch]) -> None:
    for mismatch in found:
        raise mismatch.error


def rules_in_subdirectory(rules: Sequence[SinkRule], name: str) -> tuple[SinkRule, ...]:
    """The rules for targets in a subdirectory, with that name, of the targets of the sink."""
    return tuple(
        rule if rule.path is None else rule.model_copy(update={"path": f"{rule.path}/{name}"}) for rule in rules
    )
