"""Delta sink: writes one Delta table per source table, and one published record that names the cut which readers see.

The sink opens and recovers the targets, passes each batch to the merge strategy of its table, and publishes. The
docstring of the package lists the functions that process a batch.

The guarantee is effectively once. If two drivers write to the sink, `publish` refuses the second one. On a local or S3
store, Spark cannot detect a commit that another driver makes at the same time. There, between two publishes, only the
lease keeps a second driver from writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from sys import intern
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
from deltalake.exceptions import CommitFailedError, DeltaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cdc.atomic_file import SyncFailed
from cdc.errors import MergeNeedsFileSystem, SinkUnavailable, TargetDamaged, TargetUnusable
from cdc.failpoint import hit
from cdc.table import TableSchema
from pipelines.folding.folded_parts import FoldedParts
from pipelines.sinks.contract import (
    DeadLetterSettings,
    ImageMask,
    Published,
    RefusedParts,
    RefusedRow,
    SchemasAt,
    TableBatch,
    TableRecord,
    no_schemas,
)
from pipelines.sinks.delta.bulk_load import BulkLoad
from pipelines.sinks.delta.damaged_commits import remove_damaged_commits
from pipelines.sinks.delta.delta_target import DeltaTarget, rewritten_bytes
from pipelines.sinks.delta.executor_merge import count_nulled_in_parts
from pipelines.sinks.delta.history_strategy import History
from pipelines.sinks.delta.latest_state_strategy import LatestState
from pipelines.sinks.delta.maintenance import TargetMaintenance
from pipelines.sinks.delta.published_cuts_table import PublishedTable
from pipelines.sinks.delta.reconcile_at_open import (
    follow_rules,
    go_back,
    parked_upto,
    readable_versions,
    with_target_position,
)
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from pipelines.sinks.record_after_batch import applied_state
from pipelines.types.families import family_of
from pipelines.types.nulled_values import count_nulled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ATTEMPTS: Final = 5
_PARALLEL: Final = 4
"""Maximum number of tables that are merged at once; more of them would need more memory."""
_PARALLEL_FROM: Final = 5_000
"""`Sink.parallel_from` on a disk. With fewer rows, four threads need twice the CPU of one, and 1.5 times as long."""


class MergeStrategy(Protocol):
    """Merges batches into targets, and decides what a target keeps of each row. The caller has the table lock.

    The settings of a table choose its strategy: LatestState keeps the latest state of each row. History keeps versions,
    rows marked as deleted, or every change. A strategy need not know whether several tables share the target, because
    TargetPart handles that.
    """

    replaced_by_copy: bool
    """Whether a full copy replaces every row of the target."""

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Change the target's columns as the batch requires, then merge the batch.

        The last commit contains the `txn` of the batch's range. The caller has already given `batch.schema` the columns
        and types of this target. Raises CommitFailedError if another client committed first.
        """

    def find_refused(self, target: DeltaTarget, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See pipelines.sinks.contract.ParkingSink.find_refused."""

    def find_refused_in_parts(self, target: DeltaTarget, batch: TableBatch, limit: int) -> RefusedParts:
        """See pipelines.sinks.contract.ExecutorSink.find_refused_in_parts."""

    def needs_spark(self, target: DeltaTarget, batch: TableBatch, parts: FoldedParts) -> bool:
        """Return whether Spark itself has to read or write the target, to merge the parts of a batch."""

    def rows_upto(self, target: DeltaTarget) -> int:
        """Return the position up to which the target contains all changes of its table."""


class DeltaSink:
    """A sink that writes Delta tables; its methods follow the contract pipelines.sinks.contract.Sink."""

    parallel = _PARALLEL

    def __init__(self, settings: DeltaSettings, spark: SparkSession | None = None) -> None:
        self.name = settings.name
        self._settings = settings
        self.parts = DeltaSinkParts.of(settings)
        self._latest = LatestState(self.parts)
        self._history: MergeStrategy = History(self.parts)
        self._record_table: PublishedTable | None = None
        self._by_driver: set[int] = set()
        """Relations whose batches need a Spark that reaches the target."""
        self.parallel_from = 0 if "://" in settings.path else _PARALLEL_FROM
        self._maintenance = TargetMaintenance(settings.upkeep, rewriter=self.parts.rewriter)
        self.commit_rate, self.external_commits = self.parts.commit_rate, self.parts.external_commits.report
        self.nulled = self.parts.nulled
        self.parked, self.index_notice = self.parts.parked, self.parts.writers.indexed.notice
        self._attempts = Retrying(
            retry=retry_if_exception_type(CommitFailedError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        if spark is not None:
            self.attach(spark)

    def attach(self, spark: SparkSession) -> None:
        """See Sink.attach. From now on Spark writes large batches, if its session supports Delta."""
        self.parts.attach(spark)

    def bulk_load(self) -> BulkLoad:
        """Return what fills the empty targets of the sink with all rows of a table, without merges."""
        return BulkLoad(self.parts, self.record)

    def open(self, log_id: str, schemas_at: SchemasAt = no_schemas) -> Published | None:
        """See Sink.open. Raises DeltaJarMissing if the writer is Spark and its session does not support Delta."""
        self.parts.writers.check(self.name)
        self.parts.targets.log_id = log_id
        self._record_table = PublishedTable.open(self._settings.record_uri, log_id, self._settings.upkeep.retain)
        record = self._record_table.record()
        if record is None:
            self.parked.load(Published(0, 0), {})
            return None
        self.parts.commits.begin(record.versions)
        for uri, version in record.versions.items():
            with suppress(TargetUnusable):  # raised again when the target is opened
                remove_damaged_commits(uri, version)
        record = follow_rules(self._record_table, self._settings.record_uri, record, self._settings.target_rules)
        record = go_back(self._record_table, record, schemas_at)
        self.parts.published.remember(record)
        tables = {r: with_target_position(table, record.position) for r, table in record.tables.items()}
        keeps = self._settings.keeps_history
        self.parked.load(
            record, {r: parked_upto(table, keeps_history=keeps(table.topic)) for r, table in tables.items()}
        )
        return replace(record, tables=tables)

    def apply(self, batch: TableBatch) -> TableRecord:
        """See Sink.apply."""
        self.commit_rate.start_batch()
        # `writing` is outside of the retries, so that it translates only the error of the last attempt
        with self.parts.targets.writing(batch.schema):
            return self._attempts(self._apply_once, batch)

    def _apply_once(self, batch: TableBatch) -> TableRecord:
        """Merge the batch into the newest version of the target, unless it was merged before; return the table's
        record.
        """
        strategy, targets = self._strategy(batch.schema), self.parts.targets
        target = targets.open_for(batch)
        with self._watch(target, batch.schema.topic):
            if (target.applied or -1) < batch.upto:
                self._check_reach(target, batch)
                targets.check_columns(target, batch, replaced=batch.ends_copy and strategy.replaced_by_copy)
                since = target.version
                with _conflicts(target):
                    strategy.merge(target, targets.in_target_columns(target, batch))
                target.current.check_kept(since)
                self._count_nulled(batch)
        # after a crash the target may contain changes beyond upto; the record must then have that later position
        rows_upto = max(strategy.rows_upto(target), targets.erased_upto(target, batch.schema.relation))
        return self.record(batch, target, max(batch.upto, rows_upto))

    def _count_nulled(self, batch: TableBatch) -> None:
        shape = self.parts.targets.shape(batch.schema)
        count = 0 if batch.rows is None else count_nulled(batch.rows, shape.schema, shape.policy)
        if batch.parts is not None:
            count += count_nulled_in_parts(batch.parts, shape)
        if count:
            self.nulled.add(batch.schema.topic, count)

    @contextmanager
    def _watch(self, target: DeltaTarget, topic: str) -> Iterator[None]:
        """Report commits that other clients made to the target before or during the `with` block. Count the bytes that
        the block rewrites.
        """
        commits, indexed, version = self.parts.external_commits, self.parts.writers.indexed, target.version
        files = None if indexed.has_open_index(target) else target.actions
        commits.before(target, topic, self.parts.published.versions.get(target.uri))
        yield
        copied = target.current.copied if target.version == version + 1 else None
        if target.version != version and copied is None:
            before = target.actions_at(version) if files is None else files
            copied = rewritten_bytes(before, target.actions)
        if copied:
            self.commit_rate.add_rewritten(topic, copied)
        commits.after(target, topic)

    def record(self, batch: TableBatch, target: DeltaTarget, position: int) -> TableRecord:
        """Return the record of a table after its batch was merged; position: the position up to which the target has
        all rows.
        """
        schema, before = batch.schema, self.parts.published.records.get(batch.schema.relation)
        return TableRecord(
            relation=schema.relation,
            topic=schema.topic,
            target=target.uri,
            position=position,
            version=target.version,
            state=applied_state(batch, before, complete=target.is_complete).value,
            reason=None,
            schema=intern(schema.to_json().decode()),  # kept cuts share the text
            merged=target.applied,
        )

    def publish(self, record: Published) -> None:
        """See Sink.publish."""
        hit("delta_before_publish")
        table, commits = self._opened(), self.parts.commits
        try:
            table.write(record, unsynced=commits.unsynced(record.versions))
        except SyncFailed as exc:
            # the kernel may have dropped what it could not write, so another fsync would prove nothing
            commits.withdraw(record.versions)
            raise SinkUnavailable(f"the files of sink {self.name!r} cannot be synced to the disk: {exc}") from exc
        commits.confirm(record.versions)
        self.parts.published.remember(record)
        self.parked.compact()
        self.commit_rate.end_batch()
        self._maintenance.turn(table.cuts, self.parts.targets.by_uri)

    def pin(self, record: Published) -> str:
        """See Sink.pin. Maintenance in this driver keeps the files of the pinned versions until they are released."""
        versions = readable_versions(record, self.parts.targets)
        handle = json.dumps(versions, sort_keys=True)
        self._maintenance.pin(handle, versions)
        return handle

    def release(self, handle: str) -> None:
        """See Sink.release."""
        self._maintenance.release(handle)

    def close(self) -> None:
        """See Sink.close."""
        self.parts.close()
        self._record_table = None

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """See ParkingSink.parking_limits."""
        return self._settings.dead_letters_of(schema)

    def image_mask(self, schema: TableSchema) -> ImageMask:
        """See ParkingSink.image_mask."""
        return self.parts.targets.shape(schema).mask_image

    def keeps_history(self, schema: TableSchema) -> bool:
        """See ParkingSink.keeps_history."""
        return self._settings.keeps_history(schema.topic)

    def target_position(self, schema: TableSchema) -> int:
        """See ParkingSink.target_position."""
        with self.parts.targets.lock(schema):
            target = self.parts.targets.existing(schema)
            position = 0 if target is None else self._strategy(schema).rows_upto(target)
        self.parked.load_unpublished(schema.relation, position)
        return position

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See ParkingSink.find_refused."""
        targets = self.parts.targets
        with targets.writing(batch.schema):
            target = targets.open(batch.schema)
            return self._strategy(batch.schema).find_refused(target, targets.in_target_columns(target, batch), limit)

    def takes_parts(self, schema: TableSchema) -> bool:
        """See ExecutorSink.takes_parts. Executors write the latest state of a table, and every history, if Spark knows
        Delta. The writers `indexed` and `copy-on-write` merge on the driver, also if a rule sets them.
        """
        settings, writers = self._settings, self.parts.writers
        if not writers.by_executors or schema.relation in self._by_driver:
            return False
        types = (family_of(column, settings.types_of(schema.topic)).arrow for column in schema.key)
        by_merge = not settings.keeps_history(schema.topic) and writers.spark_reaches(settings.uri_of(schema))
        if any(map(pa.types.is_floating, types)) and not by_merge:
            return False  # two texts of a float are one key, but may be in two parts; only Delta's MERGE joins them
        return settings.writer_of(schema.topic) in {Writer.AUTO, Writer.SPARK}

    def find_refused_in_parts(self, batch: TableBatch, limit: int) -> RefusedParts:
        """See ExecutorSink.find_refused_in_parts."""
        targets = self.parts.targets
        with targets.writing(batch.schema):
            target = targets.open(batch.schema)
            self._check_reach(target, batch)
            strategy = self._strategy(batch.schema)
            return strategy.find_refused_in_parts(target, targets.in_target_columns(target, batch), limit)

    def _check_reach(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Raise MergeNeedsFileSystem if only Spark could merge the parts of a batch, and cannot reach the target.

        The driver then takes the rows of this table.
        """
        if batch.parts is None or self.parts.writers.spark_reaches(target.uri):
            return
        if self._strategy(batch.schema).needs_spark(target, batch, batch.parts):
            self._by_driver.add(batch.schema.relation)
            raise MergeNeedsFileSystem(
                f"only Spark itself could merge the batch of table {batch.schema.topic!r}, but it has no Hadoop file "
                f"system for target {target.uri!r}: the driver writes the table from the next attempt on"
            )

    def _strategy(self, schema: TableSchema) -> MergeStrategy:
        return self._history if self._settings.keeps_history(schema.topic) else self._latest

    def _opened(self) -> PublishedTable:
        if self._record_table is None:
            raise ValueError(f"sink {self.name!r} is not open")
        return self._record_table


@contextmanager
def _conflicts(target: DeltaTarget) -> Iterator[None]:
    """Raise CommitFailedError if the block fails after another client has committed to the target.

    The client may have deleted a file that the merge reads, which is no damage: the merge is repeated.
    """
    try:
        yield
    except CommitFailedError:
        raise
    except (DeltaError, pa.ArrowInvalid, Py4JJavaError, PySparkException, TargetDamaged) as exc:
        if not target.current.is_overtaken:
            raise
        raise CommitFailedError("another client committed to the target while a merge read it") from exc
