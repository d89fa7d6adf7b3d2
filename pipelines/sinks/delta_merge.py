"""The merge of one batch into one Delta table: what is said (MergeSpec, pure) and the two engines that do it.

Both engines get the same source: the target's columns plus `_op` (`u` upsert, `d` delete; a delete
carries its key, place and nulls). A row is deleted only by a later (position, ordinal) and replaced only by a
later or the same one: the same one is the same change, come again after a crash as part of a longer
range, perhaps under a newer schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import write_deltalake

from cdc.errors import DeltaJarMissing
from cdc.naming import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.sinks.delta_table import DeltaTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OP: Final = "_op"
"""Source column; a leading underscore is never a source table's column."""
SOURCE: Final = "s"
TARGET: Final = "t"

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
    """Delta names of the key columns."""
    columns: tuple[str, ...]
    """Delta names of every column that the source brings, `_position` and `_ordinal` included."""
    quote: Callable[[str], str]

    @property
    def condition(self) -> str:
        """Same key. Key columns are never NULL (primary key or replica identity index)."""
        return " AND ".join(f"{self._source(name)} = {self._target(name)}" for name in self.key)

    @property
    def deletes(self) -> str:
        """When a matched row goes."""
        return f"{self._source(OP)} = 'd' AND {self._after('>')}"

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


def merge_with_delta_rs(target: DeltaTarget, source: pa.Table, key: tuple[str, ...], upto: int) -> None:
    """Merge `source` (target columns and `_op`) in one commit that carries the `txn` upto.

    Into an empty target upserts are appended: there is nothing to compare them with.
    """
    if not target.files()[0]:
        upserts = source.filter(pa.compute.equal(source[OP], "u")).drop_columns([OP])
        write_deltalake(target.table, upserts, mode="append", commit_properties=target.commit(upto))
        target.refresh()
        return
    columns = tuple(name for name in source.column_names if name != OP)
    spec = MergeSpec(key, columns, double_quoted)
    merger = target.table.merge(
        source,
        spec.condition,
        source_alias=SOURCE,
        target_alias=TARGET,
        # the source is in memory; its key range then prunes files of the target
        streamed_exec=False,
        commit_properties=target.commit(upto),
    )
    merger = merger.when_matched_delete(spec.deletes).when_matched_update(spec.assignments, spec.updates)
    merger.when_not_matched_insert(spec.assignments, spec.inserts).execute()


def merge_with_spark(target: DeltaTarget, source: DataFrame, key: tuple[str, ...], upto: int) -> None:
    """As merge_with_delta_rs, on the cluster."""
    spark = source.sparkSession
    columns = tuple(name for name in source.columns if name != OP)
    spec = MergeSpec(key, columns, backticked)
    with transaction(spark, target.app_id, upto):
        if target.files()[0]:
            _spark_merge(spark, target.uri, source, spec)
        else:
            upserts = source.where(f"{backticked(OP)} = 'u'").drop(OP)
            upserts.write.format("delta").mode("append").save(target.uri)
    target.refresh()


def _spark_merge(spark: SparkSession, uri: str, source: DataFrame, spec: MergeSpec) -> None:
    from delta.tables import DeltaTable as SparkDeltaTable

    merger = SparkDeltaTable.forPath(spark, uri).alias(TARGET).merge(source.alias(SOURCE), spec.condition)
    merger = merger.whenMatchedDelete(spec.deletes).whenMatchedUpdate(spec.updates, spec.assignments)
    merger.whenNotMatchedInsert(spec.inserts, spec.assignments).execute()


def speaks_delta(spark: SparkSession | None) -> bool:
    """Whether a session can write Delta: its extension is configured and its jar loaded."""
    if spark is None:
        return False
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        return False
    loader = spark.sparkContext._jvm.Thread.currentThread().getContextClassLoader()  # noqa: SLF001 - the only way to the JVM
    return loader.getResource("io/delta/tables/DeltaTable.class") is not None


def require_delta(spark: SparkSession | None) -> SparkSession:
    """The session, if it can write Delta; raises DeltaJarMissing."""
    if spark is None or not speaks_delta(spark):
        raise DeltaJarMissing("writer 'spark' needs a Spark session with Delta, and this one has none")
    return spark


@contextmanager
def transaction(spark: SparkSession, app_id: str, version: int) -> Iterator[None]:
    """Every Delta write of the session inside the block carries this `txn`; it is skipped if the table has it."""
    spark.conf.set(_TXN_APP, app_id)
    spark.conf.set(_TXN_VERSION, str(version))
    try:
        yield
    finally:
        spark.conf.unset(_TXN_APP)
        spark.conf.unset(_TXN_VERSION)
