"""Delta sink: one Delta table per source table, and one published record that names the cut which readers see.

The sink opens and recovers the targets, hands each batch to the strategy of its table, and publishes. How a batch is
merged is in pipelines.sinks.delta.latest and pipelines.sinks.delta.history.

Honest ceiling: effectively once. Two drivers at a time are refused at `publish`. Between two publishes the lease alone
keeps a second driver away on a store where Spark cannot fence (local, S3).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from deltalake.exceptions import CommitFailedError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cdc.config import DeadLetterSettings
from cdc.failpoint import hit
from cdc.table import TableSchema
from pipelines.sinks.contract import ImageMask, Published, RefusedRow, TableBatch, TableRecord
from pipelines.sinks.delta.history import History
from pipelines.sinks.delta.latest import LatestState
from pipelines.sinks.delta.maintenance import TargetMaintenance
from pipelines.sinks.delta.published import PublishedTable
from pipelines.sinks.delta.recovery import follow_rules, parked_upto, readable_versions, with_target_position
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from pipelines.sinks.delta.strategy import KeepingStrategy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ATTEMPTS: Final = 5
_PARALLEL: Final = 4
"""Tables merged at once by delta-rs, which works outside of the interpreter's lock; more only take memory."""


class DeltaSink:
    """The contract is pipelines.sinks.contract.Sink."""

    parallel = _PARALLEL

    def __init__(self, settings: DeltaSettings, spark: SparkSession | None = None) -> None:
        self.name = settings.name
        self._settings = settings
        self.parts = DeltaSinkParts.of(settings)
        self._latest: KeepingStrategy = LatestState(self.parts)
        self._history: KeepingStrategy = History(self.parts)
        self._record_table: PublishedTable | None = None
        self._upkeep = TargetMaintenance(settings.upkeep)
        self.pace, self.foreign = self.parts.commit_rate, self.parts.external_commits.report
        self.parked = self.parts.parked
        if spark is not None:
            self.attach(spark)

    def attach(self, spark: SparkSession) -> None:
        """See Sink.attach; from now on Spark writes what is large, if it has Delta."""
        self.parts.attach(spark)

    def open(self, log_id: str) -> Published | None:
        """See Sink.open; raises DeltaJarMissing when the writer is Spark and it has no Delta."""
        self.parts.writers.check(self.name)
        self.parts.targets.log_id = log_id
        self._record_table = PublishedTable.open(self._settings.record_uri, log_id, self._settings.upkeep.retain)
        record = self._record_table.record()
        if record is None:
            self.parked.load(Published(0, 0), {})
            return None
        record = follow_rules(self._record_table, self._settings.record_uri, record, self.parts.rules)
        self.parts.published.remember(record)
        tables = {r: with_target_position(table, record.position) for r, table in record.tables.items()}
        keeps = self._settings.keeps_history
        self.parked.load(
            record, {r: parked_upto(table, keeps_history=keeps(table.topic)) for r, table in tables.items()}
        )
        return replace(record, tables=tables)

    def apply(self, batch: TableBatch) -> TableRecord:
        """See Sink.apply."""
        self.pace.start_batch()
        attempts = Retrying(
            retry=retry_if_exception_type(CommitFailedError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        # an error that a retry repairs, a changed protocol among them, is not translated before the last attempt
        with self.parts.targets.writing(batch.schema):
            return attempts(self._strategy(batch.schema).apply, batch)

    def publish(self, record: Published) -> None:
        """See Sink.publish."""
        hit("delta_before_publish")
        table = self._opened()
        table.write(record)
        self.parts.published.remember(record)
        self.parked.compact()
        self.pace.end_batch()
        self._upkeep.turn(table.cuts, self.parts.targets.by_uri)

    def pin(self, record: Published) -> str:
        """See Sink.pin; the upkeep of this driver leaves the versions alone until they are released."""
        versions = readable_versions(record, self.parts.targets)
        handle = json.dumps(versions, sort_keys=True)
        self._upkeep.pin(handle, versions)
        return handle

    def release(self, handle: str) -> None:
        """See Sink.release."""
        self._upkeep.release(handle)

    def close(self) -> None:
        """See Sink.close."""
        self.parts.close()
        self._record_table = None

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """See ParkingSink.parking_limits."""
        return self._settings.dead_letters_of(schema)

    def image_mask(self, schema: TableSchema) -> ImageMask:
        """See ParkingSink.image_mask."""
        return self.parts.targets.shape(schema).beside

    def keeps_history(self, schema: TableSchema) -> bool:
        """See ParkingSink.keeps_history."""
        return self._settings.keeps_history(schema.topic)

    def target_position(self, schema: TableSchema) -> int:
        """See ParkingSink.target_position."""
        with self.parts.targets.lock(schema):
            position = self._strategy(schema).rows_upto(self.parts.targets.open(schema))
        self.parked.load_unpublished(schema.relation, position)
        return position

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See ParkingSink.find_refused."""
        with self.parts.targets.writing(batch.schema):
            return self._strategy(batch.schema).refused(batch, limit)

    def _strategy(self, schema: TableSchema) -> KeepingStrategy:
        return self._history if self._settings.keeps_history(schema.topic) else self._latest

    def _opened(self) -> PublishedTable:
        if self._record_table is None:
            raise ValueError(f"sink {self.name!r} is not open")
        return self._record_table
