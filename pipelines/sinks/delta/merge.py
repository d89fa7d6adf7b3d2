"""Merge of one batch into one Delta table: the SQL conditions (MergeSpec, pure) and the two engines that run it.

Both engines get the same source: the target's columns plus `_op` (`u` upsert, `d` delete). A delete has its key, its
position and nulls; without a key it has the position of the row to delete. A row is deleted only by a later
(position, ordinal), and replaced only by a later or an equal one. An equal one is the same change, applied again after
a crash as part of a longer range, perhaps under a newer schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake
from py4j.protocol import Py4JJavaError

from cdc.errors import DeltaJarMissing
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.delta.table import DeltaTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OP: Final = "_op"
"""Column of a merge's source; a column of a source table never begins with an underscore."""
POSITION_KEY: Final = (POSITION_COLUMN, ORDINAL_COLUMN)
"""The columns that find a row of a table without a key."""
SOURCE: Final = "s"
TARGET: Final = "t"

ONE_SPARK_WRITE: Final = Lock()
"""Lock around `transaction`: the `txn` is set in the session, which all threads and sinks of a process share."""
_TXN_APP: Final = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION: Final = "spark.databricks.delta.write.txnVersion"


def double_quoted(name: str) -> str:
    """An identifier for DataFusion (delta-rs)."""
    return '"' + name.replace('"', '""') + '"'


def backticked(name: str) -> str:
    """An identifier for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, slots=True)
class MergeSpec:
    """The conditions of a merge as SQL, in one dialect of quoting."""

    key: tuple[str, ...]
    """Delta names of the key columns; PLACE where there is none."""
    columns: tuple[str, ...]
    """Delta names of every column of the source, `_position` and `_ordinal` included."""
    quote: Callable[[str], str]
    part: int | None = None
    """The relation whose rows are merged, in a shared target."""

    @property
    def condition(self) -> str:
        """Same key. Key columns are never NULL (primary key or replica identity index).

        The relation is a literal, so that the engine skips files of other tables before it reads rows.
        """
        mine = [] if self.part is None else [f"{self._target(RELATION_COLUMN)} = {int(self.part)}"]
        return " AND ".join([*mine, *(f"{self._source(name)} = {self._target(name)}" for name in self.key)])

    @property
    def deletes(self) -> str:
        """The condition to delete a matched row; a row found by its position needs no comparison."""
        is_delete = f"{self._source(OP)} = 'd'"
        return is_delete if self.key == POSITION_KEY else f"{is_delete} AND {self._after('>')}"

    @property
    def updates(self) -> str:
        """The condition to replace a matched row."""
        return f"{self._source(OP)} = 'u' AND {self._after('>=')}"

    @property
    def inserts(self) -> str:
        """The condition to insert an unmatched row."""
        return f"{self._source(OP)} = 'u'"

    @property
    def assignments(self) -> dict[str, str]:
        """Target column → source expression, for update and insert alike."""
        return {self.quote(name): self._source(name) for name in self.columns}

    def _after(self, than: str) -> str:
        position, ordinal = POSITION_COLUMN, ORDINAL_COLUMN
        same = f"{self._source(position)} = {self._target(position)}"
        within = f"{self._source(ordinal)} {than} {self._target(ordinal)}"
        # a row of another client has no position: the change from the log is newer
        placeless = f"{self._target(position)} IS NULL"
        return f"({self._source(position)} > {self._target(position)} OR ({same} AND {within}) OR {placeless})"

    def _source(self, name: str) -> str:
        return f"{SOURCE}.{self.quote(name)}"

    def _target(self, name: str) -> str:
        return f"{TARGET}.{self.quote(name)}"


@dataclass(frozen=True, slots=True)
class TxnMarker:
    """The `txn` that a commit carries; a commit whose `txn` is in the table is not made again."""

    app_id: str
    version: int

    @property
    def properties(self) -> CommitProperties:
        """For a commit of delta-rs."""
        return CommitProperties(app_transactions=[Transaction(self.app_id, self.version)])


def append_with_delta_rs(target: DeltaTarget, rows: pa.Table, mark: TxnMarker) -> None:
    """Append rows; a column of the target that they do not have, which belongs to another table, is null.

    The metadata of the target's columns stays: rows of an earlier range may carry metadata from before a change.
    """
    for field in target.columns:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    said = {field.name: field.metadata for field in target.columns}
    rows = pa.table(rows.columns, schema=pa.schema([field.with_metadata(said[field.name]) for field in rows.schema]))
    write_deltalake(target.table, rows, mode="append", commit_properties=mark.properties)
    target.refresh()


def append_with_spark(target: DeltaTarget, rows: DataFrame, mark: TxnMarker) -> None:
    """As append_with_delta_rs, on the cluster."""
    with transaction(rows.sparkSession, mark.app_id, mark.version):
        rows.write.format("delta").mode("append").save(target.uri)
    target.refresh()


def merge_with_delta_rs(target: DeltaTarget, source: pa.Table, key: tuple[str, ...], mark: TxnMarker) -> None:
    """Merge `source` (target columns and `_op`) in one commit that carries the mark.

    Into an empty target upserts are appended: there is nothing to compare them with. Without a key the source, which
    then has no `_op`, is appended.
    """
    if not key:
        append_with_delta_rs(target, source, mark)
        return
    if not target.files()[0]:
        upserts = source.filter(pa.compute.equal(source[OP], "u")).drop_columns([OP])
        append_with_delta_rs(target, upserts, mark)
        return
    columns, since = tuple(name for name in source.column_names if name != OP), target.version
    spec = MergeSpec(key, columns, double_quoted, target.part)
    merger = target.table.merge(
        source,
        spec.condition,
        source_alias=SOURCE,
        target_alias=TARGET,
        # the source is in memory; its key range then prunes files of the target
        streamed_exec=False,
        commit_properties=mark.properties,
    )
    merger = merger.when_matched_delete(spec.deletes).when_matched_update(spec.assignments, spec.updates)
    merger.when_not_matched_insert(spec.assignments, spec.inserts).execute()
    target.record_commit(mark.app_id, mark.version, since)


def merge_with_spark(target: DeltaTarget, source: DataFrame, key: tuple[str, ...], mark: TxnMarker) -> None:
    """As merge_with_delta_rs, on the cluster."""
    if not key:
        append_with_spark(target, source, mark)
        return
    if not target.files()[0]:
        append_with_spark(target, source.where(f"{backticked(OP)} = 'u'").drop(OP), mark)
        return
    columns = tuple(name for name in source.columns if name != OP)
    with transaction(source.sparkSession, mark.app_id, mark.version):
        _spark_merge(source.sparkSession, target.uri, source, MergeSpec(key, columns, backticked, target.part))
    target.refresh()


def frame_of(spark: SparkSession, rows: pa.Table) -> DataFrame:
    """Rows as a frame of the same types; by default Spark reads a timestamp without a zone as one with a zone."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(rows, from_arrow_schema(rows.schema, prefer_timestamp_ntz=True))


