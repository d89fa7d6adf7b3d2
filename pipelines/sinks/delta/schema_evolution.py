"""Schema evolution: the plan by which a target follows its table; pure, `DeltaTarget.evolve_columns` runs it.

Columns are known by id, which the fields of target and table carry in their metadata. New columns alone need a commit
of metadata. Every other change is one commit that rewrites the rows. Column mapping would avoid the rewrite, but then
delta-rs could neither add a column nor compact, and it cannot read a table with widened types. Either way the change
is one commit, so it is done or not; the plan for a target that already followed is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    held: str | None = None
    """The column of the target whose values it gets; None: nulls."""
    convert: ArrayConversion | None = None
    """The conversion of the values; None: they do not change."""


@dataclass(frozen=True, slots=True)
class EvolutionPlan:
    """The changes of one commit; without steps there is nothing to do."""

    steps: tuple[str, ...] = ()
    """Descriptions for the log and for errors."""
    added: tuple[pa.Field, ...] = ()
    """Columns added by a commit of metadata; none if the rows are rewritten."""
    columns: tuple[FilledColumn, ...] = ()
    """All columns, if the rows are rewritten."""


def plan(
    present: pa.Schema,
    wanted: pa.Schema,
    changes: SchemaChanges,
    *,
    replaced: bool,
    gone: frozenset[bytes] = frozenset(),
) -> EvolutionPlan:
    """The plan from the columns `present` to those of `wanted`; columns that only the target has stay.

    replaced: a full copy replaces every row, so that no current value needs to survive. gone: ids of the columns to
    drop. Raises SchemaNotApplicable for a change that the policy forbids, or that needs a full copy.
    """
    if changes is SchemaChanges.TRY_EVOLVE:
        try:
            return plan(present, wanted, SchemaChanges.EVOLVE, replaced=replaced, gone=gone)
        except SchemaNotApplicable:
            return plan(present, wanted, SchemaChanges.LENIENT, replaced=replaced, gone=gone)
    made = _PlanBuilder(present, wanted, lenient=changes is SchemaChanges.LENIENT, replaced=replaced)
    found = made.plan(gone)
    if changes is SchemaChanges.IGNORE and found.steps:
        raise SchemaNotApplicable(
            f"its columns changed, and not only by the source ({'; '.join(found.steps)}): they cannot be ignored",
            remedy="rebuild the table: 'cdc replay SINK --tables TABLE'; or set another schema_changes policy",
        )
    if changes is SchemaChanges.EXCEPTION and (said := (*found.steps, *_dropped(present, wanted))):
        raise SchemaNotApplicable(
            f"its columns changed, which 'schema_changes: exception' forbids: {'; '.join(said)}",
            remedy="rebuild the table: 'cdc replay SINK --tables TABLE'; or set another schema_changes policy",
        )
    return found


def columns_to_drop(
    policy: DroppedColumns, present: pa.Schema, schema: TableSchema, before: TableSchema | None
) -> frozenset[bytes]:
    """Ids of the columns that the target drops; before: the table when the target was last published.

    Columns of its earlier key stay: after a crash a range from before the new key still finds its rows by them.
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
            columns.append(_kept(column, field, changes, policy))
        elif changes is not SchemaChanges.IGNORE:
            columns.append(column)
        elif column.key is not None:
            raise SchemaNotApplicable(
                f"column {column.name!r} is now part of the key of {schema.topic!r}, but 'schema_changes: ignore' "
                "excludes new columns"
            )
    return replace(schema, columns=tuple(columns))


def with_earlier_names(schema: TableSchema, rule: Transform, present: pa.Schema, policy: Policy) -> TableSchema:
    """As with_target_types for a target that this rule evolved further: under the names of the source by then."""
    held = with_target_types(
        replace(schema, columns=_without(schema, rule.drop)), present, SchemaChanges.IGNORE, policy
    )
    named = {new: old for old, new in rule.rename.items()}
    columns = {column.id: replace(column, name=named.get(column.name, column.name)) for column in held.columns}
    columns |= {column.id: column for column in schema.columns if column.name in rule.drop}
    return replace(schema, columns=tuple(columns[column.id] for column in schema.columns if column.id in columns))


def _without(schema: TableSchema, names: Sequence[str]) -> tuple[Column, ...]:
    return tuple(column for column in schema.columns if column.name not in names)


def check_left_out(wanted: TableSchema, before: TableSchema | None, present: pa.Schema) -> None:
    """Raise SchemaNotApplicable for a column that the table had before and the target does not: it was left out.

    Older rows have no value for it, and no default gives one. before: the table when the target was last published.
    """
    known = set() if before is None else {column.id for column in before.sent}
    found = _by_id(present)
    for column in wanted.sent:
        if column.id in known and _id(column) not in found:
            raise SchemaNotApplicable(
                f"column {column.name!r} was excluded from the target until now, so older rows have no value for it"
            )


