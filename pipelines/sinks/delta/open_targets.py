"""Open targets: the Delta tables that a driver has open, found or created by the rule of their table.

A target is checked each time a batch needs it: it belongs to this log, to this table, and was made under the rules of
now. Tables that share a target are written one after the other, under one lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

from cdc.errors import TargetUnusable
from cdc.table import TableSchema
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.sinks.delta.published import LastPublished
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.shared import SharedTarget, part_of
from pipelines.sinks.delta.table import ERASED, DeltaTarget
from pipelines.sinks.delta.table_features import translate_refusals
from pipelines.sinks.delta.table_layout import TableLayout
from pipelines.sinks.delta.table_plan import TablePlans, check_kept, check_named, with_selected_columns
from pipelines.sinks.delta.versions import all_columns
from pipelines.sinks.delta.writers import Writers


class OpenTargets:
    """The targets of one sink; a thread uses the target of a table while it has the table's lock."""

    def __init__(self, settings: DeltaSettings, plans: TablePlans, writers: Writers, published: LastPublished) -> None:
        self.log_id = ""
        self.by_uri: dict[str, DeltaTarget] = {}
        """A target that tables share is here as a whole."""
        self._settings, self._plans, self._writers, self._published = settings, plans, writers, published
        self._locks: dict[str, RLock] = {}
        """By URI."""
        self._erased: dict[int, int] = {}
        """By relation."""

    def shape(self, schema: TableSchema) -> RowShape:
        """The columns and types of a table's target; raises as TablePlans.of and selected do."""
        kept = with_selected_columns(schema, self._settings.of(schema.topic))
        return self._plans.of(kept, self._settings.types_of(schema.topic))

    @contextmanager
    def lock(self, schema: TableSchema) -> Iterator[None]:
        """Inside the block no other thread merges into the target of this table."""
        with self._locks.setdefault(self._uri(schema), RLock()):
            yield

    @contextmanager
    def writing(self, schema: TableSchema) -> Iterator[None]:
        """As lock; raises TargetUnusable where the protocol of the target makes a reader or writer refuse it."""
        with self.lock(schema), translate_refusals(self._settings.uri_of(schema)):
            yield

    def open(self, schema: TableSchema) -> DeltaTarget:
        """The target of a table at its newest version, created if there is none.

        Raises TargetUnusable, SchemaNotApplicable, TransformFailed or TargetRulesChanged where it cannot be used.
        """
        uri, shape = self._uri(schema), self.shape(schema)
        layout = replace(self._plans.layout(shape), history_mode=self._settings.of(schema.topic).history_mode)
        target = self.by_uri.get(uri)
        self._plans.claim_path(uri, schema)
        if target is None:
            target = DeltaTarget.open(uri) or self._create(uri, schema, layout)
        else:
            target.refresh()
        if layout.merged:
            return self._part(target, schema, layout)
        target.check_identity(self.log_id, schema)
        target.check_layout(layout)
        self.by_uri[uri] = target
        return self._writers.writable(target, layout)

    def erased_upto(self, target: DeltaTarget, relation: int) -> int:
        """The end of the range whose truncate or copy last deleted rows, while later rows may be missing; 0: none."""
        # the log is read once: later erasures are this driver's own
        if relation not in self._erased:
            self._erased[relation] = target.transaction(ERASED) or 0
        return self._erased[relation]

    def record_erasure(self, relation: int, upto: int) -> None:
        """Note that a range ending at upto deletes rows of a table before it merges."""
        self._erased[relation] = upto

    def close(self) -> None:
        """Forget all targets."""
        self.by_uri.clear()
        self._erased.clear()

    def _uri(self, schema: TableSchema) -> str:
        """The path that the rule says, or the one where the table had its target before it was renamed.

        Only a replay moves a target.
        """
        named, known = self._settings.uri_of(schema), self._published.records.get(schema.relation)
        if known is None or known.target in {"", named}:
            return named
        for uri in (named, known.target):
            whole = self.by_uri.get(uri) or DeltaTarget.open(uri)
            if whole is not None and part_of(whole, schema.relation).relation == schema.relation:
                return uri
        return named

    def _part(self, whole: DeltaTarget, schema: TableSchema, layout: TableLayout) -> SharedTarget:
        """A table's part of a shared target; a new table is added to the target."""
        whole.check_log(self.log_id)
        whole.check_layout(layout)
        self.by_uri[whole.uri] = self._writers.writable(whole, layout)
        target = SharedTarget(whole, schema.relation)
        if target.relation is None:
            self._check_new(schema)
            check_named(schema, self._settings.rules)
        target.add_table(schema, self.shape(schema).columns)
        return target

    def _create(self, uri: str, schema: TableSchema, layout: TableLayout) -> DeltaTarget:
        self._check_new(schema)
        check_named(schema, self._settings.rules)
        check_kept(schema, layout.history_mode)
        shape = self.shape(schema)
        columns = all_columns(shape.columns, layout.history_mode)
        return DeltaTarget.create(uri, self.log_id, shape.schema, columns, layout)

    def _check_new(self, schema: TableSchema) -> None:
        """Raise TargetUnusable for a table that had a target: the log from here on does not have all of its rows."""
        known = self._published.records.get(schema.relation)
        if known is not None and known.version is not None:
            raise TargetUnusable(
                f"the rows of table {schema.topic!r} are no longer at {known.target!r}",
                remedy="restore the files and start again, or rebuild the table: 'cdc replay SINK --tables TABLE'",
            )
