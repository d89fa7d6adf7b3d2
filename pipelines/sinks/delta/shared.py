"""Shared target: one table's part of a Delta target that several tables of a source share, such as shards.

Theory. A shared target is partitioned by `_relation`, so a merge of one table neither reads nor writes a file of
another. For a strategy a part is a target like any other. It has its own applied position (the `txn` is named after
target and relation), its own generation, and columns known by the ids that its table gave them. All of that but the
`txn` is one JSON text per table, in the metadata of the field `_relation`: each step is one commit, and a replay
replaces rows and schema together.

The target has the columns of all its tables, by name; a table has nulls in those of others. A change of a column that
has rows of another table is refused, for the table that asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.config import SchemaChanges
from cdc.errors import SchemaNotApplicable
from cdc.table import TableSchema
from cdc.target_names import COLUMN_ID_KEY, RELATION_COLUMN
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.schema_evolution import EvolutionPlan, check_key, column_id, without_ids
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.types.typed_rows import COPY_AGAIN

SHARD: Final = "cdc.shard."
"""Prefix of a relation in the metadata of the field `_relation`: the state of its part, as JSON."""
_PARTED: Final = f"partition.{RELATION_COLUMN}"
_OTHERS: Final = "give it the name and type that it has in the other tables and copy the table again, or exclude it"


@dataclass(frozen=True, slots=True)
class Shard:
    """The state of one table in a shared target."""

    topic: str
    """The last known name of the table."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """Delta column → the log's id, of every column that the table has or had."""
    generation: int | None = None
    """Start position of the last finished copy; None: the first full copy has not ended."""

    def to_json(self) -> str:
        """Text with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what to_json wrote."""
        return cls(**json.loads(text))


def shards_of(columns: pa.Schema) -> dict[int, Shard]:
    """The tables that share a target with these columns, by number."""
    said = columns.field(RELATION_COLUMN).metadata or {}
    texts = {name.decode(): text for name, text in said.items() if text}
    return {int(n.removeprefix(SHARD)): Shard.from_json(text) for n, text in texts.items() if n.startswith(SHARD)}


def delete_other_tables(target: DeltaTarget, relations: Collection[int]) -> None:
    """Delete the rows and the state of other tables."""
    gone = [part for part in shards_of(target.columns) if part not in relations]
    if gone:
        target.table.delete(f"{RELATION_COLUMN} IN ({', '.join(map(str, gone))})")
        target.table.alter.set_column_metadata(RELATION_COLUMN, {f"{SHARD}{part}": "" for part in gone})


def columns_of(table: DeltaTable, part: int | None) -> pa.Schema:
    """The columns of a target; of a shared one, with the ids of one of its tables only."""
    columns = pa.schema(table.schema().to_arrow())
    if part is None:
        return columns
    shard = _said(columns, part)
    return columns if shard is None else with_ids(columns, shard.columns)


def with_ids(columns: pa.Schema, ids: Mapping[str, int]) -> pa.Schema:
    """Columns with ids for those that are named."""
    return pa.schema(
        [
            one.with_metadata({**(one.metadata or {}), COLUMN_ID_KEY: str(ids[one.name]).encode()})
            if one.name in ids
            else one
            for one in columns
        ]
    )


def merge_columns(
    present: pa.Schema, wanted: pa.Schema, known: Mapping[str, int]
) -> tuple[tuple[pa.Field, ...], dict[str, int]]:
    """(the columns to add to the target for a table, the ids of all columns that the table has then).

    present: columns of the target. wanted: columns of the table. known: columns that the table has rows in. Raises
    SchemaNotApplicable for a column that would need another name or type in the target, or whose name an earlier
    column of the table had.
    """
    name_of = {id_: name for name, id_ in known.items()}
    spelled = {name.casefold(): name for name in present.names}
    ids, added = dict(known), list[pa.Field]()
    for one in wanted:
        own = column_id(one)
        id_ = None if own is None else int(own)
        if id_ is not None and name_of.get(id_, one.name) != one.name:
            raise SchemaNotApplicable(
                f"column {name_of[id_]!r} was renamed to {one.name!r} in a target that also contains rows of other "
                "tables",
                remedy=COPY_AGAIN,
            )
        if id_ is not None and known.get(one.name, id_) != id_:
            raise SchemaNotApplicable(
                f"column {one.name!r} was dropped, and another column now has its name, so older rows have other "
                "values",
                remedy=COPY_AGAIN,
            )
        held = spelled.get(one.name.casefold())
        if held is None:
            added.append(one)
        elif held != one.name or present.field(held).type != one.type:
            raise SchemaNotApplicable(
                f"column {one.name!r} is {one.type!s}, but the target that it shares with other tables has "
                f"{held!r} of type {present.field(held).type!s}",
                remedy=_OTHERS,
            )
        if id_ is not None:
            ids[one.name] = id_
    return tuple(without_ids(pa.schema(added))), ids