def check_key(schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
    """Raise SchemaNotApplicable for another key than before, by which the target's rows are not found.

    replaced: all older rows go, for a full copy that began under the new key has ended.
    """
    if before is None or replaced or [c.id for c in before.key] == [c.id for c in schema.key]:
        return
    was, becomes = ([column.name for column in version.key] for version in (before, schema))
    raise SchemaNotApplicable(
        f"the key of table {schema.topic!r} changed from {was!r} to {becomes!r}",
        remedy=COPY_AGAIN,
    )


def sources(present: pa.Schema, wanted: pa.Schema) -> dict[str, str]:
    """Wanted column → the column of a target, perhaps an older version of it, that holds its values."""
    found = _by_id(present)
    held = {field.name: _held(field, present, found) for field in wanted}
    return {name: field.name for name, field in held.items() if field is not None}


def read_plan(present: pa.Schema, wanted: pa.Schema) -> tuple[FilledColumn, ...]:
    """The columns to read rows of a target as `wanted`; a value without an exact conversion is null."""
    found = sources(present, wanted)
    return tuple(_read(field, found.get(field.name), present) for field in wanted)


def _read(field: pa.Field, held: str | None, present: pa.Schema) -> FilledColumn:
    if held is None or present.field(held).type == field.type:
        return FilledColumn(field, held)
    convert = _widened(present.field(held), field)
    return FilledColumn(field) if convert is None else FilledColumn(field, held, convert)


def evolved_batch(batch: pa.RecordBatch, held: pa.Schema, columns: Sequence[FilledColumn]) -> pa.RecordBatch:
    """Rows of a target with the columns `held` after an evolution; string views of the engine become arrays."""
    made = [
        pa.nulls(batch.num_rows, column.field.type)
        if column.held is None
        else _converted(batch.column(column.held).cast(held.field(column.held).type), column)
        for column in columns
    ]
    return pa.RecordBatch.from_arrays(made, schema=pa.schema([column.field for column in columns]))


def _converted(values: pa.Array, column: FilledColumn) -> pa.Array:
    return values if column.convert is None else column.convert(values)


def column_id(field: pa.Field) -> bytes | None:
    """The id of a target's column in the log, None for a column that is not from the source."""
    return None if field.metadata is None else field.metadata.get(COLUMN_ID_KEY)


def ids_only_in(present: pa.Schema, wanted: pa.Schema) -> frozenset[bytes]:
    """Ids of the source columns that `present` has, and not `wanted`."""
    return frozenset(_by_id(present).keys() - _by_id(wanted).keys())


def without_ids(columns: pa.Schema) -> pa.Schema:
    """The columns without ids, as in a shared target: each table has its own ids."""
    types = [_type_name(field) for field in columns]
    plain = [{} if name is None else {TYPE_KEY: name} for name in types]
    return pa.schema([field.with_metadata(said) for field, said in zip(columns, plain, strict=True)])


class _PlanBuilder:
    """The construction of one plan."""

    def __init__(self, present: pa.Schema, wanted: pa.Schema, *, lenient: bool, replaced: bool) -> None:
        self._present, self._wanted = present, wanted
        self._lenient, self._replaced = lenient, replaced
        self._steps: list[str] = []
        self._stay: dict[str, str] = {}
        """Columns that stay in addition to the new ones → their names from then on."""
        self._names = {field.name.casefold() for field in (*present, *wanted)}

    def plan(self, gone: Collection[bytes]) -> EvolutionPlan:
        """Build the plan."""
        found = sources(self._present, self._wanted)
        filled = {field.name: self._filled(field, found.get(field.name)) for field in self._wanted}
        added = tuple(filled[field.name].field for field in self._wanted if field.name not in found)
        anew = len(self._steps) > 0
        used = {held: name for name, held in found.items()}
        order: list[FilledColumn] = []
        for field in self._present:
            if column_id(field) in gone:
                self._steps.append(f"column {field.name!r} was dropped")
                continue
            if field.name in used:
                order.append(filled[used[field.name]])
            if field.name in self._stay or field.name not in used:
                order.extend(self._left(field))
        anew = anew or len(self._steps) > 0
        said = (*self._steps, *(f"column {field.name!r} was added" for field in added))
        if not anew:
            return EvolutionPlan(said, added=added)
        return EvolutionPlan(said, columns=(*order, *(FilledColumn(field) for field in added)))

    def _filled(self, field: pa.Field, held: str | None) -> FilledColumn:
        if held is None:
            return FilledColumn(field)
        before = self._present.field(held)
        if held != field.name:
            self._steps.append(f"column {held!r} was renamed to {field.name!r}")
            if self._lenient:
                self._stay[held] = held
        if before.type == field.type:
            return FilledColumn(field, held)
        self._steps.append(f"column {field.name!r} became {field.type!s}, it was {before.type!s}")
        convert = _widened(before, field)
        if self._lenient:
            self._stay[held] = held
        if convert is not None:
            return FilledColumn(field, held, convert)
        if not (self._replaced or self._lenient):
            raise SchemaNotApplicable(
                f"column {field.name!r} changed its type: {field.type!s} cannot represent every value of "
                f"{before.type!s}, "
                "the type in the target",
                remedy=COPY_AGAIN,
            )
        return FilledColumn(field)

    def _left(self, field: pa.Field) -> list[FilledColumn]:
        """A column that no wanted column continues, or that stays in addition to its successor."""
        taken = {name.casefold() for name in self._wanted.names}
        stays = field.name in self._stay
        if field.name.casefold() not in taken:
            return [FilledColumn(field.remove_metadata() if stays else field, field.name)]
        if not self._lenient and column_id(field) is None:
            raise SchemaNotApplicable(
                f"column {field.name!r} was added at the source, but another client has added a column of that name "
                "to the target",
                remedy="rename or drop the target's column, or run 'cdc replay SINK --tables TABLE'",
            )
        if not stays:
            self._steps.append(f"column {field.name!r} was dropped and its name given to another")
        return [FilledColumn(self._aside(field), field.name)] if self._lenient else []

    def _aside(self, field: pa.Field) -> pa.Field:
        """The field under a name that no source column can have: those escape percent signs."""
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


def _held(field: pa.Field, present: pa.Schema, found: Mapping[bytes, pa.Field]) -> pa.Field | None:
    id_ = column_id(field)
    if id_ is None:
        same = field.name in present.names and column_id(present.field(field.name)) is None
        return present.field(field.name) if same else None
    return found.get(id_)


def _kept(column: Column, field: pa.Field, changes: SchemaChanges, policy: Policy) -> Column:
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