def _spark_merge(spark: SparkSession, uri: str, source: DataFrame, spec: MergeSpec) -> None:
    from delta.tables import DeltaTable as SparkDeltaTable

    merger = SparkDeltaTable.forPath(spark, uri).alias(TARGET).merge(source.alias(SOURCE), spec.condition)
    merger = merger.whenMatchedDelete(spec.deletes).whenMatchedUpdate(spec.updates, spec.assignments)
    merger.whenNotMatchedInsert(spec.inserts, spec.assignments).execute()


def can_write_delta(spark: SparkSession | None) -> bool:
    """Whether a session can write Delta: its extension is configured and its jar loaded."""
    if spark is None:
        return False
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        return False
    loader = spark.sparkContext._jvm.Thread.currentThread().getContextClassLoader()  # noqa: SLF001 - the only way to the JVM
    return loader.getResource("io/delta/tables/DeltaTable.class") is not None


def has_file_system(spark: SparkSession, path: str) -> bool:
    """Whether Spark's Hadoop has a file system for the scheme of a path; always for a directory."""
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
    """The session, if it can write Delta; raises DeltaJarMissing."""
    if spark is None or not can_write_delta(spark):
        raise DeltaJarMissing("writer 'spark' needs a Spark session with Delta Lake, and this session has no Delta jar")
    return spark


@contextmanager
def transaction(spark: SparkSession, app_id: str, version: int) -> Iterator[None]:
    """Let every Delta write of the session in the block carry this `txn`; Spark skips it if the table has it.

    Called with ONE_SPARK_WRITE held.
    """
    spark.conf.set(_TXN_APP, app_id)
    # a position prints itself as Postgres does
    spark.conf.set(_TXN_VERSION, str(int(version)))
    try:
        yield
    finally:
        spark.conf.unset(_TXN_APP)
        spark.conf.unset(_TXN_VERSION)
