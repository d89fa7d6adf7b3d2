"""Target part: the rows of one source table in a Delta target, and how the target records that table.

A target belongs to one source table (`WholeTarget`), or several source tables share it, such as shards (`SharedPart`).
`DeltaTarget` calls its part for everything in which these two cases differ.

A shared target is partitioned by `_relation`, so a merge of one table neither reads nor writes a file of another table.
Each table has its own applied position, because the application id of its `txn` names target and relation. Each table
also has its own generation (start position of its last full copy) and its own column ids. Both are in one JSON text per
table, in the metadata of the column `_relation`. So one commit can change both, and one commit of a replay replaces
them together with the rows.

A shared target has the columns of all its tables, by name; the rows of a table have nulls in the columns of other
tables. A table may not change a column in which other tables have rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.config import SchemaChanges
from cdc.errors import SchemaNotApplicable
from cdc.table import TableSchema
from cdc.target_names import COLUMN_ID_KEY, RELATION_COLUMN
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.schema_evolution import ColumnChange, EvolutionPlan, check_key, column_id, plan, without_ids
from pipelines.types.typed_rows import COPY_AGAIN

RELATION: Final = "cdc.relation"
GENERATION: Final = "cdc.generation"
"""Name of a target's property: the position at which its last finished full copy began. It is missing until the first
full copy has ended.
"""
KEYLESS: Final = "cdc.keyless"
"""Name of a target's property: `true` if the source table has no key, so that position and ordinal identify rows."""
SHARED_TABLE: Final = "cdc.shard."
"""Prefix of names in the metadata of the column `_relation`. The name is the prefix and a relation; the value is the
`SharedTable` of that relation as JSON.
"""
RowReader = Callable[[int, Sequence[str], str | None, pa.Array], pa.RecordBatchReader]
"""Function that reads rows of one version of a target. Arguments: version, columns to read, key column, values of the
key column. It returns the rows whose key is one of the values, or all rows if the key column is None.
"""

_PARTITION: Final = f"partition.{RELATION_COLUMN}"
_SAME_COLUMN: Final = (
    "give the column the same name and type as in the other tables and copy the table again, or exclude the column"
)


class TargetTable(Protocol):
    """The Delta table of a target, with the operations that a target part needs."""

    uri: str

    @property
    def table(self) -> DeltaTable:
        """The Delta table, at the version that this process has read or committed last, or a later one."""

    @property
    def all_columns(self) -> pa.Schema:
        """All columns of the Delta table, with the metadata of their fields."""

    @property
    def applied(self) -> int | None:
        """The applied position of the source table whose rows this object represents; None before its first merge."""

    def read_property(self, name: str) -> str | None:
        """Return the value of a property of the Delta table; None if the property is not set."""

    def set_property(self, name: str, value: str) -> None:
        """Set a property of the Delta table, in a separate commit."""