class SharedTarget(DeltaTarget):
    """One table's part of a target: its files, columns and positions are those of the part only.

    It uses the handle of the whole target; only one part of a target may be written at a time.
    """

    def __init__(self, whole: DeltaTarget, part: int) -> None:
        super().__init__(whole.uri, whole.table)
        self.cluster_by, self.part = whole.cluster_by, part

    def add_table(self, schema: TableSchema, columns: pa.Schema) -> None:
        """Add the table and its columns to the target, or record its current name.

        Raises SchemaNotApplicable for a table without a key, or with the last name of another table of the target.
        """
        if not schema.key:
            raise SchemaNotApplicable(
                f"table {schema.topic!r} has no key, which a target that several tables share needs to identify rows",
                remedy="add a key or a replica identity at the source, or exclude the table from the rule",
            )
        shard = self._shard
        if shard is not None:
            if shard.topic != schema.topic:
                self._say(replace(shard, topic=schema.topic))
            return
        before = [part for part, other in shards_of(self._present).items() if other.topic == schema.topic]
        if before:
            raise SchemaNotApplicable(
                f"target {self.uri!r} contains rows of {schema.topic!r} as relation {before[0]!r}, but the table "
                f"is now relation {schema.relation!r}: it was dropped and created again, or renamed to the name "
                "of another table",
                remedy="rebuild the sink without the rows of the old table: 'cdc replay SINK'",
            )
        added, ids = merge_columns(self._present, columns, {})
        self._add(added, 0)
        self._say(Shard(schema.topic, ids))

    def evolve_columns(
        self,
        wanted: pa.Schema,
        changes: SchemaChanges,
        upto: int,
        *,
        replaced: bool,
        gone: frozenset[bytes] = frozenset(),  # noqa: ARG002 - other tables have rows in a column that one has lost
    ) -> None:
        """As DeltaTarget.evolve_columns, but no column is dropped; replaced: every row of the part is replaced."""
        shard = self._held()
        added, ids = merge_columns(self._present, wanted, {} if replaced else shard.columns)
        if changes is SchemaChanges.EXCEPTION:
            _check_unchanged(shard.columns, with_ids(wanted, ids))
        self._add(added, upto)
        if ids != shard.columns:
            self._say(replace(shard, columns=ids))

    def set_key(self, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """Find rows by the table's current key; raises as check_key does."""
        check_key(schema, before, replaced=replaced)

    def complete_generation(self, position: int) -> None:
        """As DeltaTarget.complete_generation."""
        shard = self._held()
        if shard.generation != int(position):
            self._say(replace(shard, generation=int(position)))

    @property
    def relation(self) -> int | None:
        """The relation, once it was added to the target."""
        return None if self._shard is None else self.part

    @property
    def app_id(self) -> str:
        """The `txn` identity of this part."""
        return part_id(super().app_id, self.part)

    @property
    def complete(self) -> bool:
        """Whether a full copy has ended here."""
        return self._shard is not None and self._shard.generation is not None

    @property
    def is_untouched(self) -> bool:
        """Never: the columns are those of all its tables."""
        return False

    def is_replaced_by(self, batch: TableBatch) -> bool:
        """Whether a copy ends in this batch: rows of other tables cannot wait for a later one in other columns."""
        return batch.generation is not None and (self.applied or 0) < batch.generation

    @property
    def columns_changed_upto(self) -> int:
        """0: a range from before the last change of columns is applied with the current ones, or refused."""
        return 0

    @property
    def columns(self) -> pa.Schema:
        """The columns of the target, with the ids of this table."""
        return self._once("own columns", lambda: columns_of(self.table, self.part))

    @property
    def actions(self) -> pa.Table:
        """As DeltaTarget.actions, of the part's files."""
        whole = super().actions
        return self._once("own actions", lambda: whole.filter(pc.equal(whole[_PARTED], self.part)))

    @property
    def _present(self) -> pa.Schema:
        return self._once("columns", lambda: pa.schema(self.table.schema().to_arrow()))

    @property
    def _shard(self) -> Shard | None:
        return self._once("shard", lambda: _said(self._present, self.part))

    def _held(self) -> Shard:
        if self._shard is None:
            raise ValueError(f"relation {self.part!r} is not yet one of target {self.uri!r}")
        return self._shard

    def _add(self, added: tuple[pa.Field, ...], upto: int) -> None:
        if added:
            self._change_columns(
                EvolutionPlan(tuple(f"column {one.name!r} was added" for one in added), added=added), upto
            )

    def _say(self, shard: Shard) -> None:
        self.table.alter.set_column_metadata(RELATION_COLUMN, {f"{SHARD}{self.part}": shard.to_json()})


def part_id(app_id: str, part: int | None) -> str:
    """The `txn` identity of one table's part of a target."""
    return app_id if part is None else f"{app_id}/{part}"


def part_of(target: DeltaTarget, relation: int) -> DeltaTarget:
    """A table's part of a target: all of it, unless it is shared."""
    return SharedTarget(target, relation) if target.merged else target


def _said(columns: pa.Schema, part: int | None) -> Shard | None:
    if RELATION_COLUMN not in columns.names:  # a version from before the target was one of many
        return None
    text = (columns.field(RELATION_COLUMN).metadata or {}).get(f"{SHARD}{part}".encode())
    return Shard.from_json(text) if text else None


def _check_unchanged(known: Mapping[str, int], wanted: pa.Schema) -> None:
    now = {one.name for one in wanted if column_id(one) is not None}
    said = [f"column {name!r} was added" for name in sorted(now - known.keys())]
    said += [f"column {name!r} was dropped" for name in sorted(known.keys() - now)]
    if said:
        raise SchemaNotApplicable(
            f"its columns changed, which 'schema_changes: exception' forbids: {'; '.join(said)}",
            remedy="rebuild the sink: 'cdc replay SINK'; or set another schema_changes policy in the rule",
        )
