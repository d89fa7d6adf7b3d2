"""Schema evolution: plans how the columns of a target change after its source table changed.

This module only computes plans; `DeltaTarget.evolve_columns` executes them. The plan for a target that already has the
wanted columns is empty.

Columns are matched by id, which is in the field metadata of both schemas. If columns are only added, the plan is one
commit of metadata. Every other plan is one commit that rewrites all rows. Because a plan is one commit, a crash leaves
it complete or absent.

Delta's column mapping would avoid the rewrite. But delta-rs can neither add a column to a table with column mapping nor
run OPTIMIZE on it, and it cannot read a table with widened types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from cdc.config import DroppedColumns, SchemaChanges, Transform
from cdc.errors import SchemaNotApplicable
from cdc.table import Column, TableSchema
from cdc.target_names import COLUMN_ID_KEY, name_of_column
from pipelines.types import Policy, declared_as, family_of
from pipelines.types.families import ArrayConversion, widening
from pipelines.types.typed_rows import COPY_AGAIN, TYPE_KEY


@dataclass(frozen=True, slots=True)
class FilledColumn:
    """A column of a target as it is read or rewritten: its new field, and the present column that fills it."""

    field: pa.Field
    source: str | None = None
    """Name of the target's column that has the values; None if all values are null."""
    convert: ArrayConversion | None = None
    """Function that converts the values; None if they do not change."""


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """A request to change the columns of a target, because its source table has other columns now."""

    wanted: pa.Schema
    policy: SchemaChanges
    replaced: bool
    """Whether a full copy replaces every row, so that present values may be lost."""
    topic: str
    """Name of the source table, for error messages."""
    dropped: frozenset[bytes] = frozenset()
    """Column ids of the target's columns to drop."""


@dataclass(frozen=True, slots=True)
class EvolutionPlan:
    """The changes of a target's columns that one commit makes. A plan without `steps` changes nothing."""

    steps: tuple[str, ...] = ()
    """Descriptions of the changes, for log messages and errors."""
    added: tuple[pa.Field, ...] = ()
    """Columns that a commit of metadata adds; empty if the rows are rewritten."""
    columns: tuple[FilledColumn, ...] = ()
    """All columns of the target after a rewrite of its rows; empty if the rows are not rewritten."""


def plan(present: pa.Schema, change: ColumnChange) -> EvolutionPlan:
    """Return the plan that changes a target's columns from `present` to `change.wanted`.

    Columns that exist only in the target are kept, except those in `change.dropped`. Raises SchemaNotApplicable for a
    change that the policy forbids, or that needs a full copy.
    """
    if present.equals(change.wanted, check_metadata=True) and not change.dropped:
        return EvolutionPlan()
    if change.policy is SchemaChanges.TRY_EVOLVE:
        try:
            return plan(present, replace(change, policy=SchemaChanges.EVOLVE))
        except SchemaNotApplicable:
            return plan(present, replace(change, policy=SchemaChanges.LENIENT))
    found = _PlanBuilder(present, change).plan()
    if change.policy is SchemaChanges.IGNORE and found.steps:
        raise SchemaNotApplicable(
            f"table {change.topic!r}: 'schema_changes: ignore' forbids changes of the target's columns, but the batch "
            f"needs them ({'; '.join(found.steps)})",
            remedy="rebuild the table: 'cdc replay SINK --tables TABLE'; or set another schema_changes policy",
        )
    if change.policy is SchemaChanges.EXCEPTION and (steps := (*found.steps, *_dropped(present, change.wanted))):
        raise SchemaNotApplicable(
            f"table {change.topic!r}: 'schema_changes: exception' forbids changes of columns ({'; '.join(steps)})",
            remedy="rebuild the table: 'cdc replay SINK --tables TABLE'; or set another schema_changes policy",
        )
    return found


