"""Target columns: the columns, types, path and layout that a Delta sink's rules set for the target of one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SinkRule, rule_of
from cdc.config.delta_sink import HistoryMode, missing_key
from cdc.config.sink_rules import raise_first
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
from pipelines.types.failing_rows import failing_rows
from pipelines.types.typed_rows import sent_cells, target_schema, typed_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OP: Final = "_op"
"""Name of the column that has the operation (`u`, `d`) in a merge source. No source column gets this name in a target,
because none gets a name that begins with an underscore.
"""
POSITION_KEY: Final = (POSITION_COLUMN, ORDINAL_COLUMN)
"""Names of the columns by which a merge finds a row of a table without a key."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The columns and types of a target's rows. Spark executors receive pickled instances."""

    schema: TableSchema
    """The source table after the drops, renames and masks of the rule's transform."""
    policy: Policy
    transform: TableTransform | None = None
    expressions: Expressions | None = None
    partition_texts: tuple[str, ...] = ()
    """Names of the text columns that partition the target's files."""
    relation: int | None = None
    """The relation, if the target is shared and each row contains its relation; otherwise None."""

    @property
    def image_columns(self) -> pa.Schema:
        """The columns that come from row images: the target's columns without the computed ones."""
        return (
            target_schema(self.schema, self.policy)
            if self.transform is None
            else self.transform.row_schema(self.policy)
        )

    @property
    def columns(self) -> pa.Schema:
        """All columns of the target, without those that exist only because of a history mode."""
        own = self.image_columns if self.expressions is None else self.expressions.columns(self.image_columns)
        return own if self.relation is None else own.append(pa.field(RELATION_COLUMN, pa.int64()))

    def columns_in_mode(self, mode: HistoryMode) -> pa.Schema:
        """Return `columns`, followed by the columns that only this history mode has."""
        return pa.schema([*self.columns, *MODE_COLUMNS[mode]])

    @property
    def source(self) -> pa.Schema:
        """The columns of a merge source before expressions are computed: the columns from row images, and `_op`."""
        return self.image_columns.append(pa.field(OP, pa.string()))

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the target's columns by which a merge finds a row: the key columns in their order, or position and
        ordinal for a table without a key.
        """
        return tuple(column_name(column.name) for column in self.schema.key) or POSITION_KEY

    @property
    def needs_complete_rows(self) -> bool:
        """Whether a Python function of the rule computes the rows. Such a function cannot compute a row from a delete's
        image.
        """
        return self.transform is not None and self.transform.rule.python is not None

    def rows(self, images: pa.Table) -> pa.Table:
        """Convert folded upserts to typed rows that have the columns `image_columns`.

        An unsent column gets a placeholder; see `typed_rows`.
        """
        if self.transform is None:
            return typed_rows(images, self.schema, self.policy)
        return self.transform.rows(images, self.policy)

    def settled(self, images: pa.Table) -> pa.Table:
        """Mark as complete each partial image that has all columns of the target."""
        return images if self.transform is None else self.transform.settled(images)

    def decidable_rows(self, images: pa.Table) -> tuple[np.ndarray, pa.Table]:
        """Return the partial images that have all columns which the filter `where` reads: (their numbers, typed rows).

        images: folded rows, as `settled` returns them. An image with a value that its column cannot represent is left
        out, because the target refuses it.
        """
        decides = () if self.expressions is None or self.expressions.where is None else self.expressions.decides
        number_of = {column_name(column.name): number for number, column in enumerate(self.schema.sent)}
        needed = [number_of[name] for name in decides if name in number_of]
        partial = pc.and_(pc.equal(images["op"], "u"), pc.invert(pc.fill_null(images["complete"], fill_value=True)))
        decidable = partial.to_numpy(zero_copy_only=False) & sent_cells(images, self.schema)[needed].all(axis=0)
        numbers = np.flatnonzero(decidable)
        failing = failing_rows(images.take(pa.array(numbers)), self.rows, len(numbers))
        numbers = np.delete(numbers, list(failing))
        return numbers, self.rows(images.take(pa.array(numbers)))

    def mask_image(self, image: Mapping[int, str | None]) -> dict[int, str | None]:
        """Return a row image without the columns that the target does not have, and with masked values.

        See pipelines.sinks.contract.ParkingSink.image_mask.
        """
        known = {column.id for column in self.schema.columns}
        masks = {} if self.transform is None else self.transform.masks
        own = {column: text for column, text in image.items() if column in known}
        return {column: masks[column].over(text) if column in masks else text for column, text in own.items()}

    def finished_frame(self, source: DataFrame) -> DataFrame:
        """Return a Spark frame of merge source rows with computed columns and `_relation` added; see
        `TablePlans.finish_source`.
        """
        finished = source if self.expressions is None else self.expressions.apply_to_frame(source)
        for name in self.partition_texts:
            finished = finished.withColumn(name, checked_partition_column(name, OP))
        if self.relation is None:
            return finished
        return finished.selectExpr("*", f"{int(self.relation)}L AS {RELATION_COLUMN}")

    def check_partitions(self, source: pa.Table) -> None:
        """Raise ValueNotRepresentable for a row whose text in a partition column cannot name a directory.

        A delete writes no row, so its texts are not checked. source: a merge source with all columns of the target.
        """
        if not self.partition_texts:
            return
        written = source.filter(pc.not_equal(source[OP], "d"))
        check_partition_values(written, self.partition_texts, self.schema.topic)

    def with_relation(self, rows: pa.Table) -> pa.Table:
        """Add the column `_relation` to merge source rows if the target is shared; otherwise return the same rows."""
        if self.relation is None:
            return rows
        return rows.append_column(RELATION_COLUMN, pa.repeat(pa.scalar(self.relation, pa.int64()), rows.num_rows))

    def default_of(self, column: Column) -> str | None:
        """Return the value, as Postgres text, that a column has in rows older than the column; None for NULL."""
        return column.missing if self.transform is None else self.transform.missing(column)


class TablePlans:
    """The row shapes, layouts and paths of one sink's targets. A shape is computed once per version of a source table.

    Any thread may use an instance.
    """

    def __init__(self, rules: Sequence[SinkRule]) -> None:
        self._rules = rules
        self._shapes: dict[tuple[TableSchema, Policy], RowShape] = {}
        self._owners: dict[str, TableSchema] = {}
        """Path of a target → the source table that claimed it last."""
        self._inside: dict[str, list[str]] = {}
        """Directory → the paths of `_owners` inside it; for every directory above such a path."""
        self._owners_lock = Lock()
        self.spark: SparkSession | None = None

    def of(self, schema: TableSchema, policy: Policy) -> RowShape:
        """Return the columns and types of a source table's rows in its target.

        Raises TransformFailed for a transform that does not fit the table. Raises SparkAwaited if the rule has
        expressions and Spark has not started.
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
        """Reserve a path for the target of a source table.

        Raises TransformFailed if the target of another table has the same path, contains it, or is inside it. Tables of
        a rule with `merge_tables` may share a path.
        """
        with self._owners_lock:
            known = self._owners.get(uri)
            if known is not None and (known.relation, known.topic) == (schema.relation, schema.topic):
                return
            above = list(accumulate(uri.split("/")[:-1], "{}/{}".format))
            for other in (*above, uri, *self._inside.get(uri, ())):
                owner = self._owners.get(other)
                if owner is None:
                    continue
                conflicts = owner.relation != schema.relation and owner.topic != schema.topic
                if other == uri and self._sharing_rule(owner.topic) is not None:
                    conflicts = self._sharing_rule(owner.topic) is not self._sharing_rule(schema.topic)
                if conflicts:
                    raise TransformFailed(
                        f"path {uri!r} for the target of table {schema.topic!r} overlaps path {other!r} of the target "
                        f"of table {owner.topic!r}"
                    )
            if uri not in self._owners:
                for folder in above:
                    self._inside.setdefault(folder, []).append(uri)
            self._owners[uri] = schema

    def _sharing_rule(self, topic: str) -> SinkRule | None:
        """Return the rule of a table if it puts several tables into one target; otherwise None."""
        rule = rule_of(topic, self._rules)
        return rule if rule is not None and rule.merge_tables else None

    def layout(self, shape: RowShape) -> TargetLayout:
        """Return the layout with which the target of a table is created.

        Raises TransformFailed if `partition_by` or `cluster_by` names an unknown or unsuitable column, or if both name
        the same column.
        """
        rule = rule_of(shape.schema.topic, self._rules)
        if rule is None:
            return PLAIN
        text = "text, a whole number, a date or a boolean"
        partitions = _columns("partition_by", rule.partition_by, shape, is_partition_type, text)
        ordered = _columns("cluster_by", rule.cluster_by, shape, has_bounds, "a type other than float, list or binary")
        if both := sorted(set(partitions) & set(ordered)):
            raise TransformFailed(
                f"the rule of table {shape.schema.topic!r} names column {both[0]!r} in both cluster_by and partition_by"
            )
        transform = "" if shape.transform is None else shape.transform.fingerprint
        if rule.merge_tables:
            partitions = tuple(dict.fromkeys((RELATION_COLUMN, *partitions)))
        return TargetLayout(partitions, rule.properties, transform, cluster_by=ordered, is_shared=rule.merge_tables)

    def apply_filter(self, images: pa.Table, shape: RowShape) -> pa.Table:
        """Apply the transform's filter to the partial images that have all columns which the filter reads.

        If the filter rejects such an image, the image becomes a delete, which needs no base row. All other rows stay. A
        partial image that has all columns of the target is marked complete.
        """
        images, expressions = shape.settled(images), shape.expressions
        if expressions is None or expressions.where is None:
            return images
        numbers, rows = shape.decidable_rows(images)
        if not len(numbers):
            return images
        rejected = expressions.rejects(rows, self._session()).to_numpy(zero_copy_only=False).astype(bool)
        return as_deletes(images, numbers[rejected])

    def finish_source(self, source: pa.Table, shape: RowShape) -> pa.Table:
        """Return a merge source with the target's columns: computed columns and `_relation` are added.

        Raises ValueNotRepresentable for a text that cannot be the value of a partition column.
        """
        finished = source if shape.expressions is None else shape.expressions.apply(source, self._session())
        shape.check_partitions(finished)
        return shape.with_relation(finished)

    def check_partitions(self, source: pa.Table, shape: RowShape) -> None:
        """Raise ValueNotRepresentable for a text in a merge source that cannot be the value of a partition column.

        source: rows whose expressions are not computed yet. They are computed only if one gives a partition column.
        """
        if {*shape.partition_texts} <= {*source.column_names}:
            shape.check_partitions(source)
        else:
            self.finish_source(source, shape)

    def _session(self) -> SparkSession:
        if self.spark is None:
            raise SparkAwaited("a rule has expressions: waiting for Spark")
        return self.spark


