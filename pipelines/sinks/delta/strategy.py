"""Keeping strategies: how a Delta sink applies a batch to the target of one table.

A table's settings choose the strategy: pipelines.sinks.delta.latest keeps the latest state of each row,
pipelines.sinks.delta.history keeps versions, marked rows or every change. Both open the target, check its columns,
merge, and record the position that the target has afterwards; TableStrategy does what they share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

from cdc.config import SchemaChanges
from cdc.stores.published import TableRecord
from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.schema_evolution import (
    check_left_out,
    ids_only_in,
    with_earlier_names,
    with_target_types,
)
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.versions import all_columns
from pipelines.sinks.delta.writer_choice import rewritten_bytes
from pipelines.sinks.table_state import applied_state


class KeepingStrategy(Protocol):
    """How the targets of some tables are kept; called with the lock of the table."""

    def apply(self, batch: TableBatch) -> TableRecord:
        """Merge a batch into its target, once; raises CommitFailedError where another commit came first."""

    def refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See pipelines.sinks.contract.ParkingSink.find_refused."""

    def rows_upto(self, target: DeltaTarget) -> int:
        """The position up to which the rows of a table are in its target."""


class TableStrategy(ABC):
    """The steps that all strategies share."""

    replaced_by_copy: bool
    """Whether a full copy replaces every row of the target."""

    def __init__(self, parts: DeltaSinkParts) -> None:
        self._parts = parts
        self._settings, self._targets, self._published = parts.settings, parts.targets, parts.published

    def apply(self, batch: TableBatch) -> TableRecord:
        """See KeepingStrategy.apply; an attempt begins with what the target says of itself now."""
        schema, commits = batch.schema, self._parts.external_commits
        target = self._targets.open(schema)
        if schema.relation not in self._published.records:
            self._shorten_columns(target, batch)
        commits.before(target, schema.topic, self._published.versions.get(target.uri))
        if (target.applied or -1) < batch.upto:
            files = target.actions
            self._check_columns(target, batch)
            self._merge(target, self._in_target_columns(target, batch))
            self._parts.commit_rate.add_rewritten(schema.topic, rewritten_bytes(files, target.actions))
            commits.after(target, schema.topic)
        # a crash may have left it further than upto; then it does not belong to the cut at upto
        reached = max(self.rows_upto(target), self._targets.erased_upto(target, schema.relation))
        return table_record(batch, target, max(batch.upto, reached), self._published.records.get(schema.relation))

    @abstractmethod
    def rows_upto(self, target: DeltaTarget) -> int:
        """See KeepingStrategy.rows_upto."""

    @abstractmethod
    def _merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Evolve the target's columns and merge a batch that has them; the last commit carries its `txn`."""

    def _shorten_columns(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Remove columns of later ranges from a target without rows, which an attempt before a crash created."""
        if target.is_untouched:
            shape, keeping = self._targets.shape(batch.schema), self._settings.of(batch.schema.topic).history_mode
            columns = all_columns(shape.columns, keeping)
            later = ids_only_in(target.columns, columns)
            target.evolve_columns(columns, SchemaChanges.EVOLVE, batch.upto, replaced=True, gone=later)

    def _check_columns(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Raise SchemaNotApplicable for a change that needs a full copy; record by which columns rows are found."""
        self._parts.rules.check_left_out(target.uri, target.columns, batch.schema)
        before = self._published.schema_of(batch.schema.relation)
        target.set_key(batch.schema, before, replaced=batch.ends_copy)
        ignored = self._settings.of(batch.schema.topic).schema_changes is SchemaChanges.IGNORE
        replaced = batch.ends_copy and self.replaced_by_copy
        if not ignored and not replaced and target.columns_changed_upto <= batch.upto:
            check_left_out(self._targets.shape(batch.schema).schema, before, target.columns)

    def _in_target_columns(self, target: DeltaTarget, batch: TableBatch) -> TableBatch:
        """The batch with the columns and types that its rows have in this target; a transform names its own."""
        shape = self._targets.shape(batch.schema)
        # whether it has the columns of a longer range already, from before a crash
        ahead = target.columns_changed_upto > batch.upto
        if shape.transform is not None:
            rule = shape.transform.rule
            if not ahead or rule.python is not None:
                return batch
            return replace(batch, schema=with_earlier_names(batch.schema, rule, target.columns, shape.policy))
        changes = SchemaChanges.IGNORE if ahead else self._settings.of(batch.schema.topic).schema_changes
        return replace(batch, schema=with_target_types(batch.schema, target.columns, changes, shape.policy))


def table_record(batch: TableBatch, target: DeltaTarget, position: int, before: TableRecord | None) -> TableRecord:
    """The record of a table whose batch is in its target; before: the record that was published last."""
    schema = batch.schema
    return TableRecord(
        relation=schema.relation,
        topic=schema.topic,
        target=target.uri,
        position=position,
        version=target.version,
        state=applied_state(batch, before, complete=target.complete).value,
        reason=None,
        schema=schema.to_json().decode(),
    )
