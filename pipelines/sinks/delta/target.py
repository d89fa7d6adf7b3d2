"""Delta target: one Delta table that a sink fills: its identity, its positions, changes of columns, removal of rows.

The identity is in the table's own properties (`cdc.*`), so a moved directory still names its log and its table. What
differs between a target of one table and a shared target is in its part, see pipelines.sinks.delta.target_part. Rows
are read with `scan` only: the methods `to_pyarrow*` silently return nulls after a rename.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.schema import Schema
from deltalake.transaction import AddAction

from cdc.errors import SchemaNotApplicable
from cdc.failpoint import hit
from cdc.stores.path_ownership import LOG_ID, check_free, check_owner, foreign_table_error
from cdc.table import TableSchema
from cdc.target_names import END_COLUMN, ORDINAL_COLUMN, POSITION_COLUMN, START_COLUMN, column_name
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_log import is_newest
from pipelines.sinks.delta.file_statistics import DataFile
from pipelines.sinks.delta.schema_evolution import (
    ColumnChange,
    EvolutionPlan,
    FilledColumn,
    evolved_batch,
    without_ids,
)
from pipelines.sinks.delta.table_features import translate_refusals
from pipelines.sinks.delta.target_layout import PLAIN, SHARED, TargetLayout
from pipelines.sinks.delta.target_part import KEYLESS, RELATION, RowReader, SharedPart, TargetPart, WholeTarget

APP_ID: Final = "cdc.app_id"

COLUMNS: Final = "/columns"
"""Suffix of the `txn` identity of a commit that changes the columns and no row."""
ROWS: Final = "/rows"
"""Suffix of a `txn` identity: the position up to which the changes are in the target, perhaps without its endings."""
ERASED: Final = "/erased"
"""Suffix of a `txn` identity: the position up to which endings deleted rows, perhaps without the changes."""

STATISTICS: Final = "delta.dataSkippingStatsColumns"
MAX_STATISTICS: Final = 32
"""Columns with statistics, as Delta's own default (`dataSkippingNumIndexedCols`)."""
CHECKPOINT_EVERY: Final = 25
"""Versions between checkpoints: with each commit delta-rs reads all commits since the last one twice."""
REOPEN_AFTER: Final = CHECKPOINT_EVERY
"""Versions after which the table is reopened: an open table keeps every commit that it replayed in memory."""

_PROPERTIES: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "true",
    # a commit per second is 86,400 log files a day, and every open of the table lists them
    "delta.logRetentionDuration": "interval 1 days",
}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")

_T = TypeVar("_T")

log = structlog.get_logger("apply")


