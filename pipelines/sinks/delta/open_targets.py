"""Open targets: opens or creates the Delta target of a table, by the rule of the table, and keeps it open.

For each batch, it checks that the target belongs to this log and to this table, and that the rows of the target were
written under the current rules. Tables that share a target are written one after the other, under one lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

from deltalake import DeltaTable

from cdc.config import SchemaChanges, rule_of
from cdc.config.sink_rules import check_named, with_selected_columns
from cdc.errors import TargetRulesChanged, TargetUnusable
from cdc.table import TableSchema
from cdc.targets.hidden_columns import check_hidden, newly_hidden
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.damage_errors import reading
from pipelines.sinks.delta.damaged_commits import remove_damaged_commits
from pipelines.sinks.delta.delta_target import ERASED, DeltaTarget
from pipelines.sinks.delta.published_cuts_table import LastPublished
from pipelines.sinks.delta.schema_evolution import (
    ColumnChange,
    check_left_out,
    ids_only_in,
    with_earlier_names,
    with_target_types,
)
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.target_columns import (
    RowShape,
    TablePlans,
    check_history_mode,
)
from pipelines.sinks.delta.target_layout import NewTarget, TargetLayout
from pipelines.sinks.delta.writers import Writers


class OpenTargets:
    """The targets of one sink. A thread uses the target of a table only while it has the table's lock."""

    def __init__(self, settings: DeltaSettings, plans: TablePlans, writers: Writers, published: LastPublished) -> None:
        self.log_id = ""
        self.by_uri: dict[str, DeltaTarget] = {}
        """URI → open target; a target that several tables share is one entry."""
        self._settings, self._plans, self._writers, self._published = settings, plans, writers, published
        self._locks: dict[str, RLock] = {}
        """URI of a target → the lock for writing to it."""
        self._erased: dict[int, int] = {}
        """Relation → cached result of `erased_upto`."""
        self._layouts: dict[TableSchema, TargetLayout] = {}
        """Cached results of `_layout`."""

    def shape(self, schema: TableSchema) -> RowShape:
        """Return the columns and types of a table's target.

        Raises SchemaNotApplicable if a key column is not selected, and TransformFailed for a transform that does not
        fit the table. Raises HiddenColumnRenamed if the rule would show a column that it hid under another name. Raises
        SparkAwaited if the rule has expressions and Spark has not started.
        """
        check_hidden(schema, self._settings.column_rules)
        selected = with_selected_columns(schema, self._settings.of(schema.topic))
        return self._plans.of(selected, self._settings.types_of(schema.topic))

    @contextmanager
    def lock(self, schema: TableSchema) -> Iterator[None]:
        """Lock the target of this table, so that no other thread merges into it during the block."""
        with self._locks.setdefault(self._uri(schema), RLock()):
            yield

    @contextmanager
    def writing(self, schema: TableSchema) -> Iterator[None]:
        """Lock the target as `lock` does; raises TargetUnusable if delta-rs or Spark refuses its table features.

        Raises TargetDamaged if files of the target are damaged or missing.
        """
        with self.lock(schema), reading(self._settings.uri_of(schema)):
            yield

    def open_for(self, batch: TableBatch) -> DeltaTarget:
        """Open or create the target of the batch's table, as `open` does.

        An attempt before a crash may have created the target for a longer range of the log. Columns that only the
        longer range has are then removed.
        """
        if batch.schema.relation in self._published.records:
            return self.open(batch.schema, batch.generation)
        is_opened_now = self._uri(batch.schema) not in self.by_uri
        target = self.open(batch.schema, batch.generation)
        is_created_now = is_opened_now and target.first_commit is not None
        if not is_created_now and target.is_untouched:
            shape, mode = self.shape(batch.schema), self._settings.of(batch.schema.topic).history_mode
            columns = shape.columns_in_mode(mode)
            later = ids_only_in(target.columns, columns)
            change = ColumnChange(columns, SchemaChanges.EVOLVE, replaced=True, topic=batch.schema.topic, dropped=later)
            target.evolve_columns(change, batch.upto)
        return target

    def existing(self, schema: TableSchema) -> DeltaTarget | None:
        """Return the target of a table as `open` does; None if it does not exist, or is not a Delta table."""
        uri = self._uri(schema)
        return self.open(schema) if uri in self.by_uri or DeltaTable.is_deltatable(uri) else None

    def open(self, schema: TableSchema, generation: int | None = None) -> DeltaTarget:
        """Return the target of a table at its newest version; create it if it does not exist.

        generation: as in NewTarget. Raises TargetUnusable, SchemaNotApplicable, TransformFailed or TargetRulesChanged
        if it cannot be used.
        """
        uri, layout = self._uri(schema), self._layout(schema)
        target = self.by_uri.get(uri)
        self._plans.claim_path(uri, schema)
        if target is None:
            remove_damaged_commits(uri, self._published.versions.get(uri, -1))
            target = DeltaTarget.open(uri) or self._create(uri, schema, layout, generation)
        else:
            target.refresh()
        if layout.is_shared:
            return self._shared_part(target, schema, layout)
        target.check_identity(self.log_id, schema)
        if uri not in self.by_uri:
            # it may have been replaced since the sink was opened, which compares all targets with the published cut
            target.current.check_published(self._published.versions.get(uri, -1))
        target.check_layout(layout)
        self.by_uri[uri] = target
        return self._writers.writable(target, layout)

    def _layout(self, schema: TableSchema) -> TargetLayout:
        if schema not in self._layouts:
            self._layouts[schema] = replace(
                self._plans.layout(self.shape(schema)),
                history_mode=self._settings.of(schema.topic).history_mode,
                has_vectors=self._settings.has_vectors(schema.topic),
            )
        return self._layouts[schema]

    def check_columns(self, target: DeltaTarget, batch: TableBatch, *, replaced: bool) -> None:
        """Check the columns of the target against those of the batch, and record the key columns in the target.

        replaced: the batch ends a full copy that replaces every row. Raises SchemaNotApplicable for a schema change
        that needs a full copy. Raises TargetRulesChanged if the target has a column that the rules leave out.
        """
        settings = self._settings.of(batch.schema.topic)
        if settings.column_list or settings.except_column_list:
            self._settings.target_rules.check_left_out(target.uri, target.columns, batch.schema)
        before = self._published.schema_of(batch.schema.relation)
        if before is not None and not replaced and before != batch.schema:
            self._check_newly_hidden(target, batch.schema, before)
        target.set_key(batch.schema, before, replaced=batch.ends_copy)
        ignored = settings.schema_changes is SchemaChanges.IGNORE
        if not ignored and not replaced and target.columns_changed_upto <= batch.upto:
            checked = target.current.contents.checked_columns
            if (batch.schema, before) not in checked:
                check_left_out(self.shape(batch.schema).schema, before, target.columns)
                checked.add((batch.schema, before))

    def _check_newly_hidden(self, target: DeltaTarget, schema: TableSchema, before: TableSchema) -> None:
        """Raise TargetRulesChanged if a column got a name that the rule masks: its older rows show its values."""
        name = newly_hidden(before, schema, self._settings.column_rules)
        if name is not None:
            raise TargetRulesChanged(
                f"column {name!r} of table {schema.topic!r} got a name that its rule masks, and rows of target "
                f"{target.uri!r} show its values"
            )

    def in_target_columns(self, target: DeltaTarget, batch: TableBatch) -> TableBatch:
        """Return the batch with its schema adapted to the columns of the target and to their types."""
        shape = self.shape(batch.schema)
        # an attempt before a crash may have given the target the columns of a longer range
        ahead = target.columns_changed_upto > batch.upto
        if shape.transform is not None:
            rule = shape.transform.rule
            if not ahead or rule.python is not None:
                return batch
            return replace(batch, schema=with_earlier_names(batch.schema, rule, target.columns, shape.policy))
        changes = SchemaChanges.IGNORE if ahead else self._settings.of(batch.schema.topic).schema_changes
        adapted = target.current.contents.adapted_schemas
        if (batch.schema, changes) not in adapted:
            adapted[batch.schema, changes] = with_target_types(batch.schema, target.columns, changes, shape.policy)
        return replace(batch, schema=adapted[batch.schema, changes])

    def erased_upto(self, target: DeltaTarget, relation: int) -> int:
        """Return the end of the last batch in which a truncate or a finished copy deleted rows of this table.

        Returns 0 if there was no such batch. After a crash, the target may not have the new rows of that batch yet.
        """
        # the target's `txn` is read once: later erasures are this driver's own
        if relation not in self._erased:
            self._erased[relation] = target.transaction(ERASED) or 0
        return self._erased[relation]

    def record_erasure(self, relation: int, upto: int) -> None:
        """Record that the batch ending at `upto` first deletes rows of this table, and then merges its own rows."""
        self._erased[relation] = upto

    def close(self) -> None:
        """Remove all targets from this object; nothing is written."""
        self.by_uri.clear()
        self._erased.clear()

    def _uri(self, schema: TableSchema) -> str:
        """Return the URI of the table's target.

        The path comes from the rule. If the target was created under another table name, it keeps its earlier path.
        """
        named, known = self._settings.uri_of(schema), self._published.records.get(schema.relation)
        if known is None or known.target in {"", named}:
            return named
        for uri in (named, known.target):
            whole = self.by_uri.get(uri) or DeltaTarget.open(uri)
            if whole is not None and whole.part_of(schema.relation).relation == schema.relation:
                return uri
        return named

    def _shared_part(self, whole: DeltaTarget, schema: TableSchema, layout: TargetLayout) -> DeltaTarget:
        """Return a DeltaTarget for the rows of one table in the shared target `whole`; add the table if it is new."""
        whole.check_log(self.log_id)
        whole.check_layout(layout)
        self.by_uri[whole.uri] = self._writers.writable(whole, layout)
        target = whole.part_of(schema.relation)
        if target.relation is None:
            self._check_new(schema)
            check_named(schema, rule_of(schema.topic, self._settings.rules))
        target.add_table(schema, self.shape(schema).columns)
        return target

    def _create(self, uri: str, schema: TableSchema, layout: TargetLayout, generation: int | None) -> DeltaTarget:
        self._check_new(schema)
        check_named(schema, rule_of(schema.topic, self._settings.rules))
        check_history_mode(schema, layout.history_mode)
        shape = self.shape(schema)
        columns = shape.columns_in_mode(layout.history_mode)
        return DeltaTarget.create(uri, self.log_id, NewTarget(shape.schema, columns, layout, generation))

    def _check_new(self, schema: TableSchema) -> None:
        """Raise TargetUnusable if the last published record names a target of the table.

        Called only if no target was found, so a target in the record is lost.
        """
        known = self._published.records.get(schema.relation)
        if known is not None and known.version is not None:
            raise TargetUnusable(
                f"target {known.target!r} of table {schema.topic!r} no longer exists",
                remedy="restore the files and restart the apply process, or rebuild: 'cdc replay SINK --tables TABLE'",
            )
