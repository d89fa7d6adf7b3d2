"""DeltaSink: one Delta table per source table, merged by position, and one published record beside them.

Order inside `apply`: read the bases of partial images, follow the schema, erase what truncates and
generations ended, merge. Only the last carries the `txn`: the merge, or the erasure where there is nothing to merge;
everything before it can be done again.
Honest ceiling: effectively once. Two drivers at a time are refused at `publish`; between two
publishes on a store where Spark cannot fence (local, S3) that there is one rests on the lease.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cdc.errors import SchemaNotApplicable
from cdc.failpoint import hit
from cdc.naming import column_name, published_uri, target_uri
from cdc.table import TableSchema
from pipelines.latest_files import Folder
from pipelines.rows import target_schema
from pipelines.sinks.delta_default import default_literal
from pipelines.sinks.delta_merge import OP, merge_with_delta_rs, merge_with_spark, require_delta, speaks_delta
from pipelines.sinks.delta_partial import Before, frame_source, table_source
from pipelines.sinks.delta_published import PublishedTable
from pipelines.sinks.delta_source import Shape
from pipelines.sinks.delta_table import DeltaTarget
from pipelines.sinks.sink import Published, SparkAwaited, TableBatch, TableRecord, TargetState
from pipelines.standing import applied_state, placed
from pipelines.statistics import DataFile
from pipelines.types import TypePolicy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_BATCH_BYTES: Final = 64 << 20
"""Of Arrow rows; above it delta-rs would hold several times as much (5 M rows: 10 GB)."""
MAX_TARGET_BYTES: Final = 512 << 20
"""Of live files; delta-rs' merge is linear in them (20 M rows: 17–29 s), Spark's scales out."""
_ATTEMPTS: Final = 5
_PARALLEL: Final = 4
"""Tables merged at once by delta-rs, which works outside of the interpreter's lock; more only take memory."""


class Writer(StrEnum):
    """Who writes the targets."""

    #: delta-rs while batch and target are small or Spark has no Delta, else Spark.
    AUTO = "auto"
    #: delta-rs on the driver, whatever the size.
    DELTA_RS = "delta-rs"
    #: Spark, whatever the size.
    SPARK = "spark"


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """What a definition says of a Delta sink."""

    name: str
    path: str
    """Template with `{schema}` and `{table}`."""
    writer: Writer = Writer.AUTO
    types: TypePolicy = TypePolicy.EXACT
    record: str | None = None
    """Directory of the published record; None: `_cdc/published` beside the targets."""

    def __post_init__(self) -> None:
        # a definition's values are equal texts of its own enums
        object.__setattr__(self, "writer", Writer(self.writer))
        object.__setattr__(self, "types", TypePolicy(self.types))


