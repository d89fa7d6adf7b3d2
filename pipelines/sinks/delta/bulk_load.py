"""Bulk load: writes all rows of a source table into its empty target, with Spark or from files that executors wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cdc.table import TableSchema
from cdc.targets.published_record import TableRecord
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.new_data_files import DataFile, TargetFolder
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from pipelines.sinks.delta.spark_target import ONE_SPARK_WRITE
from pipelines.sinks.delta.target_columns import OP, RowShape
from pipelines.sinks.delta.writers import merge_with_spark
from pipelines.transform.expressions import raising_transform_failed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class BulkLoad:
    """Fills empty targets of one open sink."""

    def __init__(self, parts: DeltaSinkParts, record: Callable[[TableBatch, DeltaTarget, int], TableRecord]) -> None:
        """record: returns the record of a table after a batch, from the batch, its target and the end of the batch."""
        self._settings, self._targets, self._record = parts.settings, parts.targets, record
        self.merges_frames = parts.writers.by_spark
        """Whether Spark writes the targets, and the sink so takes the folded rows of a table as a frame."""

    def shape(self, schema: TableSchema) -> RowShape:
        """Return the plan for the rows of a table."""
        return self._targets.shape(schema)

    def takes_images(self, schema: TableSchema) -> bool:
        """Return whether the rows of the target can be made from the images alone, without a fold."""
        return not self._targets.shape(schema).needs_complete_rows

    def fill(self, batch: TableBatch, rows: DataFrame) -> TableRecord:
        """Write all rows of a source table with Spark; return the table's record.

        rows: each row of the table once, with the target's columns except computed ones. The Spark session must support
        Delta. An error while the frame is read is raised, and the target is then still empty.
        """
        target, shape = self._targets.open(batch.schema), self._targets.shape(batch.schema)
        source = shape.finished_frame(rows.selectExpr("*", f"'u' AS {OP}"))
        with ONE_SPARK_WRITE, raising_transform_failed(batch.schema.topic):
            merge_with_spark(target, source, shape.key, TxnMarker(target.app_id, batch.upto))
        return self._complete(batch, target)

    def folder(self, schema: TableSchema) -> TargetFolder | None:
        """Return the directory in which executors may write files for `adopt`; None if `fill` must write the rows."""
        target, shape = self._targets.open(schema), self._targets.shape(schema)
        by_spark = self._settings.writer is Writer.SPARK or shape.expressions is not None
        if by_spark or target.table.metadata().partition_columns:
            return None
        return TargetFolder(target.uri, target.statistics_columns)

    def adopt(self, batch: TableBatch, files: Sequence[DataFile]) -> TableRecord:
        """Add files to an empty target, in one commit; return the table's record.

        files: files that executors wrote into the directory of the target.
        """
        target = self._targets.open(batch.schema)
        target.add([file.add_action() for file in files], target.commit(batch.upto))
        return self._complete(batch, target)

    def _complete(self, batch: TableBatch, target: DeltaTarget) -> TableRecord:
        target.set_key(batch.schema, None, replaced=True)
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        return self._record(batch, target, batch.upto)
