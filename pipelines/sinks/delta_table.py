"""DeltaTarget: one Delta table that a sink fills; its creation, identity, schema changes and clean-up.

Identity lies in the table's own properties (`cdc.*`), so that a folder can be moved and still says
whose it is. Reading goes through `scan` only: the `to_pyarrow*` ways return silent nulls after a rename.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.schema import Schema
from deltalake.transaction import AddAction

from cdc.errors import SchemaNotApplicable, SinkBelongsElsewhere
from cdc.naming import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from cdc.table import TableSchema
from pipelines.rows import COLUMN_ID_KEY
from pipelines.statistics import DataFile

APP_ID: Final = "cdc.app_id"
LOG_ID: Final = "cdc.log_id"
RELATION: Final = "cdc.relation"
GENERATION: Final = "cdc.generation"
"""B of the last generation end applied; while it is missing the first full copy has not ended."""

STATISTICS: Final = "delta.dataSkippingStatsColumns"
MAX_STATISTICS: Final = 32
"""Columns with statistics, as Delta's own default (`dataSkippingNumIndexedCols`)."""
COMPACT_ABOVE_FILES: Final = 64
"""Every merge adds a file; a merge opens all of them, so their number is kept small."""
REOPEN_AFTER: Final = 100
"""Versions after which the table is opened anew: an opened one keeps every commit it has replayed."""

_PROPERTIES: Final = {
    "delta.checkpointInterval": "100",
    "delta.enableExpiredLogCleanup": "true",
    # a commit per second is 86,400 log files a day, and every open of the table lists them
    "delta.logRetentionDuration": "interval 1 days",
}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")


class DeltaTarget:
    """A target as delta-rs sees it; `table` is always the newest version this process knows."""

    def __init__(self, uri: str, table: DeltaTable) -> None:
        self.uri = uri
        self.table = table
        self._opened_at = table.version()

    @classmethod
    def open(cls, uri: str) -> Self | None:
        """The target at uri, None when there is none."""
        return cls(uri, DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else None

    @classmethod
    def create(cls, uri: str, log_id: str, schema: TableSchema, columns: pa.Schema) -> Self:
        """An empty target with its identity; `columns` as rows.target_schema gives them."""
        identity = {LOG_ID: log_id, RELATION: str(schema.relation), APP_ID: str(uuid.uuid4())}
        statistics = {STATISTICS: ",".join(statistics_columns(schema, columns))}
        table = DeltaTable.create(
            uri,
            columns,
            name=schema.topic,
            description=f"changes of {schema.topic}, kept by cdc",
            configuration={**_PROPERTIES, **statistics, **identity},
            # our own properties are not in delta-rs' list
            raise_if_key_not_exists=False,
        )
        return cls(uri, table)

    def check_identity(self, log_id: str, schema: TableSchema) -> None:
        """Raise SinkBelongsElsewhere for another log's table, SchemaNotApplicable for another relation's."""
        if (found := self._property(LOG_ID)) != log_id:
            raise SinkBelongsElsewhere(f"target {self.uri!r} belongs to log {found!r}: expected {log_id!r}")
        if (held := self._property(RELATION)) != str(schema.relation):
            raise SchemaNotApplicable(
                f"target {self.uri!r} holds relation {held!r}: table {schema.topic!r} is relation {schema.relation!r}, "
                "dropped and made anew or renamed onto another's name"
            )

    def refresh(self) -> None:
        """See what others committed."""
        if self.table.version() - self._opened_at < REOPEN_AFTER:
            self.table.update_incremental()
            return
        self.table = DeltaTable(self.uri)
        self._opened_at = self.table.version()

    @property
    def version(self) -> int:
        """The Delta version."""
        return self.table.version()

    @property
    def app_id(self) -> str:
        """The `txn` identity of this target."""
        found = self._property(APP_ID)
        if found is None:
            raise SinkBelongsElsewhere(f"target {self.uri!r} was not made by cdc: it has no property {APP_ID!r}")
        return found

    @property
    def applied(self) -> int | None:
        """The position up to which ranges were merged, None before the first."""
        return self.table.transaction_version(self.app_id)

    @property
    def complete(self) -> bool:
        """Whether a full copy has ended here."""
        return self._property(GENERATION) is not None

    @property
    def columns(self) -> pa.Schema:
        """The Arrow schema with field metadata."""
        return pa.schema(self.table.schema().to_arrow())

    def files(self) -> tuple[int, int]:
        """(number of live files, their bytes)."""
        actions = pa.table(self.table.get_add_actions(flatten=True))
        return actions.num_rows, pc.sum(actions["size_bytes"]).as_py() or 0

    def commit(self, position: int) -> CommitProperties:
        """Commit properties that carry the `txn` of a range ending at position."""
        return CommitProperties(app_transactions=[Transaction(self.app_id, position)])

    @property
    def described(self) -> tuple[str, ...]:
        """The columns of whose files statistics are kept."""
        return tuple(filter(None, (self._property(STATISTICS) or "").split(",")))

    def add(self, files: Sequence[DataFile], position: int) -> None:
        """Make files of its folder part of it, in one commit that carries the `txn` of a range ending at position."""
        now = int(time.time() * 1000)
        actions = [AddAction(file.name, file.size, {}, now, True, file.statistics) for file in files]
        self.table.create_write_transaction(
            actions, "append", self.table.schema(), commit_properties=self.commit(position)
        )
        self.refresh()

    def complete_generation(self, position: int) -> None:
        """Note that a full copy which began at position has ended; changes no row."""
        if self._property(GENERATION) != str(position):
            self.table.alter.set_table_properties({GENERATION: str(position)}, raise_if_not_exists=False)

    def erase(self, truncated: tuple[int, int] | None, generation: int | None, ends: int | None) -> None:
        """Delete every row older than the truncate and the generation; once more changes nothing.

        ends: the position of the range whose last commit this is, None if the merge of its rows follows.
        """
        older = []
        if truncated is not None:
            position, ordinal = (int(part) for part in truncated)
            older.append(
                f"{POSITION_COLUMN} < {position} OR ({POSITION_COLUMN} = {position} AND {ORDINAL_COLUMN} < {ordinal})"
            )
        if generation is not None:
            older.append(f"{POSITION_COLUMN} < {int(generation)}")
        if older and self.files()[0]:
            properties = None if ends is None else self.commit(ends)
            self.table.delete(" OR ".join(f"({condition})" for condition in older), commit_properties=properties)

    def follow(self, wanted: pa.Schema) -> None:
        """Add the columns of `wanted` that are missing; a column that only the target has stays and takes nulls.

        Raises SchemaNotApplicable for a rename, a change of type, or a name used again.
        """
        present = self.columns
        check_followable(present, wanted, self.uri)
        missing = [wanted.field(name) for name in wanted.names if name not in present.names]
        if missing:
            self.table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)

    def refill(self, defaults: Mapping[str, str], upto: int) -> None:
        """Give rows at or below position `upto` the defaults of new columns: Delta column → SQL expression.

        Rows above it are of this range already (an attempt before a crash) and hold their own values.
        """
        if defaults and self.files()[0]:
            updates = {f'"{name}"': expression for name, expression in defaults.items()}
            self.table.update(updates=updates, predicate=f"{POSITION_COLUMN} <= {int(upto)}")

    def tidy(self) -> None:
        """Put small files together once there are many; rows stay as they are."""
        if self.files()[0] > COMPACT_ABOVE_FILES:
            self.table.optimize.compact()

    def _property(self, name: str) -> str | None:
        found = self.table.metadata().configuration.get(name)
        return None if found is None else str(found)


