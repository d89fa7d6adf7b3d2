"""The merge of one batch into one Delta table: what is said (MergeSpec, pure) and the two engines that do it.

Both engines get the same source: the target's columns plus `_op` (`u` upsert, `d` delete; a delete carries its key,
place and nulls, and for want of a key the place of the row that goes). A row is deleted only by a later
(position, ordinal) and replaced only by a later or the same one: the same one is the same change, come again after a
crash as part of a longer range, perhaps under a newer schema.
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
from cdc.naming import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.delta.table import DeltaTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OP: Final = "_op"
"""Source column; a leading underscore is never a source table's column."""
POSITION_KEY: Final = (POSITION_COLUMN, ORDINAL_COLUMN)
"""What finds a row of a table without a key."""
SOURCE: Final = "s"
TARGET: Final = "t"

ONE_SPARK_WRITE: Final = Lock()
"""Held around `transaction`: the `txn` stands in the session, which all threads and all sinks of a process share."""
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
    """The merge as SQL texts, in one dialect of quoting."""

    key: tuple[str, ...]
    """Delta names of the key columns; PLACE where there is none."""
    columns: tuple[str, ...]
    """Delta names of every column that the source brings, `_position` and `_ordinal` included."""
    quote: Callable[[str], str]
    part: int | None = None
    """The table whose rows are meant, of a target of many."""

    @property
    def condition(self) -> str:
        """Same key. Key columns are never NULL (primary key or replica identity index).

        The table stands there as a number: by that files of others are left alone before any row is looked at.
        """
        mine = [] if self.part is None else [f"{self._target(RELATION_COLUMN)} = {int(self.part)}"]
        return " AND ".join([*mine, *(f"{self._source(name)} = {self._target(name)}" for name in self.key)])

    @property
    def deletes(self) -> str:
        """When a matched row goes; one that is found by its place is meant as it is."""
        is_delete = f"{self._source(OP)} = 'd'"
        return is_delete if self.key == POSITION_KEY else f"{is_delete} AND {self._after('>')}"

    @property
    def updates(self) -> str:
        """When a matched row is replaced."""
        return f"{self._source(OP)} = 'u' AND {self._after('>=')}"

    @property
    def inserts(self) -> str:
        """When an unmatched row is added."""
        return f"{self._source(OP)} = 'u'"

    @property
    def assignments(self) -> dict[str, str]:
        """Target column → source expression, for update and insert alike."""
        return {self.quote(name): self._source(name) for name in self.columns}

    def _after(self, than: str) -> str:
        position, ordinal = POSITION_COLUMN, ORDINAL_COLUMN
        same = f"{self._source(position)} = {self._target(position)}"
        within = f"{self._source(ordinal)} {than} {self._target(ordinal)}"
        # another hand put a row there without a place: what the log says is newer
        placeless = f"{self._target(position)} IS NULL"
        return f"({self._source(position)} > {self._target(position)} OR ({same} AND {within}) OR {placeless})"

    def _source(self, name: str) -> str:
        return f"{SOURCE}.{self.quote(name)}"

    def _target(self, name: str) -> str:
        return f"{TARGET}.{self.quote(name)}"


@dataclass(frozen=True, slots=True)
class TxnMarker:
    """The `txn` that a commit carries: whoever finds it in the table does not make the commit again."""

    app_id: str
    version: int

    @property
    def properties(self) -> CommitProperties:
        """For a commit of delta-rs."""
        return CommitProperties(app_transactions=[Transaction(self.app_id, self.version)])


def append_with_delta_rs(target: DeltaTarget, rows: pa.Table, mark: TxnMarker) -> None:
    """Append rows; a column of the target that they do not have, which is another table's, is null.

    What the target says of its columns stays: of rows from before a change that it has already, they would say another.
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
    then has no `_op` of a merge, is appended.
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
    """Rows as a frame of the same types: unasked, Spark takes a timestamp without a zone for one with."""
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
    """Whether Spark's Hadoop has a file system for the store that a path names; a directory's is always there."""
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
        raise DeltaJarMissing("writer 'spark' needs a Spark session with Delta, and this one has none")
    return spark


@contextmanager
def transaction(spark: SparkSession, app_id: str, version: int) -> Iterator[None]:
    """Every Delta write of the session inside the block carries this `txn`; it is skipped if the table has it.

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