class TargetPart(Protocol):
    """The part of a target that belongs to one source table: its rows, its columns and what the target records about
    it.
    """

    relation: int | None
    """The value of `_relation` in the rows of the part; None if every row of the target belongs to the table."""
    has_own_columns: bool
    """Whether all columns of the target belong to this source table alone."""

    def recorded_relation(self, target: TargetTable) -> int | None:
        """Return the relation of the source table as the target's metadata names it; None if it names no relation."""

    def txn_id(self, identity: str) -> str:
        """Return the `txn` application id of the part; identity: the id of the whole target."""

    def columns(self, all_columns: pa.Schema) -> pa.Schema:
        """Return the given columns of the target, with the column ids of this source table in their metadata."""

    def files(self, actions: pa.Table) -> pa.Table:
        """Return those of the target's data files (rows of `actions`) that belong to the part."""

    def where(self, condition: str) -> str:
        """Return an SQL condition that is true for the rows of the part that satisfy the given condition."""

    def has_complete_copy(self, target: TargetTable) -> bool:
        """Return whether at least one full copy of the source table has ended in the target."""

    def complete_generation(self, target: TargetTable, position: int) -> None:
        """Record that the full copy which began at the given position has ended. No row changes."""

    def set_key(self, target: TargetTable, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """Record that rows are found by the current key of the table, or by position and ordinal if it has no key.

        before: the table when it was last published; None if it never was. replaced: whether a full copy that began
        under the new key has ended. Raises SchemaNotApplicable if the key changed and `replaced` is False.
        """

    def is_replaced_by(self, target: TargetTable, batch: TableBatch) -> bool:
        """Return whether a full copy in this batch replaces every row that the target has of the source table.

        The values of these rows then need no conversion to new column types.
        """

    def plan_columns(self, target: TargetTable, change: ColumnChange) -> EvolutionPlan:
        """Return the plan that changes the columns of the Delta table; raises SchemaNotApplicable for a forbidden
        change.
        """

    def record_columns(self, target: TargetTable, change: ColumnChange) -> None:
        """Record the columns of the source table, after the Delta table got them."""


class WholeTarget:
    """The part of a target that belongs to a single source table: all rows. Properties of the Delta table record the
    source table.
    """

    relation: int | None = None
    has_own_columns = True

    @staticmethod
    def properties(schema: TableSchema, generation: int | None) -> dict[str, str]:
        """Return the properties of a new target that name its source table, and its last full copy if there was one."""
        found = {RELATION: str(schema.relation)} | ({} if schema.key else {KEYLESS: "true"})
        return found if generation is None else found | {GENERATION: str(generation)}

    def recorded_relation(self, target: TargetTable) -> int | None:
        """See TargetPart.recorded_relation."""
        found = target.read_property(RELATION)
        return None if found is None else int(found)

    def txn_id(self, identity: str) -> str:
        """See TargetPart.txn_id."""
        return identity

    def columns(self, all_columns: pa.Schema) -> pa.Schema:
        """See TargetPart.columns."""
        return all_columns

    def files(self, actions: pa.Table) -> pa.Table:
        """See TargetPart.files."""
        return actions

    def where(self, condition: str) -> str:
        """See TargetPart.where."""
        return condition

    def has_complete_copy(self, target: TargetTable) -> bool:
        """See TargetPart.has_complete_copy."""
        return target.read_property(GENERATION) is not None

    def complete_generation(self, target: TargetTable, position: int) -> None:
        """See TargetPart.complete_generation."""
        if target.read_property(GENERATION) != str(position):
            target.set_property(GENERATION, str(position))

    def set_key(self, target: TargetTable, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """See TargetPart.set_key. Unless `replaced` is true, also raises SchemaNotApplicable for a table that gained or
        lost its key.
        """
        check_key(schema, before, replaced=replaced)
        keyless = target.read_property(KEYLESS) == "true"
        if keyless != bool(schema.key):
            return
        if not replaced:
            now, created = ("has a key", "without a key") if schema.key else ("has no key", "with a key")
            raise SchemaNotApplicable(
                f"table {schema.topic!r} now {now}, but target {target.uri!r} was created {created}",
                remedy=COPY_AGAIN,
            )
        target.set_property(KEYLESS, str(not schema.key).lower())

    def is_replaced_by(self, target: TargetTable, batch: TableBatch) -> bool:  # noqa: ARG002 - see SharedPart
        """See TargetPart.is_replaced_by. True if a full copy ends in this batch, or is still running at its end."""
        return batch.is_copying or batch.ends_copy

    def plan_columns(self, target: TargetTable, change: ColumnChange) -> EvolutionPlan:
        """See TargetPart.plan_columns. The target keeps columns that only it has, except those in `change.dropped`."""
        return plan(target.all_columns, change)

    def record_columns(self, target: TargetTable, change: ColumnChange) -> None:
        """Do nothing, because the column ids are already in the metadata of the target's columns."""


@dataclass(frozen=True, slots=True)
class SharedTable:
    """The record of one source table in the metadata of a shared target."""

    topic: str
    """The name `schema.table` that the source table had when it was last recorded."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """Delta column → column id in the change log, for every column that the source table has or had."""
    generation: int | None = None
    """Position at which the last finished full copy of the table began; None if no full copy has ended."""

    def to_json(self) -> str:
        """Return the instance as a JSON text with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Create an instance from a JSON text that `to_json` returned."""
        return cls(**json.loads(text))


class SharedPart:
    """The part of a shared target that belongs to one source table: the partition of its relation.

    Only one thread at a time may write to a shared target, even if two threads write different parts.
    """

    has_own_columns = False

    def __init__(self, relation: int) -> None:
        self.relation: int | None = relation

    def recorded_relation(self, target: TargetTable) -> int | None:
        """See TargetPart.recorded_relation. None until the source table was added to the target."""
        return None if self._state(target) is None else self.relation

    def txn_id(self, identity: str) -> str:
        """See TargetPart.txn_id."""
        return shared_txn_id(identity, self.relation)

    def columns(self, all_columns: pa.Schema) -> pa.Schema:
        """See TargetPart.columns."""
        return columns_of_part(all_columns, self.relation)

    def files(self, actions: pa.Table) -> pa.Table:
        """See TargetPart.files."""
        return actions.filter(pc.equal(actions[_PARTITION], self.relation))

    def where(self, condition: str) -> str:
        """See TargetPart.where."""
        return f"{RELATION_COLUMN} = {self.relation} AND ({condition})"

    def has_complete_copy(self, target: TargetTable) -> bool:
        """See TargetPart.has_complete_copy."""
        state = self._state(target)
        return state is not None and state.generation is not None

    def complete_generation(self, target: TargetTable, position: int) -> None:
        """See TargetPart.complete_generation."""
        state = self._added_state(target)
        if state.generation != int(position):
            self._record(target, replace(state, generation=int(position)))

    def set_key(
        self,
        target: TargetTable,  # noqa: ARG002 - every table of a shared target has a key
        schema: TableSchema,
        before: TableSchema | None,
        *,
        replaced: bool,
    ) -> None:
        """See TargetPart.set_key."""
        check_key(schema, before, replaced=replaced)

    def is_replaced_by(self, target: TargetTable, batch: TableBatch) -> bool:
        """See TargetPart.is_replaced_by. True only if a full copy ends in this batch and began after the applied
        position.
        """
        return batch.generation is not None and (target.applied or 0) < batch.generation

    def plan_columns(self, target: TargetTable, change: ColumnChange) -> EvolutionPlan:
        """See TargetPart.plan_columns. No column is dropped, because another table may have values in it."""
        known = self._added_state(target).columns
        added, ids = self._merged(target, change)
        if change.policy is SchemaChanges.EXCEPTION:
            _check_unchanged(known, with_ids(change.wanted, ids), change.topic)
        return _plan_to_add(added)

    def record_columns(self, target: TargetTable, change: ColumnChange) -> None:
        """See TargetPart.record_columns."""
        state = self._added_state(target)
        _, ids = self._merged(target, change)
        if ids != state.columns:
            self._record(target, replace(state, columns=ids))

    def plan_new_table(self, target: TargetTable, schema: TableSchema, columns: pa.Schema) -> EvolutionPlan:
        """Return the plan that adds the columns of a source table to the target.

        The plan is empty if the target already contains the table. Raises SchemaNotApplicable for a table without a
        key. Also raises it if the target contains another relation that was last recorded under the name of this table.
        """
        if not schema.key:
            raise SchemaNotApplicable(
                f"table {schema.topic!r} has no key, but shared target {target.uri!r} identifies rows by their keys",
                remedy="add a key or a replica identity at the source, or exclude the table from the rule",
            )
        if self._state(target) is not None:
            return EvolutionPlan()
        others = shared_tables(target.all_columns)
        before = [relation for relation, other in others.items() if other.topic == schema.topic]
        if before:
            raise SchemaNotApplicable(
                f"target {target.uri!r} contains rows of table {schema.topic!r} as relation {before[0]!r}, but the "
                f"table is now relation {schema.relation!r}: the table was dropped and created again, or another "
                "table took its name",
                remedy="rebuild the sink without the rows of the old table: 'cdc replay SINK'",
            )
        added, _ = merge_columns(target.all_columns, columns, {}, schema.topic)
        return _plan_to_add(added)

    def record_table(self, target: TargetTable, schema: TableSchema, columns: pa.Schema) -> None:
        """Record a new source table, or the current name of a known one, after the target got its columns."""
        state = self._state(target)
        if state is None:
            _, ids = merge_columns(target.all_columns, columns, {}, schema.topic)
            self._record(target, SharedTable(schema.topic, ids))
        elif state.topic != schema.topic:
            self._record(target, replace(state, topic=schema.topic))

    def _merged(self, target: TargetTable, change: ColumnChange) -> tuple[tuple[pa.Field, ...], dict[str, int]]:
        known = {} if change.replaced else self._added_state(target).columns
        return merge_columns(target.all_columns, change.wanted, known, change.topic)

    def _state(self, target: TargetTable) -> SharedTable | None:
        return _state_of(target.all_columns, self.relation)

    def _added_state(self, target: TargetTable) -> SharedTable:
        state = self._state(target)
        if state is None:
            raise ValueError(f"relation {self.relation!r} was not added to target {target.uri!r}")
        return state

    def _record(self, target: TargetTable, state: SharedTable) -> None:
        target.table.alter.set_column_metadata(RELATION_COLUMN, {f"{SHARED_TABLE}{self.relation}": state.to_json()})


def shared_txn_id(identity: str, relation: int | None) -> str:
    """Return the `txn` application id of one table in a shared target; identity: the id of the whole target."""
    return f"{identity}/{relation}"


def shared_tables(columns: pa.Schema) -> dict[int, SharedTable]:
    """Return the source tables of a shared target: relation → recorded state. columns: all columns of the target."""
    metadata = columns.field(RELATION_COLUMN).metadata or {}
    texts = {name.decode(): text for name, text in metadata.items() if text}
    return {
        int(name.removeprefix(SHARED_TABLE)): SharedTable.from_json(text)
        for name, text in texts.items()
        if name.startswith(SHARED_TABLE)
    }


def delete_other_tables(target: TargetTable, relations: Collection[int]) -> None:
    """Remove every table whose relation is not in `relations` from a shared target: its rows and its recorded state."""
    others = [relation for relation in shared_tables(target.all_columns) if relation not in relations]
    if others:
        target.table.delete(f"{RELATION_COLUMN} IN ({', '.join(map(str, others))})")
        target.table.alter.set_column_metadata(RELATION_COLUMN, {f"{SHARED_TABLE}{number}": "" for number in others})


def columns_of_part(columns: pa.Schema, relation: int | None) -> pa.Schema:
    """Return the columns of a target with the column ids of one source table.

    relation: the table's relation in a shared target; None for a target that is not shared. The columns are returned
    unchanged for None and for a relation that the target does not contain.
    """
    state = None if relation is None else _state_of(columns, relation)
    return columns if state is None else with_ids(columns, state.columns)


def with_ids(columns: pa.Schema, ids: Mapping[str, int]) -> pa.Schema:
    """Return the columns with column ids in their metadata; a column that `ids` does not name is unchanged.

    ids: column name → column id.
    """
    return pa.schema(
        [
            one.with_metadata({**(one.metadata or {}), COLUMN_ID_KEY: str(ids[one.name]).encode()})
            if one.name in ids
            else one
            for one in columns
        ]
    )


def merge_columns(
    present: pa.Schema, wanted: pa.Schema, known: Mapping[str, int], topic: str
) -> tuple[tuple[pa.Field, ...], dict[str, int]]:
    """Match the columns of a source table with the columns of a shared target.

    present: columns of the target. wanted: columns of the table. known: name → id of the columns in which the table
    already has rows. topic: the table's name, for errors. Returns the columns to add to the target, and name → id of
    all columns that the table then has.

    Raises SchemaNotApplicable if a column was renamed, or if the target has it with another type or spelling. Also
    raises it if a new column has the name of a dropped column of the same table.
    """
    name_of = {id_: name for name, id_ in known.items()}
    spelled = {name.casefold(): name for name in present.names}
    ids, added = dict(known), list[pa.Field]()
    for one in wanted:
        own = column_id(one)
        id_ = None if own is None else int(own)
        if id_ is not None and name_of.get(id_, one.name) != one.name:
            raise SchemaNotApplicable(
                f"table {topic!r}: renaming column {name_of[id_]!r} to {one.name!r} cannot be applied to a shared "
                f"target, because other tables may use {name_of[id_]!r}",
                remedy=COPY_AGAIN,
            )
        if id_ is not None and known.get(one.name, id_) != id_:
            raise SchemaNotApplicable(
                f"table {topic!r}: column {one.name!r} was dropped, and another column took its name, so older rows of "
                "the shared target contain values of the dropped column",
                remedy=COPY_AGAIN,
            )
        same = spelled.get(one.name.casefold())
        if same is None:
            added.append(one)
        elif same != one.name or present.field(same).type != one.type:
            raise SchemaNotApplicable(
                f"table {topic!r}: column {one.name!r} has type {one.type!s}, but the shared target already has column "
                f"{same!r} of type {present.field(same).type!s}",
                remedy=_SAME_COLUMN,
            )
        if id_ is not None:
            ids[one.name] = id_
    return tuple(without_ids(pa.schema(added))), ids


def _plan_to_add(added: tuple[pa.Field, ...]) -> EvolutionPlan:
    return EvolutionPlan(tuple(f"column {one.name!r} was added" for one in added), added=added)


def _state_of(columns: pa.Schema, relation: int | None) -> SharedTable | None:
    if RELATION_COLUMN not in columns.names:  # this version is from before the target was shared
        return None
    text = (columns.field(RELATION_COLUMN).metadata or {}).get(f"{SHARED_TABLE}{relation}".encode())
    return SharedTable.from_json(text) if text else None


def _check_unchanged(known: Mapping[str, int], wanted: pa.Schema, topic: str) -> None:
    now = {one.name for one in wanted if column_id(one) is not None}
    changes = [f"column {name!r} was added" for name in sorted(now - known.keys())]
    changes += [f"column {name!r} was dropped" for name in sorted(known.keys() - now)]
    if changes:
        raise SchemaNotApplicable(
            f"table {topic!r}: 'schema_changes: exception' forbids changes of columns ({'; '.join(changes)})",
            remedy="rebuild the sink: 'cdc replay SINK'; or set another schema_changes policy in the rule",
        )