def as_deletes(images: pa.Table, numbers: np.ndarray) -> pa.Table:
    """Return the folded rows with op `d` in the rows that have these numbers."""
    deleted = np.zeros(images.num_rows, bool)
    deleted[numbers] = True
    ops = pc.if_else(pa.array(deleted), "d", images["op"].combine_chunks())
    return images.set_column(images.column_names.index("op"), "op", ops)


def _columns(
    key: str, names_in_rule: Sequence[str], shape: RowShape, fits: Callable[[pa.DataType], bool], expected: str
) -> tuple[str, ...]:
    """Return the target's columns that one key of the rule names, such as `cluster_by`.

    key: this key, for errors. names_in_rule: its value in the rule. fits: function that returns whether a type is
    allowed. expected: description of the allowed types. Raises TransformFailed for a column that is unknown or has a
    type that is not allowed.
    """
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


def check_history_mode(schema: TableSchema, mode: HistoryMode) -> None:
    """Raise SchemaNotApplicable if the history mode needs a key and the table has none."""
    raise_first(missing_key(schema, mode))


def rules_in_subdirectory(rules: Sequence[SinkRule], name: str) -> tuple[SinkRule, ...]:
    """Return the rules with `/name` appended to each path, which is then a subdirectory of the earlier path."""
    return tuple(
        rule if rule.path is None else rule.model_copy(update={"path": f"{rule.path}/{name}"}) for rule in rules
    )
