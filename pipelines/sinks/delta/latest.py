"""Latest state: the strategy of targets that have one row per key, the row as it is at the source.

Steps of a batch: evolve the columns, read the base rows of partial images, erase the rows that truncates and finished
copies ended, merge. Only the last commit carries the `txn` of the range: the merge, or the erasure where there is
nothing to merge. All others can be repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.failpoint import hit
from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.base_lookup import BaseLookup, frame_source, table_source
from pipelines.sinks.delta.column_defaults import new_defaults
from pipelines.sinks.delta.dead_letters import refused_states
from pipelines.sinks.delta.keyless_merge import keyless_source
from pipelines.sinks.delta.merge import TxnMarker
from pipelines.sinks.delta.schema_evolution import columns_to_drop
from pipelines.sinks.delta.strategy import TableStrategy
from pipelines.sinks.delta.table import ERASED, DeltaTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class LatestState(TableStrategy):
    """The contract is pipelines.sinks.delta.strategy.KeepingStrategy."""

    replaced_by_copy = True

    def rows_upto(self, target: DeltaTarget) -> int:
        """See KeepingStrategy.rows_upto."""
        return target.applied or 0

    def refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See KeepingStrategy.refused."""
        target = self._targets.open(batch.schema)
        if batch.rows is None:
            return []
        before = replace(self._base_lookup(target, batch), truncated=batch.truncated)
        shape = self._targets.shape(self._in_target_columns(target, batch).schema)
        return refused_states(self._parts.plans.apply_filter(batch.rows, shape), before, shape, limit)

    def _merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        shape, relation = self._targets.shape(batch.schema), batch.schema.relation
        before = replace(self._base_lookup(target, batch), truncated=batch.truncated)
        self._evolve(target, batch)
        source, writers = self._source(target, batch, before), self._parts.writers
        merges = not isinstance(source, pa.Table) or source.num_rows > 0
        choice = writers.choice(target, batch, source, shape.key) if merges else None
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        if choice is not None and (batch.truncated is not None or batch.generation is not None):
            self._targets.record_erasure(relation, batch.upto)
        target.erase(batch.truncated, batch.generation, batch.upto, "" if choice is None else ERASED)
        hit("delta_before_merge")
        if choice is not None:
            writers.merge(target, source, shape.key, TxnMarker(target.app_id, batch.upto), choice)
        hit("delta_after_merge")

    def _evolve(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Give the target the columns of the batch, and older rows the defaults of new columns."""
        shape, known = self._targets.shape(batch.schema), self._published.schema_of(batch.schema.relation)
        if target.columns_changed_upto <= batch.upto:
            settings = self._settings.of(batch.schema.topic)
            gone = columns_to_drop(settings.dropped_columns, target.columns, batch.schema, known)
            replaced = target.is_replaced_by(batch)
            target.evolve_columns(shape.columns, settings.schema_changes, batch.upto, replaced=replaced, gone=gone)
        if known is not None:  # else every row is of this range
            target.fill_defaults(new_defaults(shape, known.columns), self._published.range_start(batch.after))

    def _base_lookup(self, target: DeltaTarget, batch: TableBatch) -> BaseLookup:
        """The target as it was before the range, also when an earlier attempt went further."""
        start, relation = self._published.range_start(batch.after), batch.schema.relation
        if max(target.applied or 0, self._targets.erased_upto(target, relation)) <= start:
            return BaseLookup(target.table, part=target.part, reads=target.reads)
        known = self._published.records.get(relation)
        if known is None or known.version is None:
            return BaseLookup(None)
        if known.position <= start:
            older = DeltaTable(target.uri, version=self._published.versions[known.target])
            return BaseLookup(older, part=target.part, reads=target.reads)
        return BaseLookup(DeltaTable(target.uri), exact=False, part=target.part, reads=target.reads)

    def _source(self, target: DeltaTarget, batch: TableBatch, before: BaseLookup) -> pa.Table | DataFrame:
        """The rows to merge, a frame where the batch is one and Spark writes."""
        shape, plans = self._targets.shape(batch.schema), self._parts.plans
        if batch.frame is not None and self._parts.writers.by_spark and batch.schema.key:
            return shape.finished_frame(
                frame_source(batch.frame, before, shape, lambda images: plans.apply_filter(images, shape))
            )
        images = batch.rows if batch.frame is None else batch.frame.toArrow()
        if images is None:
            return plans.finish_source(shape.source.empty_table(), shape)
        if batch.schema.key:
            return plans.finish_source(table_source(plans.apply_filter(images, shape), before, shape), shape)
        # an earlier attempt may have gone into the range: its rows must not be added or deleted twice
        applied = target.applied or 0
        behind = images.filter(pc.greater(images["position"], applied))
        # a row to delete may be missing while its table is copied, or where a crash left the target erased
        lenient = batch.is_copying or self._targets.erased_upto(target, batch.schema.relation) > applied
        made = keyless_source(behind, target.table, shape, batch.truncated, lenient=lenient)
        return plans.finish_source(made, shape)