class DeltaSink:
    """The contract is pipelines.sinks.sink.Sink."""

    parallel = _PARALLEL

    def __init__(self, settings: DeltaSettings, spark: SparkSession | None = None) -> None:
        self.name = settings.name
        self._settings = settings
        self._spark: SparkSession | None = None
        self._spark_writes = False
        self._log_id = ""
        self._published: PublishedTable | None = None
        self._position = 0
        self._records: dict[int, TableRecord] = {}
        """As published, never as applied: they say where a range began, also when it is tried again."""
        self._targets: dict[str, DeltaTarget] = {}
        self._one_spark_write = Lock()
        """Spark takes the `txn` from the session, which all threads share."""
        if spark is not None:
            self.attach(spark)

    @property
    def types(self) -> TypePolicy:
        """How values become columns."""
        return self._settings.types

    def attach(self, spark: SparkSession) -> None:
        """See Sink.attach; from now on Spark writes what is large, if it has Delta."""
        self._spark = spark
        self._spark_writes = self._settings.writer is not Writer.DELTA_RS and speaks_delta(spark)

    def open(self, log_id: str) -> Published | None:
        """See Sink.open; raises DeltaJarMissing when the writer is Spark and it has no Delta."""
        if self._settings.writer is Writer.SPARK:
            require_delta(self._spark)
        self._log_id = log_id
        self._published = PublishedTable.open(self._settings.record or published_uri(self._settings.path), log_id)
        record = self._published.record()
        if record is None:
            return None
        self._remember(record)
        return replace(record, tables={r: self._standing(table) for r, table in record.tables.items()})

    def apply(self, batch: TableBatch) -> TableRecord:
        """See Sink.apply."""
        if not batch.schema.key:
            raise SchemaNotApplicable(
                f"table {batch.schema.topic!r} has no key: rows of a Delta target are found by key",
                remedy="give the table a primary key, or REPLICA IDENTITY USING INDEX, and rebuild it in this sink",
            )
        attempts = Retrying(
            retry=retry_if_exception_type(CommitFailedError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        return attempts(self._attempt, batch)

    def fill(self, batch: TableBatch, rows: DataFrame) -> TableRecord:
        """As apply, for a target without rows: `rows` are all of it, in the target's own columns, none twice.

        Only for a session with Delta. Raises what reading the frame raises; the target then is still empty.
        """
        target = self._target(batch.schema)
        key = Shape(batch.schema, self._settings.types).key
        with self._one_spark_write:
            merge_with_spark(target, rows.selectExpr("*", f"'u' AS {OP}"), key, batch.upto)
        return self._filled(batch, target)

    def folder(self, schema: TableSchema) -> Folder | None:
        """Where executors may write files for `adopt`; None where Spark's own writer is asked for or needed."""
        target = self._target(schema)
        if self._settings.writer is Writer.SPARK or "://" in target.uri:
            return None
        return Folder(target.uri, target.described)

    def adopt(self, batch: TableBatch, files: Sequence[DataFile]) -> TableRecord:
        """As fill, with rows that stand in files of the folder already."""
        target = self._target(batch.schema)
        target.add(files, batch.upto)
        return self._filled(batch, target)

    def _filled(self, batch: TableBatch, target: DeltaTarget) -> TableRecord:
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        return self._record(batch, target, batch.upto)

    def publish(self, record: Published) -> None:
        """See Sink.publish."""
        hit("delta_before_publish")
        self._opened().write(record)
        self._remember(record)

    def keep(self, record: Published) -> str:
        """See Sink.keep; versions stay readable until a vacuum, for a week by Delta's default."""
        versions = {table.target: self._newest(table) for table in record.tables.values() if table.version is not None}
        return json.dumps(versions, sort_keys=True)

    def _newest(self, record: TableRecord) -> int | None:
        """The version that a reader finds now, unless the table stands elsewhere: another hand may have been there."""
        target = None if record.state == TargetState.FAILED else DeltaTarget.open(record.target)
        stands = target is not None and (target.applied or 0) <= record.position
        return target.version if target is not None and stands else record.version

    def release(self, handle: str) -> None:
        """Nothing to give back: a version costs nothing until a vacuum removes it."""

    def close(self) -> None:
        """See Sink.close."""
        self._targets.clear()
        self._published = None

    def _remember(self, record: Published) -> None:
        self._position, self._records = record.position, dict(record.tables)

    def _opened(self) -> PublishedTable:
        if self._published is None:
            raise ValueError(f"sink {self.name!r} is not open")
        return self._published

    def _standing(self, record: TableRecord) -> TableRecord:
        """The record, or where its target really stands when a crash left it ahead of what was published."""
        target = None if record.state == TargetState.FAILED else DeltaTarget.open(record.target)
        applied = 0 if target is None else target.applied or 0
        if target is None or applied <= record.position:
            return record
        return placed(replace(record, position=applied, version=target.version), self._position)

    def _attempt(self, batch: TableBatch) -> TableRecord:
        """One try, safe to repeat: it begins with what the target says of itself now."""
        target = self._target(batch.schema)
        if (target.applied or -1) < batch.upto:
            self._bring(target, batch)
        # a crash may have left it further than upto; then it does not belong to the cut at upto
        return self._record(batch, target, max(batch.upto, target.applied or 0))

    def _bring(self, target: DeltaTarget, batch: TableBatch) -> None:
        shape = Shape(batch.schema, self._settings.types)
        before = replace(self._before(target, batch), truncated=batch.truncated)
        target.follow(shape.columns)
        target.refill(self._defaults(batch.schema, shape), self._began(batch))
        source = self._source(batch, shape, before, with_spark=self._with_spark(batch, target))
        merges = not isinstance(source, pa.Table) or source.num_rows > 0
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        target.erase(batch.truncated, batch.generation, ends=None if merges else batch.upto)
        hit("delta_before_merge")
        if isinstance(source, pa.Table):
            if merges:
                merge_with_delta_rs(target, source, shape.key, batch.upto)
                target.tidy()
        else:
            with self._one_spark_write:
                merge_with_spark(target, source, shape.key, batch.upto)
        hit("delta_after_merge")

    def _began(self, batch: TableBatch) -> int:
        """Where the range of the rows began: a table that was left ahead is folded from the cut on, as all others."""
        return min(batch.after, self._position) if self._records else batch.after

    def _before(self, target: DeltaTarget, batch: TableBatch) -> Before:
        """The target as the range found it, also when an earlier attempt went further."""
        began = self._began(batch)
        if (target.applied or 0) <= began:
            return Before(target.table)
        known = self._records.get(batch.schema.relation)
        if known is None or known.version is None:
            return Before(None)
        if known.position <= began:
            return Before(DeltaTable(target.uri, version=known.version))
        return Before(DeltaTable(target.uri), exact=False)

    def _defaults(self, schema: TableSchema, shape: Shape) -> dict[str, str]:
        """Delta column → expression, for columns with a default that are new since the last record."""
        known = self._records.get(schema.relation)
        if known is None or known.schema is None:
            return {}
        held = {column.id for column in TableSchema.from_json(known.schema).columns}
        return {
            column_name(column.name): default_literal(
                column.missing, shape.columns.field(column_name(column.name)).type
            )
            for column in schema.sent
            if column.missing is not None and column.id not in held
        }

    def _with_spark(self, batch: TableBatch, target: DeltaTarget) -> bool:
        if self._settings.writer is not Writer.AUTO:
            return self._settings.writer is Writer.SPARK
        if (
            batch.frame is None
            and (batch.rows is None or batch.rows.nbytes <= MAX_BATCH_BYTES)
            and target.files()[1] <= MAX_TARGET_BYTES
        ):
            return False
        if self._spark is None:
            raise SparkAwaited(f"batch of {batch.schema.topic!r} or its target is large")
        return self._spark_writes

    def _source(self, batch: TableBatch, shape: Shape, before: Before, *, with_spark: bool) -> pa.Table | DataFrame:
        """What to merge: a frame for Spark, a table for delta-rs."""
        if batch.frame is not None and with_spark:
            return frame_source(batch.frame, before, shape)
        images = batch.rows if batch.frame is None else batch.frame.toArrow()
        if images is None:
            return shape.source.empty_table()
        source = table_source(images, before, shape)
        return require_delta(self._spark).createDataFrame(source) if with_spark and source.num_rows else source

    def _target(self, schema: TableSchema) -> DeltaTarget:
        uri = target_uri(self._settings.path, schema.schema, schema.name)
        target = self._targets.get(uri)
        if target is None:
            target = DeltaTarget.open(uri) or DeltaTarget.create(
                uri, self._log_id, schema, target_schema(schema, self._settings.types)
            )
        else:
            target.refresh()
        target.check_identity(self._log_id, schema)
        self._targets[uri] = target
        return target

    def _record(self, batch: TableBatch, target: DeltaTarget, position: int) -> TableRecord:
        schema = batch.schema
        state = applied_state(batch, self._records.get(schema.relation), complete=target.complete)
        return TableRecord(
            relation=schema.relation,
            topic=schema.topic,
            target=target.uri,
            position=position,
            version=target.version,
            state=state.value,
            reason=None,
            schema=schema.to_json().decode(),
        )
