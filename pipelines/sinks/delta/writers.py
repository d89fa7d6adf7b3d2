"""Writers: merge a batch into a Delta target with the indexed writer or Spark, in one commit with its `txn`.

Both engines get the same source rows and follow the same conditions (`MergeSpec`). The source row of a delete has the
key, position and ordinal of the delete, and nulls elsewhere. In a table without a key, it has position and ordinal of
the target row to delete. A change deletes a target row only if the (position, ordinal) of the change is later. A change
replaces a target row only if its (position, ordinal) is later or equal. An equal pair is the same change: after a crash
it is merged again, perhaps under a newer schema.

The indexed writer merges what the driver has (pipelines.sinks.delta.indexed_writer). Spark merges the rows that its
executors have, and the targets that the indexed writer cannot write. Rows that replace no others are appended by
delta-rs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import write_deltalake

from cdc.errors import DeltaJarMissing
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.contract import SparkAwaited, TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.new_data_files import with_all_columns
from pipelines.sinks.delta.open_indexed_tables import IndexedTargets
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.shared_directory import SharedDirectories
from pipelines.sinks.delta.spark_target import (
    ONE_SPARK_WRITE,
    SparkTarget,
    can_write_delta,
    frame_of,
    has_file_system,
    require_delta,
    transaction,
)
from pipelines.sinks.delta.target_columns import OP, POSITION_KEY
from pipelines.sinks.delta.target_layout import TargetLayout, backticked
from pipelines.sinks.delta.unsupported_feature_errors import MOVE_AND_REBUILD, only_spark_writes, unsupported

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOURCE: Final = "s"
TARGET: Final = "t"


class Writers:
    """Chooses the writer of each merge of one sink, and merges; any thread may use it."""

    def __init__(self, settings: DeltaSettings) -> None:
        """settings: the settings of the sink, which define the writer of each table."""
        self.wanted, self._path, self._writer_of = settings.writer, settings.path, settings.writer_of
        self.indexed = IndexedTargets(settings.index_folder)
        self.by_executors = False
        """Whether executors may write files of targets, which the driver commits: a session that knows Delta is
        attached, and the writer is not `copy-on-write`. They need no Hadoop file system for an object store.
        """
        self.by_spark = False
        """Whether Spark itself may write targets at the path of the sink."""
        self._spark: SparkSession | None = None
        self._directories = SharedDirectories()

    def attach(self, spark: SparkSession) -> None:
        """Use this Spark session for merges from now on."""
        self._spark = spark
        self.by_executors = self.wanted is not Writer.COPY_ON_WRITE and can_write_delta(spark)
        self.by_spark = self.spark_reaches(self._path)

    def spark_reaches(self, path: str) -> bool:
        """Return whether Spark itself may read and write a target: it has a Hadoop file system for the path."""
        return self._spark is not None and self.by_executors and has_file_system(self._spark, path)

    def check(self, sink: str) -> None:
        """Raise DeltaJarMissing if the definition sets writer `spark` and Spark cannot write the targets."""
        if self.wanted is Writer.SPARK and not has_file_system(require_delta(self._spark), self._path):
            raise DeltaJarMissing(
                f"sink {sink!r} has writer 'spark', but Spark has no Hadoop file system for path {self._path!r}",
                remedy="add hadoop-aws (or the package of the store) to spark.conf, or set writer to 'auto' or "
                "'indexed'",
            )

    def check_directory(self, uri: str) -> None:
        """Raise ExecutorFilesUnusable if a commit would name files of executors that the driver cannot read.

        Called before executors write to the target at `uri`.
        """
        if self._spark is not None:
            self._directories.check(self._spark, uri)

    def writable(self, whole: DeltaTarget, layout: TargetLayout) -> DeltaTarget:
        """Return `whole` if delta-rs can write it, otherwise a SparkTarget for the same Delta table.

        Raises TargetUnusable if neither writer can write the target. Raises SparkAwaited if Spark may be able to write
        it, but has not started yet.
        """
        if not (features := whole.unwritable_features):
            return whole
        if not layout.has_latest_rows_of_one_table:
            raise unsupported(
                whole.uri,
                features,
                "Spark can write only targets with the latest state of a single table",
                remedy=MOVE_AND_REBUILD,
            )
        if self._spark is not None and self.spark_reaches(whole.uri):
            return SparkTarget(whole, self._spark)
        if self._spark is None and self.wanted is Writer.AUTO:
            raise SparkAwaited(
                f"target {whole.uri!r} has table features that delta-rs does not write: waiting for Spark"
            )
        raise unsupported(whole.uri, features)

    def choose(
        self, target: DeltaTarget, batch: TableBatch, source: pa.Table | DataFrame, key: tuple[str, ...]
    ) -> Writer:
        """Return which writer merges `source` into `target`.

        key: the columns by which source rows find target rows; empty if the rows are only appended. Raises SparkAwaited
        if the merge needs Spark and Spark has not started yet, and TargetUnusable if no writer can write the target.
        """
        wanted = self._writer_of(batch.schema.topic)
        if not isinstance(source, pa.Table) or isinstance(target, SparkTarget):
            return Writer.SPARK
        if wanted is Writer.SPARK:
            if self.wanted is not Writer.SPARK and self._spark is None:
                raise SparkAwaited(f"a rule sets writer 'spark' for table {batch.schema.topic!r}: waiting for Spark")
            return Writer.SPARK
        if not key or self.indexed.can_merge(target, key):
            return Writer.COPY_ON_WRITE if wanted is Writer.COPY_ON_WRITE else Writer.INDEXED
        reason = self.indexed.refused[target.uri]
        if wanted is Writer.AUTO and self._spark is None:
            raise SparkAwaited(f"the driver cannot write target {target.uri!r} ({reason}): waiting for Spark")
        if wanted is Writer.AUTO and self.spark_reaches(target.uri):
            return Writer.SPARK
        raise only_spark_writes(target.uri, reason)

    def merge(
        self,
        target: DeltaTarget,
        source: pa.Table | DataFrame,
        key: tuple[str, ...],
        marker: TxnMarker,
        writer: Writer,
    ) -> None:
        """Merge `source` into `target` with the chosen writer, in one commit with the `txn` of `marker`.

        source: rows with the target's columns and the column `_op`, which is `u` or `d`. key: the columns by which
        source rows find target rows; empty: append the rows, which have no column `_op`. Raises CommitFailedError if
        another driver merged the same range meanwhile. Without this error, the merge could insert rows again that the
        other driver deleted in a later range.
        """
        target.check_not_committed(marker)
        if writer is Writer.SPARK:
            self.check_directory(target.uri)
            with ONE_SPARK_WRITE:
                spark = require_delta(self._spark)
                frame = frame_of(spark, source) if isinstance(source, pa.Table) else source
                merge_with_spark(target, frame, key, marker)
        elif key:
            self.indexed.merge(target, source, key, marker, copies=writer is Writer.COPY_ON_WRITE)
        else:
            append_with_delta_rs(target, source, marker)


def append_with_delta_rs(target: DeltaTarget, rows: pa.Table, marker: TxnMarker) -> None:
    """Append rows to the target in one commit with the `txn` of `marker`; a column that `rows` does not have is null.

    The commit keeps the column metadata of the target, because the metadata of `rows` may be older.
    """
    complete = with_all_columns(rows, target.columns)
    write_deltalake(target.table, complete, mode="append", commit_properties=marker.properties)
    target.refresh()


def merge_with_spark(target: DeltaTarget, source: DataFrame, key: tuple[str, ...], marker: TxnMarker) -> None:
    """Merge `source` into `target` with Spark. Arguments as in Writers.merge.

    If the target is empty, the rows with `_op` `u` are appended, and all others are ignored.
    """
    if not key:
        _append_with_spark(target, source, marker)
        return
    if not target.files()[0]:
        _append_with_spark(target, source.where(f"{backticked(OP)} = 'u'").drop(OP), marker)
        return
    from delta.tables import DeltaTable as SparkDeltaTable

    columns = tuple(name for name in source.columns if name != OP)
    spec, spark = MergeSpec(key, columns, target.part.relation), source.sparkSession
    with transaction(spark, marker.app_id, marker.version):
        merger = SparkDeltaTable.forPath(spark, target.uri).alias(TARGET).merge(source.alias(SOURCE), spec.condition)
        merger = merger.whenMatchedDelete(spec.deletes).whenMatchedUpdate(spec.updates, spec.assignments)
        merger.whenNotMatchedInsert(spec.inserts, spec.assignments).execute()
    target.refresh()


def _append_with_spark(target: DeltaTarget, rows: DataFrame, marker: TxnMarker) -> None:
    with transaction(rows.sparkSession, marker.app_id, marker.version):
        rows.write.format("delta").mode("append").save(target.uri)
    target.refresh()


@dataclass(frozen=True, slots=True)
class MergeSpec:
    """The conditions and assignments of a MERGE as expressions in Spark SQL."""

    key: tuple[str, ...]
    """Delta names of the key columns; POSITION_KEY for a table without a key."""
    columns: tuple[str, ...]
    """Delta names of all columns of the source rows except `_op`; `_position` and `_ordinal` are included."""
    relation: int | None = None
    """The relation whose rows are merged, if several tables share the target; otherwise None."""

    @property
    def condition(self) -> str:
        """SQL that is true for a source row and a target row with the same key. In a shared target, the target row must
        also have the relation of the merged table.

        Key columns are never NULL, because they form a primary key or a replica identity index. The relation is a
        literal, so that the engine skips the files of other tables.
        """
        own = [] if self.relation is None else [f"{self._target(RELATION_COLUMN)} = {int(self.relation)}"]
        return " AND ".join([*own, *(f"{self._source(name)} = {self._target(name)}" for name in self.key)])

    @property
    def deletes(self) -> str:
        """SQL that is true if the source row deletes the target row with its key."""
        is_delete = f"{self._source(OP)} = 'd'"
        return is_delete if self.key == POSITION_KEY else f"{is_delete} AND {self._after('>')}"

    @property
    def updates(self) -> str:
        """SQL that is true if the source row replaces the target row with its key."""
        return f"{self._source(OP)} = 'u' AND {self._after('>=')}"

    @property
    def inserts(self) -> str:
        """SQL that is true if a source row without a matching target row is inserted."""
        return f"{self._source(OP)} = 'u'"

    @property
    def assignments(self) -> dict[str, str]:
        """Target column → source expression, for updates and inserts."""
        return {backticked(name): self._source(name) for name in self.columns}

    def _after(self, comparison: str) -> str:
        position, ordinal = POSITION_COLUMN, ORDINAL_COLUMN
        same = f"{self._source(position)} = {self._target(position)}"
        within = f"{self._source(ordinal)} {comparison} {self._target(ordinal)}"
        # a row that another client wrote has no position; the change from the log counts as newer
        unpositioned = f"{self._target(position)} IS NULL"
        return f"({self._source(position)} > {self._target(position)} OR ({same} AND {within}) OR {unpositioned})"

    def _source(self, name: str) -> str:
        return f"{SOURCE}.{backticked(name)}"

    def _target(self, name: str) -> str:
        return f"{TARGET}.{backticked(name)}"
