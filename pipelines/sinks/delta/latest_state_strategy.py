"""Latest-state strategy: keeps one row per key in a target, with the same values as the source row.

A batch is merged in these steps:

1. Read the base rows of partial images from the version of the target before the range.
2. Change the columns of the target.
3. Make the rows to merge.
4. Delete the rows that truncates and finished full copies remove.
5. Merge.

Only the last commit contains the `txn` of the range: that of step 5, or of step 4 if there is nothing to merge. All
other steps can be repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.failpoint import hit
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_parts import FoldedParts
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.sinks.contract import RefusedParts, RefusedRow, TableBatch
from pipelines.sinks.delta.column_defaults import new_defaults
from pipelines.sinks.delta.dead_letters import refused_rows
from pipelines.sinks.delta.delta_target import ERASED, DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_files import takes_files
from pipelines.sinks.delta.executor_keyless import KeylessMerge
from pipelines.sinks.delta.executor_merge import ExecutorMerge
from pipelines.sinks.delta.executor_refusals import find_refused
from pipelines.sinks.delta.executor_upsert import ExecutorUpsert, upsertable_files, writable_files
from pipelines.sinks.delta.merge_source import BaseLookup, frame_source, keyless_source, table_source
from pipelines.sinks.delta.schema_evolution import ColumnChange, columns_to_drop
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from pipelines.sinks.delta.target_columns import RowShape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class LatestState:
    """Keeps one row per key; its methods follow the contract pipelines.sinks.delta.sink.MergeStrategy."""

    replaced_by_copy = True

    def __init__(self, parts: DeltaSinkParts) -> None:
        self._settings, self._plans, self._writers = parts.settings, parts.plans, parts.writers
        self._targets, self._published = parts.targets, parts.published

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """See MergeStrategy.merge."""
        shape = self._targets.shape(batch.schema)
        bases = self._bases(target, batch)
        self._evolve(target, batch, shape)
        if batch.parts is not None and not batch.schema.key:
            self._merge_keyless(target, batch, batch.parts)
            return
        executors = None if batch.parts is None else ExecutorMerge(target, batch.parts, shape, bases)
        own_rows = self._source(target, batch, bases)
        source = own_rows if executors is None else executors.source(own_rows)
        has_rows = not isinstance(source, pa.Table) or source.num_rows > 0
        writer = self._writers.choose(target, batch, source, shape.key) if has_rows else None
        self._erase(target, batch, has_rows=writer is not None)
        if writer is not None:
            marker = TxnMarker(target.app_id, batch.upto)
            if executors is not None and not (batch.rows and batch.rows.num_rows) and executors.can_write_files():
                with executors.raising_errors():
                    executors.write_files(marker)
            elif executors is not None and (upsert := ExecutorUpsert.of(executors, batch.after)) is not None:
                with executors.raising_errors():
                    upsert.write(own_rows, marker)
            else:
                with raising_task_errors() if executors is None else executors.raising_errors():
                    self._writers.merge(target, source, shape.key, marker, writer)
        hit("delta_after_merge")

    def needs_spark(self, target: DeltaTarget, batch: TableBatch, parts: FoldedParts) -> bool:
        """See MergeStrategy.needs_spark."""
        if not batch.schema.key:
            return not takes_files(target) or writable_files(target) is None
        shape = self._targets.shape(batch.schema)
        if parts.table.incomplete and not {*shape.image_columns.names}.isdisjoint(target.metadata.partition_columns):
            return True
        return upsertable_files(target, shape, batch.after) is None

    def _merge_keyless(self, target: DeltaTarget, batch: TableBatch, parts: FoldedParts) -> None:
        """Merge the rows that the executors have of a table without a key."""
        applied = target.applied or 0
        unmerged = parts.after(applied) if applied > batch.after else parts
        is_lenient = self._is_lenient(target, batch)
        merge = KeylessMerge(target, unmerged, self._targets.shape(batch.schema), batch.truncated, is_lenient)
        try:
            merge.find_deletes()
            self._erase(target, batch, has_rows=unmerged.table.rows > 0)
            if unmerged.table.rows:
                merge.write(TxnMarker(target.app_id, batch.upto), self._writers)
        finally:
            merge.release()
        hit("delta_after_merge")

    def _erase(self, target: DeltaTarget, batch: TableBatch, *, has_rows: bool) -> None:
        """Delete the rows that truncates and finished full copies remove. has_rows: whether the batch merges rows."""
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        if has_rows and (batch.truncated is not None or batch.generation is not None):
            self._targets.record_erasure(batch.schema.relation, batch.upto)
        target.erase(batch.truncated, batch.generation, batch.upto, ERASED if has_rows else "")
        hit("delta_before_merge")

    def _is_lenient(self, target: DeltaTarget, batch: TableBatch) -> bool:
        """Return whether a row that a batch of a table without a key deletes may be missing in the target.

        That is so during a copy, and after a crash between the deletions of a batch and its merge.
        """
        return batch.is_copying or self._targets.erased_upto(target, batch.schema.relation) > (target.applied or 0)

    def rows_upto(self, target: DeltaTarget) -> int:
        """See MergeStrategy.rows_upto."""
        return target.applied or 0

    def find_refused(self, target: DeltaTarget, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See MergeStrategy.find_refused."""
        if batch.rows is None:
            return []
        shape, plans = self._targets.shape(batch.schema), self._plans
        images, bases = plans.apply_filter(batch.rows, shape), self._bases(target, batch)
        return refused_rows(images, bases, shape, limit, plans.check_partitions)

    def find_refused_in_parts(self, target: DeltaTarget, batch: TableBatch, limit: int) -> RefusedParts:
        """See pipelines.sinks.contract.ExecutorSink.find_refused_in_parts."""
        if batch.parts is None:
            return RefusedParts(FOLDED_ARROW.empty_table(), is_complete=True)
        shape = self._targets.shape(batch.schema)
        return find_refused(ExecutorMerge(target, batch.parts, shape, self._bases(target, batch)), limit)

    def _bases(self, target: DeltaTarget, batch: TableBatch) -> BaseLookup:
        """Return the lookup that finds base rows for the batch, in the target as it was before the batch's range.

        If an earlier attempt already merged part of the range, this is usually an older version of the target.
        """
        return replace(self._target_before(target, batch), truncated=batch.truncated)

    def _target_before(self, target: DeltaTarget, batch: TableBatch) -> BaseLookup:
        start, relation = self._published.range_start(batch.after), batch.schema.relation
        part = target.part.relation
        if max(target.applied or 0, self._targets.erased_upto(target, relation)) <= start:
            finder = None
            if self._settings.uses_index(batch.schema):
                finder = self._writers.indexed.row_finder(target, self._targets.shape(batch.schema).key)
            return BaseLookup(lambda: target.table, relation=part, read_rows=target.read_rows, find_rows=finder)
        known = self._published.records.get(relation)
        if known is None or known.version is None:
            return BaseLookup(None)
        if known.position <= start:
            older = DeltaTable(target.uri, version=self._published.versions[known.target])
            return BaseLookup(lambda: older, relation=part, read_rows=target.read_rows)
        return BaseLookup(lambda: DeltaTable(target.uri), exact=False, relation=part, read_rows=target.read_rows)

    def _evolve(self, target: DeltaTarget, batch: TableBatch, shape: RowShape) -> None:
        """Change the target's columns to those of the batch, and set new columns to their defaults in older rows."""
        known = self._published.schema_of(batch.schema.relation)
        if target.columns_changed_upto <= batch.upto:
            settings = self._settings.of(batch.schema.topic)
            dropped = columns_to_drop(settings.dropped_columns, target.columns, batch.schema, known)
            replaced = target.is_replaced_by(batch)
            change = ColumnChange(
                shape.columns,
                settings.schema_changes,
                replaced=replaced,
                topic=batch.schema.topic,
                dropped=dropped,
            )
            target.evolve_columns(change, batch.upto)
        if known is not None:  # a table that was never published has only rows of this range
            target.fill_defaults(new_defaults(shape, known.columns), self._published.range_start(batch.after))

    def _source(self, target: DeltaTarget, batch: TableBatch, bases: BaseLookup) -> pa.Table | DataFrame:
        """Return the rows to merge: a Spark frame if the batch is a frame and Spark can write the target, otherwise an
        Arrow table.
        """
        shape, plans = self._targets.shape(batch.schema), self._plans
        if batch.frame is not None and self._writers.by_spark and batch.schema.key:
            return shape.finished_frame(
                frame_source(batch.frame, bases, shape, lambda images: plans.apply_filter(images, shape))
            )
        images = batch.rows if batch.frame is None else batch.frame.toArrow()
        if images is None:
            return plans.finish_source(shape.source.empty_table(), shape)
        if batch.schema.key:
            return plans.finish_source(table_source(plans.apply_filter(images, shape), bases, shape), shape)
        # an earlier attempt may have merged some of the range: its rows must not be added or deleted twice
        applied = target.applied or 0
        unmerged = images.filter(pc.greater(images["position"], applied))
        lenient = self._is_lenient(target, batch)
        return plans.finish_source(
            keyless_source(unmerged, target.table, shape, batch.truncated, lenient=lenient), shape
        )
