"""Target part: the rows of one table in a Delta target, and how the target records that table.

A target belongs to one table (`WholeTarget`), or several tables of a source, such as shards, share it (`SharedPart`).
`DeltaTarget` asks its part for everything in which the two differ; all else is the same for both.

Theory of a shared target. It is partitioned by `_relation`, so a merge of one table neither reads nor writes a file of
another. Each table has its own applied position, because its `txn` is named after target and relation. Each table also
has its own generation and its own column ids. These are one JSON text per table in the metadata of the field
`_relation`: each change of it is one commit, and a replay replaces rows and schema together.

A shared target has the columns of all its tables, by name; a table has nulls in the columns of others. A table may not
change a column in which other tables have rows.
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
"""Start position of the last finished copy; missing until the first full copy has ended."""
KEYLESS: Final = "cdc.keyless"
"""`true` if rows are found by position and ordinal because the table has no key."""
SHARED_TABLE: Final = "cdc.shard."
"""Prefix of a relation in the metadata of the field `_relation`: the state of that table, as JSON."""
RowReader = Callable[[int, Sequence[str], str | None, pa.Array], pa.RecordBatchReader]
"""(version, columns, key column or None, values) → rows whose key is one of the values, or all rows."""

_PARTITION: Final = f"partition.{RELATION_COLUMN}"
_SAME_COLUMN: Final = (
    "give the column the same name and type as in the other tables and copy the table again, or exclude the column"
)


class TargetTable(Protocol):
    """The Delta table of a target, as a part reads and changes it."""

    uri: str
    table: DeltaTable

    @property
    def all_columns(self) -> pa.Schema:
        """The columns of the Delta table, with their metadata."""

    @property
    def applied(self) -> int | None:
        """The position up to which ranges of the part were merged."""

    def read_property(self, name: str) -> str | None:
        """A property of the table."""

    def set_property(self, name: str, value: str) -> None:
        """Set a property in a commit of its own."""


class TargetPart(Protocol):
    """The part of a target that belongs to one table."""

    relation: int | None
    """The value of `_relation` in the rows of the part; None: every row of the target belongs to the table."""
    has_own_columns: bool
    """Whether the columns of the target are those of this table alone."""

    def recorded_relation(self, target: TargetTable) -> int | None:
        """The relation of the table, if the target has recorded it."""

    def txn_id(self, identity: str) -> str:
        """The `txn` identity of the part; identity: that of the target."""

    def columns(self, all_columns: pa.Schema) -> pa.Schema:
        """The columns of the target with the ids of this table."""

    def files(self, actions: pa.Table) -> pa.Table:
        """The files of the part."""

    def where(self, condition: str) -> str:
        """SQL that restricts a condition to the rows of the part."""

    def has_complete_copy(self, target: TargetTable) -> bool:
        """Whether a full copy of the table has ended."""

    def complete_generation(self, target: TargetTable, position: int) -> None:
        """Record that the full copy that began at position has ended; changes no row."""

    def set_key(self, target: TargetTable, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """Record how rows are found by the table's current key; raises SchemaNotApplicable as check_key does."""

    def is_replaced_by(self, target: TargetTable, batch: TableBatch) -> bool:
        """Whether a full copy replaces every row, so that their columns need no conversion."""

    def plan_columns(self, target: TargetTable, change: ColumnChange) -> EvolutionPlan:
        """The change of the Delta table's columns; raises SchemaNotApplicable for a forbidden change."""

    def record_columns(self, target: TargetTable, change: ColumnChange) -> None:
        """Record the columns of the table after the Delta table has them."""


class WholeTarget:
    """A target that belongs to one table; the properties of the Delta table record it."""

    relation: int | None = None
    has_own_columns = True

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
        """See TargetPart.set_key; also raises for a table that gained or lost its key."""
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
        """See TargetPart.is_replaced_by: in this batch, or in later ones until the running copy ends."""
        return batch.is_copying or batch.ends_copy

    def plan_columns(self, target: TargetTable, change: ColumnChange) -> EvolutionPlan:
        """See TargetPart.plan_columns; columns that only the target has stay."""
        return plan(target.all_columns, change)

    def record_columns(self, target: TargetTable, change: ColumnChange) -> None:
        """Nothing: the ids are in the metadata of the columns."""


@dataclass(frozen=True, slots=True)
class SharedTable:
    """The state of one table in a shared target."""

    topic: str
    """The last known name of the table."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """Delta column → the log's id, for every column that the table has or had."""
    generation: int | None = None
    """Start position of the last finished copy; None: the first full copy has not ended."""

    def to_json(self) -> str:
        """Text with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what to_json wrote."""
        return cls(**json.loads(text))


class SharedPart:
    """One table's partition of a shared target; only one part of a target may be written at a time."""

    has_own_columns = False

    def __init__(self, relation: int) -> None:
        self.relation: int | None = relation

    def recorded_relation(self, target: TargetTable) -> int | None:
        """See TargetPart.recorded_relation; None until the table was added."""
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
        """See TargetPart.is_replaced_by: only if a copy ends here, because other tables keep their rows until then."""
        return batch.generation is not None and (target.applied or 0) < batch.generation

    def plan_columns(self, target: TargetTable, change: ColumnChange) -> EvolutionPlan:
        """See TargetPart.plan_columns; no column is dropped, because other tables have rows in it."""
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
        """The columns to add for a table that is new in the target.

        Raises SchemaNotApplicable for a table without a key, or with the last name of another table of the target.
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
        """Record a new table, or the current name of a table, after the target has its columns."""
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
    """The `txn` identity of one table of a shared target; identity: that of the target."""
    return f"{identity}/{relation}"


def shared_tables(columns: pa.Schema) -> dict[int, SharedTable]:
    """The tables that share a target with these columns, by relation."""
    metadata = columns.field(RELATION_COLUMN).metadata or {}
    texts = {name.decode(): text for name, text in metadata.items() if text}
    return {
        int(name.removeprefix(SHARED_TABLE)): SharedTable.from_json(text)
        for name, text in texts.items()
        if name.startswith(SHARED_TABLE)
    }


def delete_other_tables(target: TargetTable, relations: Collection[int]) -> None:
    """Delete the rows and the state of all tables but these from a shared target."""
    others = [relation for relation in shared_tables(target.all_columns) if relation not in relations]
    if others:
        target.table.delete(f"{RELATION_COLUMN} IN ({', '.join(map(str, others))})")
        target.table.alter.set_column_metadata(RELATION_COLUMN, {f"{SHARED_TABLE}{number}": "" for number in others})


def columns_of_part(columns: pa.Schema, relation: int | None) -> pa.Schema:
    """The columns of a target; of a shared one, with the ids of one of its tables."""
    state = None if relation is None else _state_of(columns, relation)
    return columns if state is None else with_ids(columns, state.columns)


def with_ids(columns: pa.Schema, ids: Mapping[str, int]) -> pa.Schema:
    """The columns with ids in the metadata of those that are named."""
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
    """(the columns to add to a shared target for a table, the ids of all columns that the table then has).

    present: columns of the target. wanted: columns of the table. known: columns in which the table has rows. Raises
    SchemaNotApplicable for a column that needs another name or type in the target, or whose name an earlier column of
    the table had.
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
    if RELATION_COLUMN not in columns.names:  # a version from before the target was shared
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
