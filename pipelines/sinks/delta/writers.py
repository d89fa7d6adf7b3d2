"""Writers: the choice between delta-rs and Spark for each commit of a Delta target, and the merge by either."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.config.sinks import HistoryMode
from cdc.errors import DeltaJarMissing
from cdc.stores.table_features import lacking
from pipelines.sinks.contract import SparkAwaited, TableBatch
from pipelines.sinks.delta.merge import (
    ONE_SPARK_WRITE,
    TxnMarker,
    can_write_delta,
    frame_of,
    has_file_system,
    merge_with_delta_rs,
    merge_with_spark,
    require_delta,
)
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.spark_writer import SparkTarget
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.table_features import MOVE_AND_REBUILD, unsupported
from pipelines.sinks.delta.table_layout import TableLayout
from pipelines.sinks.delta.writer_choice import LEARNS_FROM, MergeWork, WriterCosts, WriterDecision, candidates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Writers:
    """The two writers of one sink; any thread may use them."""

    def __init__(self, wanted: Writer, path: str) -> None:
        """path: the sink's path template, which names the store of its targets."""
        self.wanted, self._path = wanted, path
        self.costs = WriterCosts()
        self.by_spark = False
        """Whether there is a Spark session that can and may write the targets."""
        self._spark: SparkSession | None = None

    def attach(self, spark: SparkSession) -> None:
        """Use this Spark session."""
        self._spark = spark
        self.by_spark = (
            self.wanted is not Writer.DELTA_RS and can_write_delta(spark) and has_file_system(spark, self._path)
        )

    def check(self, sink: str) -> None:
        """Raise DeltaJarMissing when the writer of the sink is Spark and Spark cannot write its targets."""
        if self.wanted is Writer.SPARK and not has_file_system(require_delta(self._spark), self._path):
            raise DeltaJarMissing(
                f"writer 'spark' of sink {sink!r} needs a Hadoop file system for {self._path!r}, and Spark has none",
                remedy="add hadoop-aws (or the package of the store) to spark.conf, or set writer to 'auto' or "
                "'delta-rs'",
            )

    def writable(self, whole: DeltaTarget, layout: TableLayout) -> DeltaTarget:
        """The target for the writer that can write it: delta-rs, or Spark for table features of Spark only.

        Raises TargetUnusable where neither can, and SparkAwaited where Spark may be able to but has not started.
        """
        if not (features := lacking(whole.table)):
            return whole
        if layout.merged or layout.history_mode is not HistoryMode.LATEST:
            raise unsupported(
                whole.uri, features, "Spark writes the latest rows of a single table only", remedy=MOVE_AND_REBUILD
            )
        if self.by_spark and self._spark is not None:
            return SparkTarget(whole, self._spark)
        if self._spark is None and self.wanted is Writer.AUTO:
            raise SparkAwaited(f"target {whole.uri!r} has table features that delta-rs does not write")
        raise unsupported(whole.uri, features)

    def choice(
        self, target: DeltaTarget, batch: TableBatch, source: pa.Table | DataFrame, key: tuple[str, ...]
    ) -> WriterDecision:
        """The writer of a merge by the columns of a key; raises SparkAwaited for a merge that needs Spark."""
        if not isinstance(source, pa.Table) or self.wanted is not Writer.AUTO:
            return WriterDecision(spark=self.wanted is not Writer.DELTA_RS)
        if isinstance(target, SparkTarget):
            return WriterDecision(spark=True)
        held = target.files()[1] if key else 0
        work = MergeWork(source.num_rows, source.nbytes, held, held)
        if work.by_delta_rs() >= LEARNS_FROM:
            work = replace(work, candidates=candidates(target.actions, source, key) if key else 0)
        if self.costs.is_small(work) or (self._spark is not None and not self.by_spark):
            return WriterDecision(spark=False, seconds=work.by_delta_rs())
        if self._spark is not None:
            return self.costs.choose(target.uri, work, self._spark.sparkContext.defaultParallelism)
        if work.fits:
            return WriterDecision(spark=False, seconds=work.by_delta_rs())
        raise SparkAwaited(f"batch of {batch.schema.topic!r} or what it changes of its target is large")

    def merge(
        self,
        target: DeltaTarget,
        source: pa.Table | DataFrame,
        key: tuple[str, ...],
        mark: TxnMarker,
        choice: WriterDecision,
    ) -> None:
        """Merge the source in one commit that carries the mark."""
        with ONE_SPARK_WRITE if choice.spark else nullcontext():
            began = time.monotonic()
            if choice.spark:
                spark = require_delta(self._spark)
                frame = frame_of(spark, source) if isinstance(source, pa.Table) else source
                merge_with_spark(target, frame, key, mark)
            else:
                merge_with_delta_rs(target, source, key, mark)
            self.costs.learn(choice, time.monotonic() - began)