class DeltaTarget:
    """A target as delta-rs reads it; `table` is the newest version that this process knows."""

    def __init__(self, uri: str, table: DeltaTable, part: TargetPart | None = None) -> None:
        self.uri = uri
        self.table = table
        self.part: TargetPart = WholeTarget() if part is None else part
        """The rows of the table whose batches are merged."""
        self.cluster_by: tuple[str, ...] = ()
        """Columns by which maintenance orders rows, from the rule of the table at the last check of the layout."""
        self.read_rows: RowReader | None = None
        """Reads rows that delta-rs cannot read; None if it can."""
        self._opened_at = self._cached_version = table.version()
        self._cache: dict[str, Any] = {}
        """Values of version `_cached_version`, by name."""
        self._last_column_change: int | None = None
        """None: unknown until it is read from the log. Only our own changes of columns, and a refresh, change it."""

    @classmethod
    def open(cls, uri: str) -> Self | None:
        """The target at uri, None if there is none; raises TargetUnusable for one that cannot be opened."""
        with translate_refusals(uri):
            return cls(uri, DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else None

    @classmethod
    def create(
        cls, uri: str, log_id: str, schema: TableSchema, columns: pa.Schema, layout: TargetLayout = PLAIN
    ) -> Self:
        """Create an empty target with its identity; `schema` names its key, `columns` are all of its columns.

        A shared target has no table at first, see add_table. Raises TargetUnusable for a path with other files.
        """
        check_free(uri)
        identity = {LOG_ID: log_id, APP_ID: str(uuid.uuid4())}
        if layout.is_shared:
            columns = without_ids(columns)
        else:
            identity |= {RELATION: str(schema.relation)} | ({} if schema.key else {KEYLESS: "true"})
        first = [*(column_name(column.name) for column in schema.key), *layout.cluster_by]
        described = [name for name in described_columns(columns, first) if name not in layout.partition_by]
        statistics = {STATISTICS: ",".join(described)}
        table = DeltaTable.create(
            uri,
            columns,
            name=uri.rpartition("/")[2] if layout.is_shared else schema.topic,
            description=f"changes of {'many tables' if layout.is_shared else schema.topic}, kept by cdc",
            partition_by=list(layout.partition_by) or None,
            configuration={**_PROPERTIES, **layout.configuration, **statistics, **identity},
            # delta-rs does not know our own properties
            raise_if_key_not_exists=False,
        )
        return cls(uri, table)

    def part_of(self, relation: int) -> DeltaTarget:
        """The target as one table sees it: the table's part of a shared target, otherwise the target itself."""
        if not self.is_shared:
            return self
        found = DeltaTarget(self.uri, self.table, SharedPart(relation))
        found.cluster_by = self.cluster_by
        return found

    def add_table(self, schema: TableSchema, columns: pa.Schema) -> None:
        """Add a table and its columns to a shared target, or record the table's current name.

        Raises SchemaNotApplicable for a table that cannot share the target.
        """
        if isinstance(self.part, SharedPart):
            self._change_columns(self.part.plan_new_table(self, schema, columns), 0)
            self.part.record_table(self, schema, columns)

    def check_identity(self, log_id: str, schema: TableSchema) -> None:
        """Raise TargetUnusable for a table of another log, SchemaNotApplicable for another relation's target."""
        self.check_log(log_id)
        if self.is_shared:
            raise SchemaNotApplicable(
                f"several tables share target {self.uri!r}, but the rule of table {schema.topic!r} has no merge_tables",
                remedy="set another path in the rule, or restore the earlier rule",
            )
        if (relation := self.read_property(RELATION)) != str(schema.relation):
            raise SchemaNotApplicable(
                f"target {self.uri!r} contains relation {relation!r}, but table {schema.topic!r} is now relation "
                f"{schema.relation!r}: the table was dropped and created again, or another table took its name",
                remedy="replace the old target: 'cdc replay SINK --tables TABLE'",
            )

    def check_log(self, log_id: str) -> None:
        """Raise TargetUnusable for a table that was not filled from this log."""
        check_owner(self.uri, self.read_property(LOG_ID), log_id)

    @property
    def is_shared(self) -> bool:
        """Whether several tables share the target."""
        return self.read_property(SHARED) == "true"

    @property
    def layout(self) -> TargetLayout:
        """The layout with which the target was created."""
        metadata = self.table.metadata()
        return TargetLayout.of(metadata.configuration, metadata.partition_columns, {*_PROPERTIES, STATISTICS})

    def check_layout(self, layout: TargetLayout) -> None:
        """Raise TargetRulesChanged for rows written under another rule, TransformFailed for another layout."""
        metadata = self.table.metadata()
        layout.check(self.uri, metadata.configuration, metadata.partition_columns)
        self.cluster_by = layout.cluster_by

    def set_key(self, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """Find rows by the table's current key, or by position if it has none; raises SchemaNotApplicable.

        before: the table when it was last published. replaced: a full copy under the new key has ended.
        """
        self.part.set_key(self, schema, before, replaced=replaced)

    def refresh(self) -> None:
        """Read the commits of others; raises TargetUnusable as open does."""
        known = self.version
        with translate_refusals(self.uri):
            if known - self._opened_at >= REOPEN_AFTER:
                self._reopen()
            elif not is_newest(self.uri, known):
                self.table.update_incremental()
        if self.version != known:
            self._last_column_change = None

    def _reopen(self) -> None:
        self.table = DeltaTable(self.uri)
        self._opened_at = self.version

    @property
    def version(self) -> int:
        """The Delta version."""
        return self.table.version()

    @property
    def relation(self) -> int | None:
        """The relation whose rows the part has; None if the target has not recorded it."""
        return self.part.recorded_relation(self)

    @property
    def identity(self) -> str:
        """The id that each of our commits of rows carries; the prefix of every `txn` identity."""
        found = self.read_property(APP_ID)
        if found is None:
            raise foreign_table_error(self.uri, APP_ID)
        return found

    @property
    def app_id(self) -> str:
        """The `txn` identity of the part."""
        return self.part.txn_id(self.identity)

    @property
    def signed_commit(self) -> CommitProperties:
        """Commit properties of a step that carries no `txn`."""
        return CommitProperties(custom_metadata={APP_ID: self.identity})

    @property
    def applied(self) -> int | None:
        """The position up to which ranges were merged, None before the first."""
        return self.transaction()

    @property
    def changed_upto(self) -> int:
        """The position up to which changes are in the target, perhaps without the endings up to there."""
        return max(self.applied or 0, self.transaction(ROWS) or 0)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was ever written to the target, so that its columns are free to change."""
        if not self.part.has_own_columns or self.files()[0]:
            return False
        return all(self.transaction(suffix) is None for suffix in ("", ROWS, ERASED, COLUMNS))

    def is_replaced_by(self, batch: TableBatch) -> bool:
        """Whether a full copy replaces every row, so that their columns need no conversion."""
        return self.part.is_replaced_by(self, batch)

    @property
    def columns_changed_upto(self) -> int:
        """The end of the range for which the columns changed last; after a crash, a range may end before it.

        0 for a shared target: a repeated range is merged with the current columns, or refused.
        """
        if not self.part.has_own_columns:
            return 0
        if self._last_column_change is None:
            self._last_column_change = self.transaction(COLUMNS) or 0
        return self._last_column_change

    def transaction(self, suffix: str = "") -> int | None:
        """The position in the `txn` of this target, or in the one with a suffix; None if there is none."""
        application = self.app_id + suffix
        # delta-rs searches the log each time, for 5 ms if there is none
        return self._once(application, lambda: self.table.transaction_version(application))

    def record_commit(self, application: str, position: int, since: int) -> None:
        """Record that our commit set the `txn` of an application to a position; since: the version before it."""
        if self.version == since + 1:  # otherwise commits of others came between, which are not known
            self._cached_version, self._cache = self.version, {application: int(position)}

    @property
    def is_complete(self) -> bool:
        """Whether a full copy of the table has ended in the target."""
        return self.part.has_complete_copy(self)

    @property
    def all_columns(self) -> pa.Schema:
        """The columns of the Delta table with field metadata."""
        return self._once("all columns", lambda: pa.schema(self.table.schema().to_arrow()))

    @property
    def columns(self) -> pa.Schema:
        """The columns of the Delta table with the ids of the part's table."""
        return self._once("columns", lambda: self.part.columns(self.all_columns))

    def files(self) -> tuple[int, int]:
        """(number of live files of the part, their bytes)."""
        return self._once("files", lambda: _counted(self.actions))

    @property
    def actions(self) -> pa.Table:
        """The live files of the part: `path`, `size_bytes`, and bounds of columns, `min.<name>` and `max.<name>`."""
        return self._once("actions", lambda: self.part.files(pa.table(self.table.get_add_actions(flatten=True))))

    def _once(self, name: str, read: Callable[[], _T]) -> _T:
        if self._cached_version != self.version:
            self._cached_version, self._cache = self.version, {}
        if name not in self._cache:
            self._cache[name] = read()
        return cast("_T", self._cache[name])

    def commit(self, position: int, suffix: str = "") -> CommitProperties:
        """Commit properties that carry the `txn` of a range ending at position; suffix: as of `transaction`."""
        return CommitProperties(app_transactions=[Transaction(self.app_id + suffix, int(position))])

    @property
    def statistics_columns(self) -> tuple[str, ...]:
        """The columns with statistics in the Delta log."""
        return tuple(filter(None, (self.read_property(STATISTICS) or "").split(",")))

    def add(self, files: Sequence[DataFile], position: int) -> None:
        """Add files of its directory in one commit that carries the `txn` of a range ending at position."""
        now = int(time.time() * 1000)
        actions = [AddAction(file.name, file.size, {}, now, True, file.statistics) for file in files]
        self.table.create_write_transaction(
            actions, "append", self.table.schema(), commit_properties=self.commit(position)
        )
        self.refresh()

    def complete_generation(self, position: int) -> None:
        """Record that the full copy which began at position has ended; changes no row."""
        self.part.complete_generation(self, position)

    def erase(self, truncated: tuple[int, int] | None, generation: int | None, upto: int, suffix: str) -> None:
        """Delete every row older than the truncate and the generation, or without a position; idempotent.

        The commit carries the `txn` of a range ending at upto, with the suffix.
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
            # a row of another client has no position: the source does not have it
            condition = " OR ".join(f"({condition})" for condition in (*older, f"{POSITION_COLUMN} IS NULL"))
            self._delete(self.part.where(condition), upto, suffix)

    def _delete(self, condition: str, upto: int, suffix: str) -> None:
        self.table.delete(condition, commit_properties=self.commit(upto, suffix))

    def evolve_columns(self, change: ColumnChange, upto: int) -> None:
        """Give the target the wanted columns in one commit; columns that only the target has stay.

        upto: the end of the range. Raises SchemaNotApplicable for a change that the policy forbids, that needs a full
        copy, or that Delta refuses.
        """
        self._change_columns(self.part.plan_columns(self, change), upto)
        self.part.record_columns(self, change)
        # a rewrite before a crash may have removed a column that had statistics
        if not set(self.statistics_columns) <= set(self.columns.names):
            described = ",".join(described_columns(self.columns, self.statistics_columns))
            self.set_property(STATISTICS, described)

    def _change_columns(self, found: EvolutionPlan, upto: int) -> None:
        if not found.steps:
            return
        log.info("changing the columns of a target", target=self.uri, changes=list(found.steps))
        self._last_column_change = None
        hit("delta_before_columns")
        try:
            if found.columns:
                self._rewrite(found.columns, upto)
            else:
                fields = Schema.from_arrow(pa.schema(found.added)).fields
                self.table.alter.add_columns(fields, commit_properties=self._column_commit(upto))
        except DeltaError as exc:
            # a conflicting commit, or a store that does not answer, is tried again
            if "not supported" in str(exc) or "not yet supported" in str(exc) or "append-only" in str(exc):
                raise SchemaNotApplicable(
                    f"target {self.uri!r} has table features that prevent these changes of its columns: "
                    f"{'; '.join(found.steps)}"
                ) from exc
            raise
        hit("delta_after_columns")

    def _column_commit(self, upto: int) -> CommitProperties:
        """Commit properties of a change of columns: no retries, which would overwrite commits of others."""
        return CommitProperties(max_commit_retries=0, app_transactions=[Transaction(self.app_id + COLUMNS, upto)])

    def _rewrite(self, columns: Sequence[FilledColumn], upto: int) -> None:
        """Write the same rows in other columns, as a stream; readers of older versions are not affected."""
        present, schema = self.columns, pa.schema([column.field for column in columns])
        name_of = {column.source: column.field.name for column in columns if column.source is not None}
        # the scan starts here: inside the write the engine cannot start other work
        rows = pa.RecordBatchReader.from_stream(self.table.scan())
        write_deltalake(
            self.table,
            pa.RecordBatchReader.from_batches(schema, (evolved_batch(batch, present, columns) for batch in rows)),
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=[name_of[name] for name in self.table.metadata().partition_columns] or None,
            commit_properties=self._column_commit(upto),
        )
        self._reopen()

    def fill_defaults(self, defaults: Mapping[str, str], upto: int) -> None:
        """Set new columns to their defaults in rows at or below position `upto`: Delta column → SQL expression.

        Rows above it are of this range (from an attempt before a crash) and have their own values.
        """
        if defaults and self.files()[0]:
            updates = {f'"{name}"': expression for name, expression in defaults.items()}
            older = self.part.where(f"{POSITION_COLUMN} <= {int(upto)}")
            self.table.update(updates=updates, predicate=older, commit_properties=self.signed_commit)
            hit("delta_after_refill")

    def read_property(self, name: str) -> str | None:
        """A property of the Delta table."""
        found = self.table.metadata().configuration.get(name)
        return None if found is None else str(found)

    def set_property(self, name: str, value: str) -> None:
        """Set a property of the Delta table in a commit of its own."""
        self.table.alter.set_table_properties({name: value}, raise_if_not_exists=False)


def rewritten_bytes(before: pa.Table, after: pa.Table) -> int:
    """Bytes written again between two lists of live files: the smaller of the added and the removed bytes.

    Files that were only added have new rows, and files that were only removed have rows that nobody wrote again.
    """
    if before is after:
        return 0
    added = after["size_bytes"].filter(pc.invert(pc.is_in(after["path"], before["path"])))
    removed = before["size_bytes"].filter(pc.invert(pc.is_in(before["path"], after["path"])))
    return min(pc.sum(added).as_py() or 0, pc.sum(removed).as_py() or 0)


def _counted(actions: pa.Table) -> tuple[int, int]:
    return actions.num_rows, pc.sum(actions["size_bytes"]).as_py() or 0


def described_columns(columns: pa.Schema, first: Sequence[str]) -> list[str]:
    """The columns whose files get statistics: position and ordinal first, then those of `first`.

    No lists, which have no bounds. No float columns: delta-rs leaves NaN out of the statistics, and Spark's `> 100`
    would then skip files that contain NaN. No names that need quoting: the two writers parse the property differently.
    """
    # without bounds of these a merge into versions would open the files of all old versions
    spans = [name for name in (START_COLUMN, END_COLUMN) if name in columns.names]
    ordered = dict.fromkeys([POSITION_COLUMN, ORDINAL_COLUMN, *first, *spans, *columns.names])
    described = [
        name
        for name in ordered
        if name in (POSITION_COLUMN, ORDINAL_COLUMN, *spans)
        or (name in columns.names and _PLAIN_NAME.match(name) and not _has_no_bounds(columns.field(name).type))
    ]
    return described[:MAX_STATISTICS]


def _has_no_bounds(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_nested(kind)
