"""Schema evolution: the plan by which a target follows its table. Pure; `DeltaTarget.evolve_columns` runs the plan.

Columns are known by id, which the fields of target and table carry in their metadata. New columns alone need a commit
of metadata. Every other change is one commit that rewrites the rows. Column mapping would avoid the rewrite, but then
delta-rs could neither add a column nor compact, and it cannot read a table with widened types. Because the change is
one commit, it is complete or absent. The plan for a target that already has the columns is empty.
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
from pipelines.types.typed_rows import COPY_AGAIN, TYPE_KEY
from pipelines.types.widening import ArrayConversion, widening


@dataclass(frozen=True, slots=True)
class FilledColumn:
    """One column of a target whose rows are rewritten."""

    field: pa.Field
    source: str | None = None
    """The column of the target from which it takes its values; None: nulls."""
    convert: ArrayConversion | None = None
    """The conversion of the values; None: they do not change."""


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """The columns that a table needs in its target."""

    wanted: pa.Schema
    policy: SchemaChanges
    replaced: bool
    """Whether a full copy replaces every row, so that no current value has to survive."""
    topic: str
    """The table, for errors."""
    dropped: frozenset[bytes] = frozenset()
    """Ids of the columns to drop."""


@dataclass(frozen=True, slots=True)
class EvolutionPlan:
    """The changes of one commit; without steps there is nothing to do."""

    steps: tuple[str, ...] = ()
    """Descriptions for the log and for errors."""
    added: tuple[pa.Field, ...] = ()
    """Columns added by a commit of metadata; none if the rows are rewritten."""
    columns: tuple[FilledColumn, ...] = ()
    """All columns, if the rows are rewritten."""


def plan(present: pa.Schema, change: ColumnChange) -> EvolutionPlan:
    """The plan from the columns `present` to the wanted ones; columns that only the target has stay.

    Raises SchemaNotApplicable for a change that the policy forbids, or that needs a full copy.
    """
    if change.policy is SchemaChanges.TRY_EVOLVE:
        try:
            return plan(present, replace(change, policy=SchemaChanges.EVOLVE))
        except SchemaNotApplicable:
            return plan(present, replace(change, policy=SchemaChanges.LENIENT))
    found = _PlanBuilder(present, change).plan()
    if change.policy is SchemaChanges.IGNORE and found.steps:
        raise SchemaNotApplicable(
            f"table {change.topic!r}: 'schema_changes: ignore' ignores only changes at the source, but the target also "
            f"needs other changes of columns ({'; '.join(found.steps)})",
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
    """Ids of the columns that the target drops; before: the table when the target was last published.

    Columns of the earlier key stay: after a crash a range from before the new key still finds its rows by them.
    """
    if policy is DroppedColumns.KEEP or before is None:
        return frozenset()
    return frozenset(_by_id(present).keys() - {_id(column) for column in (*schema.columns, *before.key)})


def with_target_types(schema: TableSchema, present: pa.Schema, changes: SchemaChanges, policy: Policy) -> TableSchema:
    """The table with the columns and types that its rows have in this target.

    A column that the target has as text stays text while its type at the source is the same: the type map or the
    policy may have changed, which only a replay applies. Under IGNORE, columns also keep name and type, and columns
    that the target does not have are left out; raises SchemaNotApplicable if one of those is part of the key.
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
    """As with_target_types for a target with the columns of a longer range: the table with the names of that time."""
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
    """Raise SchemaNotApplicable for a column that the table had before and the target does not have.

    A rule left it out, so older rows have no value for it. before: the table when the target was last published.
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
    """Raise SchemaNotApplicable if the key differs from the key by which the target's rows are found.

    replaced: a full copy that began under the new key has ended and replaces all older rows.
    """
    if before is None or replaced or [c.id for c in before.key] == [c.id for c in schema.key]:
        return
    was, becomes = ([column.name for column in version.key] for version in (before, schema))
    raise SchemaNotApplicable(
        f"the key of table {schema.topic!r} changed from {was!r} to {becomes!r}",
        remedy=COPY_AGAIN,
    )


def sources(present: pa.Schema, wanted: pa.Schema) -> dict[str, str]:
    """Wanted column → the column with its values in a target, which may be an older version."""
    found = _by_id(present)
    present_field = {field.name: _present_field(field, present, found) for field in wanted}
    return {name: field.name for name, field in present_field.items() if field is not None}


def read_plan(present: pa.Schema, wanted: pa.Schema) -> tuple[FilledColumn, ...]:
    """The columns to read rows of a target as `wanted`; a value without an exact conversion is null."""
    found = sources(present, wanted)
    return tuple(_read(field, found.get(field.name), present) for field in wanted)


def _read(field: pa.Field, source: str | None, present: pa.Schema) -> FilledColumn:
    if source is None or present.field(source).type == field.type:
        return FilledColumn(field, source)
    convert = _widened(present.field(source), field)
    return FilledColumn(field) if convert is None else FilledColumn(field, source, convert)


def evolved_batch(batch: pa.RecordBatch, present: pa.Schema, columns: Sequence[FilledColumn]) -> pa.RecordBatch:
    """Rows of a target with the columns `present` after an evolution; string views of the engine become arrays."""
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
    """The id of a target's column in the log, None for a column that is not from the source."""
    return None if field.metadata is None else field.metadata.get(COLUMN_ID_KEY)


def ids_only_in(present: pa.Schema, wanted: pa.Schema) -> frozenset[bytes]:
    """Ids of the source columns that are in `present` and not in `wanted`."""
    return frozenset(_by_id(present).keys() - _by_id(wanted).keys())


def without_ids(columns: pa.Schema) -> pa.Schema:
    """The columns without ids, as in a shared target, in which each table has its own ids."""
    types = [_type_name(field) for field in columns]
    metadata = [{} if name is None else {TYPE_KEY: name} for name in types]
    return pa.schema([field.with_metadata(plain) for field, plain in zip(columns, metadata, strict=True)])


class _PlanBuilder:
    """The construction of one plan."""

    def __init__(self, present: pa.Schema, change: ColumnChange) -> None:
        self._present, self._wanted, self._dropped = present, change.wanted, change.dropped
        self._topic = change.topic
        self._lenient, self._replaced = change.policy is SchemaChanges.LENIENT, change.replaced
        self._steps: list[str] = []
        self._stay: set[str] = set()
        """Columns that stay in addition to their successors."""
        self._names = {field.name.casefold() for field in (*present, *change.wanted)}

    def plan(self) -> EvolutionPlan:
        """Build the plan."""
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
        """A column without a successor among the wanted ones, or one that stays in addition to its successor."""
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
        """The field under a name that no source column can have, because source names escape percent signs."""
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
