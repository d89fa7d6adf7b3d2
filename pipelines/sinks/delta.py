"""DeltaSink: one Delta table per source table, merged by position, and one published record beside them.

Order inside `apply`: read the bases of partial images, follow the schema, erase what truncates and
generations ended, merge. Only the merge carries the `txn`; everything before it can be done again.
Honest ceiling: effectively once. Two drivers at a time are refused at `publish`; between two
publishes on a store where Spark cannot fence (local, S3) that there is one rests on the lease.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import CommitFailedError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cdc.errors import CdcError, MissingBase, Reaction, SchemaNotApplicable
from cdc.failpoint import hit
from cdc.naming import column_name, published_uri, target_uri
from cdc.table import TableSchema
from pipelines.rows import target_schema, typed_keys, typed_rows
from pipelines.sinks.delta_default import default_literal
from pipelines.sinks.delta_merge import OP, merge_with_delta_rs, merge_with_spark, require_delta, speaks_delta
from pipelines.sinks.delta_partial import complete
from pipelines.sinks.delta_published import PublishedTable
from pipelines.sinks.delta_table import DeltaTarget
from pipelines.sinks.sink import Published, TableBatch, TableRecord, TargetState
from pipelines.types import TypePolicy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_BATCH_BYTES: Final = 64 << 20
"""Of Arrow rows; above it delta-rs would hold several times as much (5 M rows: 10 GB)."""
MAX_TARGET_BYTES: Final = 512 << 20
"""Of live files; delta-rs' merge is linear in them (20 M rows: 17–29 s), Spark's scales out."""
_ATTEMPTS: Final = 5
_PLACES: Final = ("position", "ordinal")


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


@dataclass(slots=True)
class _Progress:
    """What this driver knows of its tables; the published record is the truth, this is its memory."""

    records: dict[int, TableRecord] = field(default_factory=dict)


class DeltaSink:
    """The contract is pipelines.sinks.sink.Sink; calls come from one thread."""

    def __init__(self, settings: DeltaSettings, spark: SparkSession | None = None) -> None:
        self.name = settings.name
        self._settings = settings
        self._spark = spark
        self._log_id = ""
        self._published: PublishedTable | None = None
        self._records: dict[int, TableRecord] = {}
        self._targets: dict[str, DeltaTarget] = {}

    def open(self, log_id: str) -> Published | None:
        """See Sink.open; raises DeltaJarMissing when the writer is Spark and it has no Delta."""
        if self._settings.writer is Writer.SPARK:
            require_delta(self._spark)
        self._log_id = log_id
        self._published = PublishedTable.open(published_uri(self._settings.path), log_id)
        record = self._published.record()
        self._records = dict(record.tables) if record else {}
        return record

    def apply(self, batch: TableBatch) -> TableRecord:
        """See Sink.apply."""
        known = self._records.get(batch.schema.relation)
        if known is not None and known.state == TargetState.FAILED and batch.after > known.position:
            return known
        try:
            record = self._applied(batch)
        except CdcError as exc:
            if exc.reaction is not Reaction.QUARANTINE:
                raise
            record = self._failed(batch, exc)
        self._records[batch.schema.relation] = record
        return record

    def publish(self, record: Published) -> None:
        """See Sink.publish."""
        hit("delta_before_publish")
        self._opened().write(record)
        self._records = dict(record.tables)

    def keep(self, record: Published) -> str:
        """See Sink.keep; versions stay readable until a vacuum, for a week by Delta's default."""
        versions = {table.target: table.version for table in record.tables.values() if table.version is not None}
        return json.dumps(versions, sort_keys=True)

    def release(self, handle: str) -> None:
        """Nothing to give back: a version costs nothing until a vacuum removes it."""

    def close(self) -> None:
        """See Sink.close."""
        self._targets.clear()
        self._published = None

    def _opened(self) -> PublishedTable:
        if self._published is None:
            raise ValueError(f"sink {self.name!r} is not open")
        return self._published

    def _applied(self, batch: TableBatch) -> TableRecord:
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

    def _attempt(self, batch: TableBatch) -> TableRecord:
        """One try, safe to repeat: it begins with what the target says of itself now."""
        target = self._target(batch.schema)
        if (target.applied or -1) < batch.upto:
            self._bring(target, batch)
        state = TargetState.STREAMING if target.complete else TargetState.BOOTSTRAPPING
        return self._record(batch, target.version, state)

    def _bring(self, target: DeltaTarget, batch: TableBatch) -> None:
        columns = target_schema(batch.schema, self._settings.types)
        target.follow(columns, self._refill(target, batch.schema, columns))
        with_spark = self._with_spark(batch, target)
        whole = self._whole(batch, target)
        target.erase(batch.truncated, batch.generation)
        hit("delta_before_merge")
        key = tuple(column_name(column.name) for column in batch.schema.key)
        if with_spark:
            merge_with_spark(target, self._frame(batch, whole), key, batch.upto)
        elif whole.num_rows:
            merge_with_delta_rs(target, whole, key, batch.upto)
            target.tidy()
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        hit("delta_after_merge")

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
