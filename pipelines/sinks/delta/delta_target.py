"""Delta target: one Delta table that a sink fills. `DeltaTarget` reads its identity and positions, changes its columns
and deletes its rows.

The identity is in the properties of the Delta table (`cdc.*`), so a moved directory still names its log and its source
table. A target belongs to one source table, or several source tables share it; `DeltaTarget.part` contains what differs
between these two cases, see pipelines.sinks.delta.target_part.

Rows are read only with `DeltaTable.scan`: after a column was renamed, the methods `to_pyarrow*` return nulls without an
error.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.schema import Schema
from deltalake.transaction import AddAction

from cdc.delta_protocol.actions import commit_info
from cdc.delta_protocol.table_storage import storage_of
from cdc.errors import SchemaNotApplicable, TargetDamaged
from cdc.failpoint import hit
from cdc.table import TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from cdc.targets.path_ownership import LOG_ID, check_free, check_owner, foreign_table_error
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.current_version import CurrentVersion
from pipelines.sinks.delta.damage_errors import reading
from pipelines.sinks.delta.damaged_commits import TXN_NAMED
from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY
from pipelines.sinks.delta.indexed.delta_log import LiveFiles, LogNotReadable
from pipelines.sinks.delta.schema_evolution import (
    ColumnChange,
    EvolutionPlan,
    FilledColumn,
    evolved_batch,
    without_ids,
)
from pipelines.sinks.delta.table_properties import TableMetadata, create_table, set_properties
from pipelines.sinks.delta.target_layout import (
    DELETION_VECTORS,
    SHARED,
    STATISTICS,
    NewTarget,
    TargetLayout,
    described_columns,
)
from pipelines.sinks.delta.target_part import RELATION, RowReader, SharedPart, TargetPart, WholeTarget

APP_ID: Final = "cdc.app_id"

COLUMNS: Final = "/columns"
"""Suffix of a `txn` application id. The commit with this `txn` changes the columns of the target and no row."""
ROWS: Final = "/rows"
"""Suffix of a `txn` application id. The `txn` has the position up to which all changes are in the target. The truncates
and finished copies up to that position may not have deleted the older rows yet.
"""
ERASED: Final = "/erased"
"""Suffix of a `txn` application id. The `txn` has the position up to which truncates and finished copies have deleted
the older rows. The changes up to that position may not be in the target yet.
"""

_PROPERTIES: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "true",
    # a commit per second makes 86,400 files in `_delta_log` a day; each open of the table lists them
    "delta.logRetentionDuration": "interval 1 days",
}
_NO_FILES: Final = pa.schema([("path", pa.string()), ("size_bytes", pa.int64())]).empty_table()
"""`DeltaTarget.actions` of a target without data files."""
log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class TxnMarker:
    """The `txn` action of a commit: an application id and the position that the commit reaches.

    A sink skips a range that ends at or before this position, because the range was merged already.
    """

    app_id: str
    version: int

    @property
    def transactions(self) -> dict[str, int]:
        """The `txn` as CurrentVersion records it."""
        return {self.app_id: int(self.version)}

    @property
    def properties(self) -> CommitProperties:
        """The commit properties with which delta-rs writes this `txn` action."""
        return txn_properties(self.app_id, self.version)


def txn_properties(app_id: str, version: int, **more: Any) -> CommitProperties:
    """Return the properties of a commit with one `txn`, which its commit info names. more: further properties.

    A commit file that a loss of power cut off then shows that its `txn` is missing.
    """
    return CommitProperties(
        custom_metadata={TXN_NAMED: app_id}, app_transactions=[Transaction(app_id, int(version))], **more
    )


class DeltaTarget:
    """A Delta table that a sink fills. `current` owns its version, and what was read from that."""

    def __init__(self, uri: str, table: DeltaTable | None, part: TargetPart | None = None) -> None:
        """table: None for a target that was just created; delta-rs then opens it when `table` is used."""
        self.uri = uri
        self.current = CurrentVersion(uri, table)
        self.part: TargetPart = WholeTarget() if part is None else part
        """The rows that this object reads and writes: all rows, or in a shared target those of one source table."""
        self.cluster_by: tuple[str, ...] = ()
        """Columns by which maintenance sorts the rows of the target: `cluster_by` of the rule at the last
        `check_layout`.
        """
        self.read_rows: RowReader | None = None
        """Function that reads the target's rows with Spark; None if delta-rs can read them."""

    @classmethod
    def open(cls, uri: str) -> Self | None:
        """Open the target at uri; return None if uri has no Delta table.

        Raises TargetDamaged if its Delta log cannot be read, TargetUnusable if it has unsupported features.
        """
        with reading(uri):
            return cls(uri, DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else None

    @classmethod
    def create(cls, uri: str, log_id: str, new: NewTarget, *, over_files: bool = False) -> Self:
        """Create an empty target at uri and record its identity in its properties.

        A shared target has no source table until `add_table` adds one. over_files: whether the directory may have files
        of an earlier target; otherwise TargetUnusable is raised if the directory is not empty.
        """
        if not over_files:
            check_free(uri)
        schema, layout, columns, app_id = new.schema, new.layout, new.columns, str(uuid.uuid4())
        identity = {LOG_ID: log_id, APP_ID: app_id}
        if layout.is_shared:
            columns = without_ids(columns)
        else:
            identity |= WholeTarget.properties(schema, new.generation)
        first = [*(column_name(column.name) for column in schema.key), *layout.cluster_by]
        described = [name for name in described_columns(columns, first) if name not in layout.partition_by]
        statistics = {STATISTICS: ",".join(described)}
        metadata, first_commit = create_table(
            uri,
            columns,
            name=uri.rpartition("/")[2] if layout.is_shared else schema.topic,
            description=f"changes of {'many tables' if layout.is_shared else schema.topic}, kept by cdc",
            partition_by=list(layout.partition_by) or None,
            configuration={**_PROPERTIES, **layout.configuration, **statistics, **identity},
        )
        created = cls(uri, None)
        known = created.current.contents  # a new table needs no reading
        known.metadata = metadata
        known.first_commit = first_commit
        known.all_columns = pa.schema(Schema.from_arrow(columns).to_arrow())
        known.actions = _NO_FILES
        known.transactions = dict.fromkeys([app_id, app_id + ROWS, app_id + ERASED, app_id + COLUMNS])
        return created

    def part_of(self, relation: int) -> DeltaTarget:
        """Return this target limited to the rows of one relation; return a target that is not shared as it is."""
        if not self.is_shared:
            return self
        part = DeltaTarget(self.uri, self.table, SharedPart(relation))
        part.cluster_by = self.cluster_by
        return part

    def add_table(self, schema: TableSchema, columns: pa.Schema) -> None:
        """Add a source table and its columns to a shared target. If the target already has the table, record its
        current name.

        Raises SchemaNotApplicable for a table that cannot share the target.
        """
        if isinstance(self.part, SharedPart):
            self._change_columns(self.part.plan_new_table(self, schema, columns), 0)
            self.part.record_table(self, schema, columns)

    def check_identity(self, log_id: str, schema: TableSchema) -> None:
        """Check that the target was filled from this log and from this source table.

        Raises TargetUnusable if it was filled from another log, SchemaNotApplicable if several tables share it or if it
        belongs to another relation.
        """
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
        """Raise TargetUnusable if the target was not filled from this log."""
        check_owner(self.uri, self.read_property(LOG_ID), log_id)

    @property
    def is_shared(self) -> bool:
        """Whether several source tables share the target."""
        return self.read_property(SHARED) == "true"

    @property
    def layout(self) -> TargetLayout:
        """The layout with which the target was created, as read from the metadata of the Delta table."""
        metadata = self.metadata
        return TargetLayout.of(
            metadata.configuration, metadata.partition_columns, {*_PROPERTIES, STATISTICS, DELETION_VECTORS}
        )

    def check_layout(self, layout: TargetLayout) -> None:
        """Check that the target has the layout that its rule demands; remember the rule's `cluster_by` for maintenance.

        Raises TargetRulesChanged if the rows were written under another rule, TransformFailed if the layout differs.
        """
        layout.check(self.uri, self.metadata.configuration, self.metadata.partition_columns)
        self.cluster_by = layout.cluster_by

    def set_key(self, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """Record that rows are found by the current key of the table, or by position and ordinal if the table has no
        key.

        before: the table when it was last published; None if it never was. replaced: a full copy that began under the
        new key has ended. Raises SchemaNotApplicable if the key changed and no such copy has ended.
        """
        self.part.set_key(self, schema, before, replaced=replaced)

    def refresh(self) -> None:
        """Read the newest version, which may come from other clients; raises TargetUnusable as `open` does."""
        self.current.refresh()

    def skip_to(self, version: int) -> None:
        """Make a later version with the same rows and positions, so that the versions in between never exist.

        Does nothing if the target has this version already. Raises TargetDamaged if its Delta log has a form that a
        checkpoint of cdc cannot contain.
        """
        if self.version >= version:
            return
        info = commit_info("SKIP VERSIONS", engineInfo="cdc", **{APP_ID: self.identity})
        try:
            LiveFiles.read(storage_of(self.uri), with_vectors=False).skip_to(version, [info])
        except LogNotReadable as exc:
            raise TargetDamaged(
                f"the versions of target {self.uri!r} up to {version} cannot be skipped: {exc}"
            ) from exc
        self.current.reopen()

    @property
    def table(self) -> DeltaTable:
        """The Delta table. If this process has committed without delta-rs, delta-rs first reads these commits."""
        return self.current.table

    @property
    def version(self) -> int:
        """The version of the Delta table that this process has read or committed last."""
        return self.current.number

    @property
    def metadata(self) -> TableMetadata:
        """Id, properties, partition columns and features of the Delta table."""
        known = self.current.contents
        if known.metadata is None:
            known.metadata = TableMetadata.of(self.table)
        return known.metadata

    @property
    def unwritable_features(self) -> tuple[str, ...]:
        """Sorted names of the table features with which delta-rs cannot write the target."""
        return self.metadata.unwritable_features

    @property
    def relation(self) -> int | None:
        """The relation of the source table as the metadata of the target names it; None if it names no relation."""
        return self.part.recorded_relation(self)

    @property
    def identity(self) -> str:
        """The target's id in property `cdc.app_id`. Each commit of rows by cdc contains it, and every `txn` application
        id of the target begins with it.

        Raises TargetUnusable if the Delta table has no such property.
        """
        identity = self.read_property(APP_ID)
        if identity is None:
            raise foreign_table_error(self.uri, APP_ID)
        return identity

    @property
    def app_id(self) -> str:
        """Application id of the `txn` that has the applied position; each table of a shared target has its own."""
        return self.part.txn_id(self.identity)

    @property
    def signed_commit(self) -> CommitProperties:
        """Properties of a commit without `txn`: they contain the target's id, which marks the commit as one by cdc."""
        return CommitProperties(custom_metadata={APP_ID: self.identity})

    @property
    def applied(self) -> int | None:
        """The applied position: the end of the last range that was merged completely; None if no range was merged."""
        return self.transaction()

    @property
    def changed_upto(self) -> int:
        """The position up to which all changes are in the target; 0 if no range was merged.

        Truncates and finished copies up to this position may not have deleted their older rows yet.
        """
        return max(self.applied or 0, self.transaction(ROWS) or 0)

    @property
    def is_untouched(self) -> bool:
        """Whether the columns may change freely, because the target has no rows and no recorded position. Always false
        for the part of a shared target.
        """
        if not self.part.has_own_columns or self.files()[0]:
            return False
        return all(self.transaction(suffix) is None for suffix in ("", ROWS, ERASED, COLUMNS))

    def is_replaced_by(self, batch: TableBatch) -> bool:
        """Return whether a full copy in this batch replaces every row that the target has of the source table.

        The values of these rows then need no conversion to new column types.
        """
        return self.part.is_replaced_by(self, batch)

    @property
    def columns_changed_upto(self) -> int:
        """The end of the range for which the columns of the target last changed; 0 if they never changed.

        After a crash, the range may be merged again with an earlier end. The target then already has the columns of a
        later position. For a shared target the result is always 0: a repeated range is merged with the current columns
        of that target, or refused with an error.
        """
        if not self.part.has_own_columns:
            return 0
        if self.current.last_column_change is None:
            self.current.last_column_change = self.transaction(COLUMNS) or 0
        return self.current.last_column_change

    def transaction(self, suffix: str = "") -> int | None:
        """Return the position in the `txn` whose application id is `app_id` + suffix; None if the target has no such
        `txn`.
        """
        return self._committed(self.app_id + suffix)

    def check_not_committed(self, marker: TxnMarker) -> None:
        """Raise CommitFailedError if another driver committed the `txn` of `marker`, or one of a later position."""
        committed = self._committed(marker.app_id)
        if committed is not None and committed >= marker.version:
            raise CommitFailedError("another driver committed rows of the same table")

    def _committed(self, application: str) -> int | None:
        # delta-rs searches `_delta_log` each time, for 5 ms if there is no such `txn`
        known = self.current.contents.transactions
        if application not in known:
            known[application] = self.table.transaction_version(application)
        return known[application]

    @property
    def first_commit(self) -> Sequence[dict[str, Any]] | None:
        """The only commit of a table that this process has created; None for any other table."""
        return self.current.contents.first_commit

    @property
    def is_complete(self) -> bool:
        """Whether at least one full copy of the source table has ended in the target."""
        return self.part.has_complete_copy(self)

    @property
    def all_columns(self) -> pa.Schema:
        """All columns of the Delta table, with the metadata of their fields."""
        known = self.current.contents
        if known.all_columns is None:
            known.all_columns = pa.schema(self.table.schema().to_arrow())
        return known.all_columns

    @property
    def columns(self) -> pa.Schema:
        """All columns of the Delta table, with the column ids of the part's source table in their metadata."""
        known = self.current.contents
        if known.columns is None:
            known.columns = self.part.columns(self.all_columns)
        return known.columns

    def files(self) -> tuple[int, int]:
        """Return the number of data files that the newest version has for the part, and their total bytes."""
        known = self.current.contents
        if known.file_count is None:
            known.file_count = _counted(self.actions)
        return known.file_count

    @property
    def actions(self) -> pa.Table:
        """The data files that the newest version has for the part, a row per file: `path`, `size_bytes`, and the bounds
        `min.<name>` and `max.<name>` of each column.
        """
        known = self.current.contents
        if known.actions is None:
            known.actions = self.part.files(pa.table(self.table.get_add_actions(flatten=True)))
        return known.actions

    def actions_at(self, version: int) -> pa.Table:
        """Return `actions` of an older version; reads `_delta_log` again."""
        older = DeltaTable(self.uri, version=version)
        return self.part.files(pa.table(older.get_add_actions(flatten=True)))

    def commit(self, position: int, suffix: str = "") -> CommitProperties:
        """Return the properties of a commit with one `txn` at the given position.

        The application id of the `txn` is `app_id` + suffix.
        """
        return txn_properties(self.app_id + suffix, position)

    @property
    def statistics_columns(self) -> tuple[str, ...]:
        """Names of the columns for which `_delta_log` has file statistics."""
        return tuple(filter(None, (self.read_property(STATISTICS) or "").split(",")))

    def add(self, files: Sequence[AddAction], commit: CommitProperties) -> None:
        """Add data files in the target's directory to the table, in one commit with these properties."""
        self.table.create_write_transaction(
            list(files),
            "append",
            self.table.schema(),
            partition_by=list(self.metadata.partition_columns) or None,
            commit_properties=commit,
        )
        self.refresh()

    def complete_generation(self, position: int) -> None:
        """Record that the full copy which began at the given position has ended. No row changes."""
        self.part.complete_generation(self, position)

    def erase(self, truncated: tuple[int, int] | None, generation: int | None, upto: int, suffix: str) -> None:
        """Delete the rows that a truncate or a finished full copy removes, and all rows without a position.

        truncated: (position, ordinal) of the truncate; None: no truncate. generation: position at which the finished
        copy began; None: no copy. Rows that are older than the truncate or the start of the copy are deleted. The
        commit has a `txn` with position upto and application id `app_id` + suffix. A repeated call deletes nothing
        more.
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
            # a row without a position is from another client, and the source does not have it
            condition = " OR ".join(f"({condition})" for condition in (*older, f"{POSITION_COLUMN} IS NULL"))
            self._delete(self.part.where(condition), upto, suffix)

    def _delete(self, condition: str, upto: int, suffix: str) -> None:
        self.table.delete(condition, commit_properties=self.commit(upto, suffix))

    def evolve_columns(self, change: ColumnChange, upto: int) -> None:
        """Change the columns of the target to the wanted ones, in one commit.

        Columns that exist only in the target are kept, except those in `change.dropped`. upto: end of the range that
        needs the columns. Raises SchemaNotApplicable for a change that the policy forbids, that needs a full copy, or
        that Delta refuses.
        """
        known = self.current.contents  # a commit that changes more than rows replaces it
        fitting = known.fitting_change
        if fitting is not None and fitting.wanted is change.wanted and fitting == change:
            return
        self._change_columns(self.part.plan_columns(self, change), upto)
        self.part.record_columns(self, change)
        known.fitting_change = change
        # an attempt before a crash may have removed a column that had statistics
        if not set(self.statistics_columns) <= set(self.columns.names):
            described = ",".join(described_columns(self.columns, self.statistics_columns))
            self.set_property(STATISTICS, described)

    def _change_columns(self, evolution: EvolutionPlan, upto: int) -> None:
        if not evolution.steps:
            return
        log.info("changing the columns of a target", target=self.uri, changes=list(evolution.steps))
        self.current.last_column_change = None
        hit("delta_before_columns")
        try:
            if evolution.columns:
                self._rewrite(evolution.columns, upto)
            else:
                fields = Schema.from_arrow(pa.schema(evolution.added)).fields
                self.table.alter.add_columns(fields, commit_properties=self._column_commit(upto))
        except DeltaError as exc:
            # other errors are retried: a conflicting commit, or a store that does not answer
            if "not supported" in str(exc) or "not yet supported" in str(exc) or "append-only" in str(exc):
                raise SchemaNotApplicable(
                    f"target {self.uri!r} has table features that prevent these changes of its columns: "
                    f"{'; '.join(evolution.steps)}"
                ) from exc
            raise
        hit("delta_after_columns")

    def _column_commit(self, upto: int) -> CommitProperties:
        """Return the properties of a commit that changes columns. delta-rs does not retry this commit after a conflict.
        A retry would overwrite the commit of another client.
        """
        return txn_properties(self.app_id + COLUMNS, upto, max_commit_retries=0)

    def _rewrite(self, columns: Sequence[FilledColumn], upto: int) -> None:
        """Rewrite all rows of the target with the given columns, as a stream. Readers of older versions are not
        affected.
        """
        present, schema = self.columns, pa.schema([column.field for column in columns])
        name_of = {column.source: column.field.name for column in columns if column.source is not None}
        # start the scan here: delta-rs cannot start it inside the write
        rows = pa.RecordBatchReader.from_stream(self.table.scan())
        write_deltalake(
            self.table,
            pa.RecordBatchReader.from_batches(schema, (evolved_batch(batch, present, columns) for batch in rows)),
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=[name_of[name] for name in self.table.metadata().partition_columns] or None,
            commit_properties=self._column_commit(upto),
        )
        self.current.reopen()

    def fill_defaults(self, defaults: Mapping[str, str], upto: int) -> None:
        """Set new columns to their defaults in all rows at or below position upto.

        defaults: Delta column → SQL expression. Rows above upto exist only after a crash: an earlier attempt merged
        them from the current range. They already have their own values in the new columns.
        """
        if defaults and self.files()[0]:
            updates = {f'"{name}"': expression for name, expression in defaults.items()}
            older = self.part.where(f"{POSITION_COLUMN} <= {int(upto)}")
            self.table.update(updates=updates, predicate=older, commit_properties=self.signed_commit)
            hit("delta_after_refill")

    def read_property(self, name: str) -> str | None:
        """Return the value of a property of the Delta table; None if the property is not set."""
        value = self.metadata.configuration.get(name)
        return None if value is None else str(value)

    def set_property(self, name: str, value: str) -> None:
        """Set a property of the Delta table, in a separate commit."""
        self.set_properties({name: value})

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set properties of the Delta table, in one separate commit."""
        set_properties(self.uri, self.table, properties)


def rewritten_bytes(before: pa.Table, after: pa.Table) -> int:
    """Return how many bytes a batch rewrote. before, after: the data files of the target before and after the batch.

    The result is the smaller of the added and the removed bytes. So a batch that only adds files, or only removes them,
    rewrites nothing.
    """
    if before is after:
        return 0
    added = after["size_bytes"].filter(pc.invert(pc.is_in(after["path"], before["path"])))
    removed = before["size_bytes"].filter(pc.invert(pc.is_in(before["path"], after["path"])))
    return min(pc.sum(added).as_py() or 0, pc.sum(removed).as_py() or 0)


def _counted(actions: pa.Table) -> tuple[int, int]:
    return actions.num_rows, pc.sum(actions["size_bytes"]).as_py() or 0
