"""Table plans: the rules of a Delta sink applied to its tables: columns, path and layout of each target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

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
from cdc.table import TableSchema
from cdc.target_names import RELATION_COLUMN, column_name
from pipelines.sinks.contract import SparkAwaited
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.sinks.delta.partition_values import check_partition_values
from pipelines.sinks.delta.table_layout import PLAIN, TableLayout, has_bounds, parts_files
from pipelines.transform.expressions import resolve_expressions
from pipelines.transform.table_transform import TableTransform, rename_columns
from pipelines.types import Policy
from pipelines.types.typed_rows import sent_cells

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TablePlans:
    """The plans of one sink, made once for each version of a table; any thread may use them."""

    def __init__(self, rules: Sequence[SinkRule]) -> None:
        self._rules = rules
        self._known: dict[tuple[TableSchema, Policy], RowShape] = {}
        self._taken: dict[str, TableSchema] = {}
        self._one_taker = Lock()
        self.spark: SparkSession | None = None

    def of(self, schema: TableSchema, policy: Policy) -> RowShape:
        """The shape of one table's rows.

        Raises TransformFailed for a transform that does not go with the table, SparkAwaited for expressions
        while Spark is not up.
        """
        found = self._known.get((schema, policy))
        if found is None:
            found = self._known[schema, policy] = self._made(schema, policy)
        return found

    def _made(self, schema: TableSchema, policy: Policy) -> RowShape:
        shape = self._transformed(schema, policy)
        if self._merges(schema.topic) is not None:
            shape = replace(shape, part=schema.relation)
        columns = shape.columns
        parted = tuple(n for n in self.layout(shape).partition_by if pa.types.is_string(columns.field(n).type))
        return replace(shape, parted=parted)

    def _transformed(self, schema: TableSchema, policy: Policy) -> RowShape:
        rule = rule_of(schema.topic, self._rules)
        if rule is None or rule.transform is None:
            return RowShape(schema, policy)
        transform, policy = TableTransform.of(rule.transform, schema), rename_columns(policy, rule.transform.rename)
        if not rule.transform.needs_spark:
            return RowShape(transform.schema, policy, transform)
        if self.spark is None:
            raise SparkAwaited(f"the rule of {schema.topic!r} has expressions")
        expressions = resolve_expressions(rule.transform, transform.row_schema(policy), schema.topic, self.spark)
        return RowShape(transform.schema, policy, transform, expressions)

    def claim_path(self, uri: str, schema: TableSchema) -> None:
        """Raise TransformFailed where the target of another table lies there, around it, or inside of it.

        Tables of one rule that merges them may lie in the same place.
        """
        with self._one_taker:
            for other, owner in self._taken.items():
                strange = owner.relation != schema.relation and owner.topic != schema.topic
                if other == uri and self._merges(owner.topic) is not None:
                    strange = self._merges(owner.topic) is not self._merges(schema.topic)
                if strange and (f"{uri}/".startswith(f"{other}/") or f"{other}/".startswith(f"{uri}/")):
                    raise TransformFailed(
                        f"the target of table {schema.topic!r} would be {uri!r}, which overlaps {other!r}, the "
                        "target of table "
                        f"{owner.topic!r}"
                    )
            self._taken[uri] = schema

    def _merges(self, topic: str) -> SinkRule | None:
        """The rule of a table, if that puts many into one target."""
        rule = rule_of(topic, self._rules)
        return rule if rule is not None and rule.merge_tables else None

    def layout(self, shape: RowShape) -> TableLayout:
        """How the target of a table is made."""
        rule = rule_of(shape.schema.topic, self._rules)
        if rule is None:
            return PLAIN
        text = "text, a whole number, a date or a boolean"
        parted = _columns("partition_by", rule.partition_by, shape, parts_files, text)
        ordered = _columns("cluster_by", rule.cluster_by, shape, has_bounds, "a type of which files have bounds")
        if both := sorted(set(parted) & set(ordered)):
            raise TransformFailed(
                f"cluster_by: column {both[0]!r} of {shape.schema.topic!r} is already in partition_by"
            )
        transform = "" if shape.transform is None else shape.transform.fingerprint
        if rule.merge_tables:
            parted = tuple(dict.fromkeys((RELATION_COLUMN, *parted)))
        return TableLayout(parted, rule.properties, transform, cluster_by=ordered, merged=rule.merge_tables)

    def apply_filter(self, images: pa.Table, shape: RowShape) -> pa.Table:
        """Images of which all is said that the target needs are complete; those that a filter rejects are deletes.

        A row that the filter kept out has no base in the target, and needs none as long as it stays out.
        """
        if shape.transform is None:
            return images
        images = shape.transform.settled(images)
        expressions = shape.expressions
        if expressions is None or expressions.where is None:
            return images
        place_of = {column_name(column.name): place for place, column in enumerate(shape.schema.sent)}
        needed = [place_of[name] for name in expressions.decides if name in place_of]
        partial = pc.and_(pc.equal(images["op"], "u"), pc.invert(pc.fill_null(images["complete"], fill_value=True)))
        told = partial.to_numpy(zero_copy_only=False) & sent_cells(images, shape.schema)[needed].all(axis=0)
        if not told.any():
            return images
        places = np.flatnonzero(told)
        rows = shape.rows(images.take(pa.array(places)))
        rejected = expressions.rejects(rows, self._session()).to_numpy(zero_copy_only=False).astype(bool)
        gone = np.zeros(images.num_rows, bool)
        gone[places[rejected]] = True
        ops = pc.if_else(pa.array(gone), "d", images["op"].combine_chunks())
        return images.set_column(images.column_names.index("op"), "op", ops)

    def finish_source(self, source: pa.Table, shape: RowShape) -> pa.Table:
        """A merge's source in the target's columns; raises ValueNotRepresentable as check_parts does."""
        made = source if shape.expressions is None else shape.expressions.apply(source, self._session())
        check_partition_values(made, shape.parted, shape.schema.topic)
        return shape.named(made)

    def _session(self) -> SparkSession:
        if self.spark is None:
            raise SparkAwaited("expressions are computed by Spark")
        return self.spark


def _columns(
    key: str, said: Sequence[str], shape: RowShape, fits: Callable[[pa.DataType], bool], expected: str
) -> tuple[str, ...]:
    """The columns of a target that a key of its rule names; raises TransformFailed for one that cannot be meant."""
    names = tuple(dict.fromkeys(column_name(name) if name not in shape.columns.names else name for name in said))
    if unknown := sorted(set(names) - set(shape.columns.names)):
        raise TransformFailed(f"{key}: the target of {shape.schema.topic!r} has no column {unknown[0]!r}")
    for name in names:
        if not fits(kind := shape.columns.field(name).type):
            raise TransformFailed(
                f"{key}: column {name!r} of the target of {shape.schema.topic!r} is {kind!s}: expected {expected}"
            )
    return names


def with_selected_columns(schema: TableSchema, settings: TableSettings) -> TableSchema:
    """The table with only the columns that its target has; raises SchemaNotApplicable if that leaves out a key column.

    A name in the settings that the table does not have is no error here; see check_named.
    """
    _raise_first(left_out_key_columns(schema, settings))
    return with_target_columns(schema, settings)


def check_named(schema: TableSchema, rules: Sequence[SinkRule]) -> None:
    """Raise SchemaNotApplicable for a name in the rule of a table that none of its columns has."""
    _raise_first(unknown_columns(schema, rule_of(schema.topic, rules)))


def check_kept(schema: TableSchema, keeping: HistoryMode) -> None:
    """Raise SchemaNotApplicable for a table without a key in a history mode that needs one."""
    _raise_first(missing_key(schema, keeping))


def _raise_first(found: Iterator[ColumnMismatch]) -> None:
    for mismatch in found:
        raise mismatch.error


def rules_below(rules: Sequence[SinkRule], below: str) -> tuple[SinkRule, ...]:
    """The rules for targets that lie in a folder called so inside those of the sink."""
    return tuple(
        rule if rule.path is None else rule.model_copy(update={"path": f"{rule.path}/{below}"}) for rule in rules
    )