def columns_to_drop(
    policy: DroppedColumns, present: pa.Schema, schema: TableSchema, before: TableSchema | None
) -> frozenset[bytes]:
    """Return the ids of the target's columns to drop: none under policy KEEP, otherwise those missing at the source.

    before: the table when it was last published; None if it never was. If it is None, nothing is dropped. The key
    columns of `before` are not dropped. After a crash, a range from before a key change may be merged again, and this
    merge finds rows by the old key.
    """
    if policy is DroppedColumns.KEEP or before is None:
        return frozenset()
    return frozenset(_by_id(present).keys() - {_id(column) for column in (*schema.columns, *before.key)})


def with_target_types(schema: TableSchema, present: pa.Schema, changes: SchemaChanges, policy: Policy) -> TableSchema:
    """Return `schema` with the columns and types that the table has in this target.

    A column that is text in the target stays text while its source type is unchanged. A changed type policy applies to
    such a column only after a replay.

    Under IGNORE, columns keep the names and types of the target, and columns that the target does not have are left
    out. Raises SchemaNotApplicable if a column that is left out is part of the key.
    """
    found = _by_id(present)
    columns = []
    for column in schema.columns:
        field = found.get(_id(column))
        if column.generated:
            columns.append(column)
        elif field is not None:
            columns.append(_target_column(column, field, changes, policy))
        elif changes is not SchemaChanges.IGNORE:
            columns.append(column)
        elif column.key is not None:
            raise SchemaNotApplicable(
                f"table {schema.topic!r}: column {column.name!r} is now part of the key, but 'schema_changes: ignore' "
                "excludes new columns from the target"
            )
    return replace(schema, columns=tuple(columns))


def with_earlier_names(schema: TableSchema, rule: Transform, present: pa.Schema, policy: Policy) -> TableSchema:
    """Return the schema for a batch that ends before the position `DeltaTarget.columns_changed_upto`.

    Such a batch exists only after a crash. The result is that of `with_target_types` under IGNORE, with two
    differences. Columns have their names at the source, without the renames of the rule. The columns that the rule
    drops are included.
    """
    typed = with_target_types(
        replace(schema, columns=_without(schema, rule.drop)), present, SchemaChanges.IGNORE, policy
    )
    named = {new: old for old, new in rule.rename.items()}
    columns = {column.id: replace(column, name=named.get(column.name, column.name)) for column in typed.columns}
    columns |= {column.id: column for column in schema.columns if column.name in rule.drop}
    return replace(schema, columns=tuple(columns[column.id] for column in schema.columns if column.id in columns))


def _without(schema: TableSchema, names: Sequence[str]) -> tuple[Column, ...]:
    return tuple(column for column in schema.columns if column.name not in names)


def check_left_out(wanted: TableSchema, before: TableSchema | None, present: pa.Schema) -> None:
    """Raise SchemaNotApplicable for a wanted column that the table had before and that the target does not have.

    A rule excluded the column until now, so older rows have no value for it. before: the table when it was last
    published.
    """
    known = set() if before is None else {column.id for column in before.sent}
    found = _by_id(present)
    for column in wanted.sent:
        if column.id in known and _id(column) not in found:
            raise SchemaNotApplicable(
                f"table {wanted.topic!r}: column {column.name!r} was excluded from the target until now, so older rows "
                "have no value for it"
            )


