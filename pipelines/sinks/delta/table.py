"""Delta target: one Delta table that a sink fills, with its creation, identity, schema changes and erasure of rows.

The identity is in the table's own properties (`cdc.*`), so that a directory can be moved and still names its log and
table. Rows are read through `scan` only: the `to_pyarrow*` methods return nulls after a rename, without an error.
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

from cdc.config import SchemaChanges
from cdc.errors import SchemaNotApplicable
from cdc.failpoint import hit
from cdc.stores.path_ownership import LOG_ID, check_free, check_owner, foreign_table_error
from cdc.table import TableSchema
from cdc.target_names import END_COLUMN, ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN, START_COLUMN, column_name
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.commit_log import is_newest
from pipelines.sinks.delta.file_statistics import DataFile
from pipelines.sinks.delta.schema_evolution import (
    EvolutionPlan,
    FilledColumn,
    check_key,
    evolved_batch,
    plan,
    without_ids,
)
from pipelines.sinks.delta.table_features import translate_refusals
from pipelines.sinks.delta.table_layout import MERGED, PLAIN, TableLayout
from pipelines.types.typed_rows import COPY_AGAIN

APP_ID: Final = "cdc.app_id"
RELATION: Final = "cdc.relation"
GENERATION: Final = "cdc.generation"
"""Start position of the last finished copy; missing until the first full copy has ended."""
KEYLESS: Final = "cdc.keyless"
"""`true` where rows are found by position and ordinal because the table has no key."""

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
"""Versions after which the table is reopened: an open one keeps every commit that it has replayed in memory."""

_PROPERTIES: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "true",
    # a commit per second is 86,400 log files a day, and every open of the table lists them
    "delta.logRetentionDuration": "interval 1 days",
}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")

Reads = Callable[[int, Sequence[str], str | None, pa.Array], pa.RecordBatchReader]
"""(version, columns, key column or None, values) → rows whose key is one of the values, or all rows."""

_T = TypeVar("_T")

log = structlog.get_logger("apply")


class DeltaTarget:
    """A target as delta-rs reads it; `table` is the newest version that this process knows."""

    def __init__(self, uri: str, table: DeltaTable) -> None:
        self.uri = uri
        self.table = table
        self.cluster_by: tuple[str, ...] = ()
        """Columns by which maintenance orders rows, from the rule of the table at the last check of the layout."""
        self.part: int | None = None
        """The relation whose part of a shared target this is; None: the whole target."""
        self.reads: Reads | None = None
        """Reads rows where delta-rs cannot."""
        self._opened_at = self._looked_at = table.version()
        self._known: dict[str, Any] = {}
        """Cached values of version `_looked_at`, by name."""
        self._columns_known: int | None = None
        """None: to be read from the log. Only our own changes of columns, and a refresh, change it."""

    @classmethod
    def open(cls, uri: str) -> Self | None:
        """The target at uri, None when there is none; raises TargetUnusable for one that cannot be opened."""
        with translate_refusals(uri):
            return cls(uri, DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else None

    @classmethod
    def create(
        cls, uri: str, log_id: str, schema: TableSchema, columns: pa.Schema, layout: TableLayout = PLAIN
    ) -> Self:
        """Create an empty target with its identity; `schema` names its key, `columns` are all of its columns.

        A shared target belongs to no table at first, see SharedTarget.add_table. Raises TargetUnusable for a path
        where something else is.
        """
        check_free(uri)
        identity = {LOG_ID: log_id, APP_ID: str(uuid.uuid4())}
        if layout.merged:
            columns = without_ids(columns)
        else:
            identity |= {RELATION: str(schema.relation)} | ({} if schema.key else {KEYLESS: "true"})
        first = [*(column_name(column.name) for column in schema.key), *layout.cluster_by]
        described = [name for name in described_columns(columns, first) if name not in layout.partition_by]
        statistics = {STATISTICS: ",".join(described)}
        table = DeltaTable.create(
            uri,
            columns,
            name=uri.rpartition("/")[2] if layout.merged else schema.topic,
            description=f"changes of {'many tables' if layout.merged else schema.topic}, kept by cdc",
            partition_by=list(layout.partition_by) or None,
            configuration={**_PROPERTIES, **layout.configuration, **statistics, **identity},
            # delta-rs does not know our own properties
            raise_if_key_not_exists=False,
        )
        return cls(uri, table)

    def check_identity(self, log_id: str, schema: TableSchema) -> None:
        """Raise TargetUnusable for a table that is not this log's, SchemaNotApplicable for another relation's."""
        self.check_log(log_id)
        if self.merged:
            raise SchemaNotApplicable(
                f"several tables share target {self.uri!r}, but the rule of {schema.topic!r} has no merge_tables",
                remedy="set another path in the rule, or restore the earlier rule",
            )
        if (held := self._property(RELATION)) != str(schema.relation):
            raise SchemaNotApplicable(
                f"target {self.uri!r} contains relation {held!r}, but table {schema.topic!r} is now relation "
                f"{schema.relation!r}: "
                "it was dropped and created again, or renamed to another table's name",
                remedy="replace the old target: 'cdc replay SINK --tables TABLE'",
            )

    def check_log(self, log_id: str) -> None:
        """Raise TargetUnusable for a table that was not filled from this log."""
        check_owner(self.uri, self._property(LOG_ID), log_id)

    @property
    def merged(self) -> bool:
        """Whether many tables share it."""
        return self._property(MERGED) == "true"

    @property
    def layout(self) -> TableLayout:
        """The layout with which it was created."""
        metadata = self.table.metadata()
        return TableLayout.of(metadata.configuration, metadata.partition_columns, {*_PROPERTIES, STATISTICS})

    def check_layout(self, layout: TableLayout) -> None:
        """Raise TargetRulesChanged for rows made by another rule, TransformFailed for files laid out otherwise."""
        metadata = self.table.metadata()
        layout.check(self.uri, metadata.configuration, metadata.partition_columns)
        self.cluster_by = layout.cluster_by

    def set_key(self, schema: TableSchema, before: TableSchema | None, *, replaced: bool) -> None:
        """Find rows by the table's current key, or by position if it has none; raises as check_key does."""
        check_key(schema, before, replaced=replaced)
        keyless = self._property(KEYLESS) == "true"
        if keyless != bool(schema.key):
            return
        if not replaced:
            now = "now has a key" if schema.key else "no longer has a key"
            raise SchemaNotApplicable(
                f"table {schema.topic!r} {now}: target {self.uri!r} identifies its rows differently", remedy=COPY_AGAIN
            )
        self._set_property(KEYLESS, str(not schema.key).lower())

    def refresh(self) -> None:
        """Read the commits of others; raises TargetUnusable as open does."""
        known = self.version
        with translate_refusals(self.uri):
            if known - self._opened_at >= REOPEN_AFTER:
                self._reopen()
            elif not is_newest(self.uri, known):
                self.table.update_incremental()
        if self.version != known:
            self._columns_known = None

    def _reopen(self) -> None:
        self.table = DeltaTable(self.uri)
        self._opened_at = self.version

    @property
    def version(self) -> int:
        """The Delta version."""
        return self.table.version()

    @property
    def relation(self) -> int | None:
        """The relation whose rows it has."""
        found = self._property(RELATION)
        return None if found is None else int(found)

    @property
    def identity(self) -> str:
        """The id that each of our commits of rows carries; the prefix of every `txn` identity."""
        found = self._property(APP_ID)
        if found is None:
            raise foreign_table_error(self.uri, APP_ID)
        return found

    @property
    def app_id(self) -> str:
        """The `txn` identity of this target."""
        return self.identity

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
        """The position up to which changes are in the target, perhaps without what truncates ended there."""
        return max(self.applied or 0, self.transaction(ROWS) or 0)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was ever written to it, so that its columns are free to change."""
        if self.files()[0]:
            return False
        return all(self.transaction(suffix) is None for suffix in ("", ROWS, ERASED, COLUMNS))

    def is_replaced_by(self, batch: TableBatch) -> bool:
        """Whether a full copy replaces every row, in this batch or in later ones until the copy ends."""
        return batch.is_copying or batch.ends_copy

    @property
    def columns_changed_upto(self) -> int:
        """The end of the range for which the columns changed last; after a crash, a range may end before it."""
        if self._columns_known is None:
            self._columns_known = self.transaction(COLUMNS) or 0
        return self._columns_known

    def transaction(self, suffix: str = "") -> int | None:
        """The position in the `txn` of this target, or in the one with a suffix; None if there is none."""
        application = self.app_id + suffix
        # delta-rs searches the log each time, for 5 ms if there is none
        return self._once(application, lambda: self.table.transaction_version(application))

    def record_commit(self, application: str, position: int, since: int) -> None:
        """Record that our commit set the `txn` of an application to a position; since: the version before it."""
        if self.version == since + 1:  # otherwise commits of others came between, which are not known
            self._looked_at, self._known = self.version, {application: int(position)}

    @property
    def complete(self) -> bool:
        """Whether a full copy has ended here."""
        return self._property(GENERATION) is not None

    @property
    def columns(self) -> pa.Schema:
        """The Arrow schema with field metadata."""
        return self._once("columns", lambda: pa.schema(self.table.schema().to_arrow()))

    def files(self) -> tuple[int, int]:
        """(number of live files, their bytes)."""
        return self._once("files", lambda: _counted(self.actions))

    @property
    def actions(self) -> pa.Table:
        """The live files: `path`, `size_bytes`, and the bounds of described columns, `min.<name>` and `max.<name>`."""
        return self._once("actions", lambda: pa.table(self.table.get_add_actions(flatten=True)))

    def _once(self, what: str, ask: Callable[[], _T]) -> _T:
        if self._looked_at != self.version:
            self._looked_at, self._known = self.version, {}
        if what not in self._known:
            self._known[what] = ask()
        return cast("_T", self._known[what])

    def commit(self, position: int, suffix: str = "") -> CommitProperties:
        """Commit properties that carry the `txn` of a range ending at position; suffix: as of `transaction`."""
        return CommitProperties(app_transactions=[Transaction(self.app_id + suffix, int(position))])

    @property
    def statistics_columns(self) -> tuple[str, ...]:
        """The columns with statistics of their files."""
        return tuple(filter(None, (self._property(STATISTICS) or "").split(",")))

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
        if self._property(GENERATION) != str(position):
            self._set_property(GENERATION, str(position))

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
            self._delete(self._of_part(condition), upto, suffix)

    def _delete(self, condition: str, upto: int, suffix: str) -> None:
        self.table.delete(condition, commit_properties=self.commit(upto, suffix))

    def evolve_columns(
        self,
        wanted: pa.Schema,
        changes: SchemaChanges,
        upto: int,
        *,
        replaced: bool,
        gone: frozenset[bytes] = frozenset(),
    ) -> None:
        """Evolve to the columns of `wanted` in one commit; columns that only the target has stay.

        upto: the end of the range. replaced, gone: as in schema_evolution.plan. Raises SchemaNotApplicable as that
        does, and when Delta refuses the change.
        """
        found = plan(self.columns, wanted, changes, replaced=replaced, gone=gone)
        if found.steps:
            self._change_columns(found, upto)
        # a rewrite before a crash may have removed a column that had statistics
        if not set(self.statistics_columns) <= set(self.columns.names):
            described = ",".join(described_columns(self.columns, self.statistics_columns))
            self._set_property(STATISTICS, described)

    def _change_columns(self, found: EvolutionPlan, upto: int) -> None:
        log.info("columns of a target change", target=self.uri, changes=list(found.steps))
        self._columns_known = None
        hit("delta_before_columns")
        try:
            if found.columns:
                self._rewrite(found.columns, upto)
            else:
                fields = Schema.from_arrow(pa.schema(found.added)).fields
                self.table.alter.add_columns(fields, commit_properties=self._columns_of(upto))
        except DeltaError as exc:
            # a conflicting commit, or a store that does not answer, is tried again
            if "not supported" in str(exc) or "not yet supported" in str(exc) or "append-only" in str(exc):
                raise SchemaNotApplicable(
                    f"target {self.uri!r} has table features that prevent changes of its columns: "
                    f"{'; '.join(found.steps)}"
                ) from exc
            raise
        hit("delta_after_columns")

    def _columns_of(self, upto: int) -> CommitProperties:
        """Commit properties of a change of columns: no retries, which would overwrite commits of others."""
        return CommitProperties(max_commit_retries=0, app_transactions=[Transaction(self.app_id + COLUMNS, upto)])

    def _rewrite(self, columns: Sequence[FilledColumn], upto: int) -> None:
        """Write the same rows in other columns, as a stream; readers of older versions are not affected."""
        held, schema = self.columns, pa.schema([column.field for column in columns])
        name_of = {column.held: column.field.name for column in columns if column.held is not None}
        # the scan starts here: inside the write the engine cannot start other work
        rows = pa.RecordBatchReader.from_stream(self.table.scan())
        write_deltalake(
            self.table,
            pa.RecordBatchReader.from_batches(schema, (evolved_batch(batch, held, columns) for batch in rows)),
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=[name_of[name] for name in self.table.metadata().partition_columns] or None,
            commit_properties=self._columns_of(upto),
        )
        self._reopen()

    def fill_defaults(self, defaults: Mapping[str, str], upto: int) -> None:
        """Set new columns to their defaults in rows at or below position `upto`: Delta column → SQL expression.

        Rows above it are of this range (from an attempt before a crash) and have their own values.
        """
        if defaults and self.files()[0]:
            updates = {f'"{name}"': expression for name, expression in defaults.items()}
            older = self._of_part(f"{POSITION_COLUMN} <= {int(upto)}")
            self.table.update(updates=updates, predicate=older, commit_properties=self.signed_commit)
            hit("delta_after_refill")

    def _of_part(self, condition: str) -> str:
        return condition if self.part is None else f"{RELATION_COLUMN} = {int(self.part)} AND ({condition})"

    def _set_property(self, name: str, value: str) -> None:
        self.table.alter.set_table_properties({name: value}, raise_if_not_exists=False)

    def _property(self, name: str) -> str | None:
        found = self.table.metadata().configuration.get(name)
        return None if found is None else str(found)


def _counted(actions: pa.Table) -> tuple[int, int]:
    return actions.num_rows, pc.sum(actions["size_bytes"]).as_py() or 0


def described_columns(columns: pa.Schema, first: Sequence[str]) -> list[str]:
    """The columns whose files get statistics: position and ordinal first, then those of `first`.

    No lists, which have no bounds. No float columns: delta-rs leaves NaN out of the statistics, and Spark's `> 100`
    would then skip files that hold NaN. No names that need quoting: the two writers parse the property differently.
    """
    # without bounds of these a merge into versions would open the files of all old versions
    spans = [name for name in (START_COLUMN, END_COLUMN) if name in columns.names]
    ordered = dict.fromkeys([POSITION_COLUMN, ORDINAL_COLUMN, *first, *spans, *columns.names])
    chosen = [
        name
        for name in ordered
        if name in (POSITION_COLUMN, ORDINAL_COLUMN, *spans)
        or (name in columns.names and _PLAIN_NAME.match(name) and not _boundless(columns.field(name).type))
    ]
    return chosen[:MAX_STATISTICS]


def _boundless(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_nested(kind)