def check_followable(present: pa.Schema, wanted: pa.Schema, uri: str) -> None:
    """Raise SchemaNotApplicable unless `wanted` is `present` with columns added or left out."""
    name_of = {_column_id(field): field.name for field in present if _column_id(field) is not None}
    for field in wanted:
        held = name_of.get(_column_id(field))
        if held is not None and held != field.name:
            raise SchemaNotApplicable(f"column {held!r} was renamed to {field.name!r}: target {uri!r} cannot follow")
        if field.name not in present.names:
            continue
        before = present.field(field.name)
        if _column_id(before) != _column_id(field):
            raise SchemaNotApplicable(
                f"column {field.name!r} was dropped and made anew: target {uri!r} holds the old one"
            )
        if before.type != field.type:
            raise SchemaNotApplicable(
                f"column {field.name!r} changed its type: target {uri!r} holds {before.type!s}, expected {field.type!s}"
            )


def statistics_columns(schema: TableSchema, columns: pa.Schema) -> list[str]:
    """The columns whose files get statistics: places and key first.

    No float columns: delta-rs leaves NaN out of the statistics, and Spark's `> 100` would then
    skip files that hold NaN. No names that need quoting: the two writers parse the property differently.
    """
    key = [column_name(column.name) for column in schema.key]
    ordered = dict.fromkeys([POSITION_COLUMN, ORDINAL_COLUMN, *key, *columns.names])
    chosen = [
        name
        for name in ordered
        if name in (POSITION_COLUMN, ORDINAL_COLUMN)
        or (_PLAIN_NAME.match(name) and not pa.types.is_floating(columns.field(name).type))
    ]
    return chosen[:MAX_STATISTICS]


def _column_id(field: pa.Field) -> bytes | None:
    return None if field.metadata is None else field.metadata.get(COLUMN_ID_KEY)