def check_key(schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
    """Raise SchemaNotApplicable if the key of the table differs from the key in `before`, by which the target's rows
    are found.

    before: the table when it was last published; None if it never was. replaced: a full copy that began under the new
    key has ended and replaces all older rows; then every key is allowed.
    """
    if before is None or replaced or [c.id for c in before.key] == [c.id for c in schema.key]:
        return
    was, becomes = ([column.name for column in version.key] for version in (before, schema))
    raise SchemaNotApplicable(
        f"the key of table {schema.topic!r} changed from {was!r} to {becomes!r}",
        remedy=COPY_AGAIN,
    )


def sources(present: pa.Schema, wanted: pa.Schema) -> dict[str, str]:
    """Return a mapping of each wanted column's name to the name of the present column with its values.

    present: the columns of a target, perhaps at an older version. Wanted columns without a present column are absent.
    """
    found = _by_id(present)
    present_field = {field.name: _present_field(field, present, found) for field in wanted}
    return {name: field.name for name, field in present_field.items() if field is not None}


def read_plan(present: pa.Schema, wanted: pa.Schema) -> tuple[FilledColumn, ...]:
    """Return how each column of `wanted` is filled when rows of a target with the columns `present` are read.

    A column whose type has no exact conversion to the wanted type is read as nulls.
    """
    found = sources(present, wanted)
    return tuple(_read(field, found.get(field.name), present) for field in wanted)


def _read(field: pa.Field, source: str | None, present: pa.Schema) -> FilledColumn:
    if source is None or present.field(source).type == field.type:
        return FilledColumn(field, source)
    convert = _widened(present.field(source), field)
    return FilledColumn(field) if convert is None else FilledColumn(field, source, convert)


def evolved_batch(batch: pa.RecordBatch, present: pa.Schema, columns: Sequence[FilledColumn]) -> pa.RecordBatch:
    """Convert a batch of a target's rows from the columns `present` to `columns`.

    Arrow string views, which delta-rs returns, become plain arrays.
    """
    arrays = [
        pa.nulls(batch.num_rows, column.field.type)
        if column.source is None
        else _converted(batch.column(column.source).cast(present.field(column.source).type), column)
        for column in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([column.field for column in columns]))


def _converted(values: pa.Array, column: FilledColumn) -> pa.Array:
    return values if column.convert is None else column.convert(values)


def column_id(field: pa.Field) -> bytes | None:
    """Return the column id in the metadata of a target's column; None for a column that is not from the source."""
    metadata = field.metadata  # each access builds a dict
    return None if metadata is None else metadata.get(COLUMN_ID_KEY)


def ids_only_in(present: pa.Schema, wanted: pa.Schema) -> frozenset[bytes]:
    """Return the column ids that are in the metadata of `present` and not of `wanted`."""
    same = present.equals(wanted, check_metadata=True)
    return frozenset() if same else frozenset(_by_id(present).keys() - _by_id(wanted).keys())


def without_ids(columns: pa.Schema) -> pa.Schema:
    """Return the columns without column ids, for a shared target, in which each source table has its own ids."""
    types = [_type_name(field) for field in columns]
    metadata = [{} if name is None else {TYPE_KEY: name} for name in types]
    return pa.schema([field.with_metadata(plain) for field, plain in zip(columns, metadata, strict=True)])


class _PlanBuilder:
    """Builds the plan for one change of columns."""

    def __init__(self, present: pa.Schema, change: ColumnChange) -> None:
        self._present, self._wanted, self._dropped = present, change.wanted, change.dropped
        self._topic = change.topic
        self._lenient, self._replaced = change.policy is SchemaChanges.LENIENT, change.replaced
        self._steps: list[str] = []
        self._stay: set[str] = set()
        """Names of present columns that the lenient policy keeps in addition to the renamed or converted column."""
        self._names = {field.name.casefold() for field in (*present, *change.wanted)}

    def plan(self) -> EvolutionPlan:
        """Return the plan; raises SchemaNotApplicable for a change that needs a full copy."""
        found = sources(self._present, self._wanted)
        filled = {field.name: self._filled(field, found.get(field.name)) for field in self._wanted}
        added = tuple(filled[field.name].field for field in self._wanted if field.name not in found)
        rewrites = len(self._steps) > 0
        successor = {source: name for name, source in found.items()}
        order: list[FilledColumn] = []
        for field in self._present:
            if column_id(field) in self._dropped:
                self._steps.append(f"column {field.name!r} was dropped")
                continue
            if field.name in successor:
                order.append(filled[successor[field.name]])
            if field.name in self._stay or field.name not in successor:
                order.extend(self._kept(field))
        rewrites = rewrites or len(self._steps) > 0
        steps = (*self._steps, *(f"column {field.name!r} was added" for field in added))
        if not rewrites:
            return EvolutionPlan(steps, added=added)
        return EvolutionPlan(steps, columns=(*order, *(FilledColumn(field) for field in added)))

    def _filled(self, field: pa.Field, source: str | None) -> FilledColumn:
        if source is None:
            return FilledColumn(field)
        before = self._present.field(source)
        if source != field.name:
            self._steps.append(f"column {source!r} was renamed to {field.name!r}")
            if self._lenient:
                self._stay.add(source)
        if before.type == field.type:
            return FilledColumn(field, source)
        self._steps.append(f"column {field.name!r} changed from {before.type!s} to {field.type!s}")
        convert = _widened(before, field)
        if self._lenient:
            self._stay.add(source)
        if convert is not None:
            return FilledColumn(field, source, convert)
        if not (self._replaced or self._lenient):
            raise SchemaNotApplicable(
                f"table {self._topic!r}: column {field.name!r} of the target cannot change from {before.type!s} to "
                f"{field.type!s}, because {field.type!s} cannot represent every value of {before.type!s}",
                remedy=COPY_AGAIN,
            )
        return FilledColumn(field)

    def _kept(self, field: pa.Field) -> list[FilledColumn]:
        """Return the present column as it stays in the target after a rewrite; an empty list if it is dropped.

        field: a column without a matching wanted column, or one that stays in addition to its wanted column. If a
        wanted column has the same name, the present column is renamed or dropped.
        """
        taken = {name.casefold() for name in self._wanted.names}
        stays = field.name in self._stay
        if field.name.casefold() not in taken:
            return [FilledColumn(field.remove_metadata() if stays else field, field.name)]
        if not self._lenient and column_id(field) is None:
            raise SchemaNotApplicable(
                f"table {self._topic!r}: column {field.name!r} was added at the source, but another client added a "
                "column of the same name to the target",
                remedy="rename or drop the target's column, or run 'cdc replay SINK --tables TABLE'",
            )
        if not stays:
            self._steps.append(f"column {field.name!r} was dropped, and another column took its name")
        return [FilledColumn(self._renamed(field), field.name)] if self._lenient else []

    def _renamed(self, field: pa.Field) -> pa.Field:
        """Return the field under an unused name: its name with `%v` and a number, such as `note%v1`.

        No source column gets such a name in the target, because a percent sign in its name is escaped.
        """
        number = 1
        while (name := f"{field.name}%v{number}").casefold() in self._names:
            number += 1
        self._names.add(name.casefold())
        return field.with_name(name).remove_metadata()


def _dropped(present: pa.Schema, wanted: pa.Schema) -> list[str]:
    ids = {column_id(field) for field in wanted}
    return [f"column {field.name!r} was dropped" for field in present if column_id(field) not in {None, *ids}]


def _id(column: Column) -> bytes:
    return str(column.id).encode()


def _by_id(present: pa.Schema) -> dict[bytes, pa.Field]:
    return {id_: field for field in present if (id_ := column_id(field)) is not None}


def _present_field(field: pa.Field, present: pa.Schema, found: Mapping[bytes, pa.Field]) -> pa.Field | None:
    id_ = column_id(field)
    if id_ is None:
        same = field.name in present.names and column_id(present.field(field.name)) is None
        return present.field(field.name) if same else None
    return found.get(id_)


def _target_column(column: Column, field: pa.Field, changes: SchemaChanges, policy: Policy) -> Column:
    ignored = changes is SchemaChanges.IGNORE
    if ignored:
        column = replace(column, name=name_of_column(field.name))
    natural = family_of(column, policy).arrow
    stays = pa.types.is_string(field.type) and _type_name(field) == column.type_name.encode()
    if natural == field.type or not (ignored or stays):
        return column
    oid, typmod = declared_as(field.type)
    return replace(column, type_oid=oid, typmod=typmod, base_type_oid=None, base_typmod=-1)


def _widened(before: pa.Field, after: pa.Field) -> ArrayConversion | None:
    return widening(before.type, after.type, recast=_type_name(before) != _type_name(after))


def _type_name(field: pa.Field) -> bytes | None:
    return None if field.metadata is None else field.metadata.get(TYPE_KEY)
