"""Spark target: a Delta target with table features that delta-rs cannot write, so that Spark makes its commits.

delta-rs still reads what it can: files and their bounds, properties, the applied position, and mostly rows as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.stores.table_features import lacking
from pipelines.sinks.delta.merge import ONE_SPARK_WRITE, backticked, transaction
from pipelines.sinks.delta.schema_evolution import EvolutionPlan
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.table_features import unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WANTED: Final = "_wanted"
_AGAIN: Final = "/again"
"""Suffix of a `txn` identity: the version of the target at which an earlier erasure was repeated."""


@dataclass(frozen=True, slots=True)
class SparkReads:
    """Reads rows of a target that delta-rs cannot read."""

    spark: SparkSession
    uri: str

    def __call__(self, version: int, columns: Sequence[str], key: str | None, values: pa.Array) -> pa.RecordBatchReader:
        """Some columns of a version; with a key, of rows whose key column has one of the values."""
        frame = self.spark.read.format("delta").option("versionAsOf", version).load(self.uri)
        if key is not None:
            wanted = self.spark.createDataFrame(pa.table({_WANTED: pc.unique(values)}))
            frame = frame.join(wanted, frame[backticked(key)] == wanted[_WANTED], "left_semi")
        return frame.select([backticked(name) for name in columns]).toArrow().to_reader()


class SparkTarget(DeltaTarget):
    """A target with the latest state of one table, on the handle of the target that was opened.

    Its columns cannot change: Spark's DDL cannot set the id by which the log knows a column.
    """

    def __init__(self, whole: DeltaTarget, spark: SparkSession) -> None:
        super().__init__(whole.uri, whole.table)
        self.cluster_by = whole.cluster_by
        self._spark = spark
        if lacking(self.table, to_read=True):
            self.reads = SparkReads(spark, self.uri)

    def fill_defaults(self, defaults: Mapping[str, str], upto: int) -> None:
        """As DeltaTarget.fill_defaults, which is never needed where no column comes."""
        if defaults and self.files()[0]:
            self._change_columns(
                EvolutionPlan(tuple(f"rows get the default of column {name!r}" for name in defaults)), upto
            )

    def _change_columns(self, found: EvolutionPlan, upto: int) -> None:  # noqa: ARG002 - nothing is committed
        raise unsupported(self.uri, lacking(self.table), f"its columns cannot change: {'; '.join(found.steps)}")

    def _delete(self, condition: str, upto: int, suffix: str) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable

        application, version = self.app_id + suffix, upto
        if (self.transaction(suffix) or 0) >= upto:
            # after a crash in a longer range this `txn` is set already, and Spark would skip the erasure
            application, version = self.app_id + _AGAIN, self.version
        with ONE_SPARK_WRITE, transaction(self._spark, application, version):
            SparkDeltaTable.forPath(self._spark, self.uri).delete(condition)
        self.refresh()

    def _set_property(self, name: str, value: str) -> None:
        said = f"{_literal(name)} = {_literal(value)}"
        self._spark.sql(f"ALTER TABLE delta.{backticked(self.uri)} SET TBLPROPERTIES ({said})")
        self.refresh()


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
