"""Spark writer: checks whether a Spark session can write Delta, and sets the `txn` of its commits.

`SparkTarget` is a target that only Spark can write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError

from cdc.errors import DeltaJarMissing
from cdc.target_names import RELATION_COLUMN
from cdc.targets.unsupported_table_features import unsupported_features
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.schema_evolution import EvolutionPlan
from pipelines.sinks.delta.target_layout import backticked
from pipelines.sinks.delta.unsupported_feature_errors import unsupported

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ONE_SPARK_WRITE: Final = Lock()
"""Lock around `transaction`: the `txn` is set in the session, which all threads and sinks of a process share."""
SORTED_JOIN: Final = "merge"
"""Spark's hint for a join that sorts both sides on the executors.

A broadcast join collects one side in the driver: a target whose files have less than 10 MB, which may be many times as
large in memory.
"""
_TXN_APP: Final = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION: Final = "spark.databricks.delta.write.txnVersion"
_WANTED: Final = "_wanted"
_AGAIN: Final = "/again"
"""Suffix of the `txn` application id of a repeated deletion. The version of this `txn` is the Delta version
of the target before the deletion, not a position.
"""


@contextmanager
def transaction(spark: SparkSession, app_id: str, version: int) -> Iterator[None]:
    """Add this `txn` action to every Delta commit of the session during the block.

    Spark skips a write if the table already has the `txn`. The caller must have acquired ONE_SPARK_WRITE.
    """
    spark.conf.set(_TXN_APP, app_id)
    # a position prints itself as Postgres does
    spark.conf.set(_TXN_VERSION, str(int(version)))
    try:
        yield
    finally:
        spark.conf.unset(_TXN_APP)
        spark.conf.unset(_TXN_VERSION)


def can_write_delta(spark: SparkSession | None) -> bool:
    """Return whether the session can write Delta: the Delta extension is configured and the Delta jar is loaded."""
    if spark is None:
        return False
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        return False
    loader = spark.sparkContext._jvm.Thread.currentThread().getContextClassLoader()  # noqa: SLF001 - the only way to the JVM
    return loader.getResource("io/delta/tables/DeltaTable.class") is not None


def has_file_system(spark: SparkSession, path: str) -> bool:
    """Return whether Hadoop in Spark can access the scheme of a path, such as `s3a`; always true for a local path."""
    scheme, separator, _ = path.partition("://")
    if not separator:
        return True
    hadoop = spark.sparkContext._jvm.org.apache.hadoop.fs.FileSystem  # noqa: SLF001 - the only way to the JVM
    try:
        hadoop.getFileSystemClass(scheme, spark.sparkContext._jsc.hadoopConfiguration())  # noqa: SLF001
    except Py4JJavaError:
        return False
    return True


def require_delta(spark: SparkSession | None) -> SparkSession:
    """Return the session if it can write Delta, otherwise raise DeltaJarMissing."""
    if spark is None or not can_write_delta(spark):
        raise DeltaJarMissing(
            "writer 'spark' cannot write Delta tables, because Spark has not started, or its session has no Delta jar"
        )
    return spark


def frame_of(spark: SparkSession, rows: pa.Table) -> DataFrame:
    """Convert Arrow rows to a Spark frame with the same types; a timestamp without a zone stays without a zone."""
    # Spark 4.2 ends at an empty chunk, and loses the rows of the chunks after it
    return spark.createDataFrame(rows.combine_chunks(), spark_schema(rows.schema))


def spark_schema(columns: pa.Schema) -> StructType:
    """Convert Arrow columns to columns of a frame; a timestamp without a zone stays without a zone."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(columns, prefer_timestamp_ntz=True)


def frame_at(spark: SparkSession, uri: str, version: int, relations: Sequence[int] = ()) -> DataFrame:
    """Return a version of a target as a frame.

    relations: the tables whose rows are returned, if several share the target; rows of others may be of another time.
    """
    rows = require_delta(spark).read.format("delta").option("versionAsOf", version).load(uri)
    return rows.where(rows[RELATION_COLUMN].isin(*relations)) if RELATION_COLUMN in rows.columns and relations else rows


def hinted_merge_source(source: DataFrame, key: Sequence[str], parts: int) -> DataFrame:
    """Return the source of a MERGE by Spark into a filled target, in about `parts` partitions, and joined by sorting.

    key: names of the columns by which source rows find target rows.
    """
    if parts > int(source.sparkSession.conf.get("spark.sql.shuffle.partitions") or 0):
        # the join of a MERGE takes this number; a session on one machine shuffles into two partitions
        source = source.repartition(parts, *map(backticked, key))
    return source.hint(SORTED_JOIN)


@dataclass(frozen=True, slots=True)
class SparkRowReader:
    """Reads rows of a target that delta-rs cannot read."""

    spark: SparkSession
    uri: str

    def __call__(self, version: int, columns: Sequence[str], key: str | None, values: pa.Array) -> pa.RecordBatchReader:
        """Read some columns of a version of the target.

        key: name of a column; only rows whose value in it is one of `values` are read. None: all rows are read.
        """
        frame = frame_at(self.spark, self.uri, version)
        if key is not None:
            wanted = self.spark.createDataFrame(pa.table({_WANTED: pc.unique(values)}))
            frame = frame.join(wanted, frame[backticked(key)] == wanted[_WANTED], "left_semi")
        return frame.select([backticked(name) for name in columns]).toArrow().to_reader()


class SparkTarget(DeltaTarget):
    """A target of one table that Spark writes, because delta-rs cannot write its table features.

    delta-rs still reads the list of files, their bounds, the properties and the applied position. It also reads the
    rows unless a table feature prevents that. The columns of the target cannot change, because Spark's DDL cannot set
    the column id of the log.
    """

    def __init__(self, whole: DeltaTarget, spark: SparkSession) -> None:
        super().__init__(whole.uri, whole.table)
        self.cluster_by = whole.cluster_by
        self._spark = spark
        if unsupported_features(self.table, to_read=True):
            self.read_rows = SparkRowReader(spark, self.uri)

    def fill_defaults(self, defaults: Mapping[str, str], upto: int) -> None:
        """Raise TargetUnusable if the target has rows that need the default of a new column."""
        if defaults and self.files()[0]:
            steps = tuple(f"rows get the default of column {name!r}" for name in defaults)
            self._change_columns(EvolutionPlan(steps), upto)

    def _change_columns(self, found: EvolutionPlan, upto: int) -> None:  # noqa: ARG002 - nothing is committed
        if found.steps:
            raise unsupported(
                self.uri, self.unwritable_features, f"its columns cannot change ({'; '.join(found.steps)})"
            )

    def _delete(self, condition: str, upto: int, suffix: str) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable

        application, version = self.app_id + suffix, upto
        if (self.transaction(suffix) or 0) >= upto:
            # after a crash in a longer range this `txn` is set already, and Spark would skip the erasure
            application, version = self.app_id + _AGAIN, self.version
        with ONE_SPARK_WRITE, transaction(self._spark, application, version):
            SparkDeltaTable.forPath(self._spark, self.uri).delete(condition)
        self.refresh()

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """See DeltaTarget.set_properties."""
        assignments = ", ".join(f"{_literal(name)} = {_literal(value)}" for name, value in properties.items())
        self._spark.sql(f"ALTER TABLE delta.{backticked(self.uri)} SET TBLPROPERTIES ({assignments})")
        self.refresh()


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
