"""An opened sink: its loop over the change log, its streaming query, and its registration as a consumer of the log.

`SinkRunner` creates an `OpenedSink` when it opens the sink. It closes this object once, and never opens it again.
The runner's thread calls the methods, except for `_apply_micro_batch`, which a thread of Spark calls. Spark's thread
records two facts for the runner: that the first batch has begun, and the exception that ended a batch.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, DeltaSinkDefinition, SearchSinkDefinition
from cdc.errors import LogError, LogTrimmed, SinkError
from cdc.failpoint import hit
from cdc.file_modes import make_private_directory
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.range_folder import RangeFolder
from pipelines.runtime.consumer_registration import ConsumerRegistration, pinned_in
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_lease import SinkLeases
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.runtime.throttle import ThrottleState
from pipelines.sink_factory import build_sink, keeps_history
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.sink import DeltaSink as DeltaTarget
from pipelines.source.options import tables_option

MAX_ROWS: Final = 200_000
"""Rows per micro-batch: about half a second of folding on two cores."""


class FirstBatchGate:
    """Lets streaming queries start one after the other, because simultaneous starts slow each other down.

    A query has started when its first batch begins.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: object = None

    def enter(self, owner: object) -> bool:
        """Give the gate to `owner` if no other sink has it; return whether `owner` now has it."""
        with self._lock:
            self._owner = self._owner or owner
            return self._owner is owner

    def leave(self, owner: object) -> None:
        """Free the gate if `owner` has it: the first batch of its query has begun, or the sink is closed."""
        with self._lock:
            if self._owner is owner:
                self._owner = None


@dataclass(frozen=True, slots=True)
class SinkParts:
    """Services that all sinks of an apply process share."""

    cuts: CutRequests
    pauses: ReplayPauses
    figures: metrics.Metrics
    starting: Future[SparkSession]
    """The Spark session; its JVM takes seconds to start."""
    leases: SinkLeases | None = None
    """The leases on the sinks; None if no other process can fill the same sinks."""
    catalog: Catalog | None = None
    """The catalog with the commands about dead letters; None: the sinks answer no such commands."""
    first_batch: FirstBatchGate = field(default_factory=FirstBatchGate)
    batch_rows: int = MAX_ROWS
    """Approximate maximum of rows per micro-batch."""

    @property
    def has_spark_failed(self) -> bool:
        """Whether Spark failed to start; if so, the apply process ends."""
        return self.starting.done() and self.starting.exception() is not None


QUERY_INTERVAL: Final = 1.0
"""Minimum seconds between the starts of two batches of a streaming query; planning a batch takes 0.2 s of two cores.

Small ranges of the log do not wait for the query: the runner of the sink applies them.
"""
KEY_INDEXES: Final = "key-index"
"""Name of the folder with the key indexes of all Delta sinks, next to the checkpoints of the streaming queries.

A key index finds the rows of a target by key, without reading the target.
"""


class OpenedSink:
    """One opened sink with its loop, its streaming query and its registration, which are closed together."""

    def __init__(
        self,
        definition: Definition,
        sink: DeltaSinkDefinition | SearchSinkDefinition,
        parts: SinkParts,
        progress: SinkFigures,
    ) -> None:
        self._definition, self._settings, self._parts, self._progress = definition, sink, parts, progress
        checkpoint = definition.spark.checkpoint.removeprefix("file://")
        self.sink = build_sink(sink, f"{checkpoint}/{KEY_INDEXES}/{sink.name}" if checkpoint else None)
        try:
            if parts.starting.done():
                self.sink.attach(parts.starting.result())
            self._log = LogReader(definition.log.root)
            fold = RangeFolder(self._log, sink.name, sink.tables, keeps_history(sink))
            self.loop = SinkLoop(self.sink, fold, parts.cuts, progress)
            self.loop.open()
            self._registration = ConsumerRegistration(definition.log.root, self._log.log_id, sink)
        except BaseException:
            self.sink.close()
            raise
        if isinstance(self.sink, DeltaTarget):
            progress.commit_rate, progress.external_commits = self.sink.commit_rate, self.sink.external_commits
            progress.not_indexed = self.sink.not_indexed
        self._throttle = (
            None if progress.commit_rate is None else ThrottleState(progress.commit_rate, self._is_batch_urgent)
        )
        self._query: StreamingQuery | None = None
        self._checkpoint: Path | None = None
        self._batch_error: Exception | None = None
        self.has_first_batch = False
        """Whether Spark has begun the first batch of the query; set by Spark's thread."""

    @property
    def is_throttled(self) -> bool:
        """Whether the next batch has to wait because earlier batches rewrote too many bytes per second."""
        return self._throttle is not None and self._throttle.is_waiting

    @property
    def is_batch_due(self) -> bool:
        """Whether the batch interval of the definition has passed since the last batch began."""
        return time.monotonic() - self.loop.batch_began >= self._definition.spark.trigger

    @property
    def has_stopped_query(self) -> bool:
        """Whether the streaming query has ended, although the runner did not stop it."""
        return self._query is not None and not self._query.isActive

    @property
    def has_progress(self) -> bool:
        """Whether the streaming query has completed at least one batch."""
        return self._query is not None and bool(self._query.lastProgress)

    def register(self, *, at_once: bool = False) -> None:
        """Register the lowest applied position of the sink's tables. Retention can then trim the log up to there.

        at_once: write the registration even if its interval has not passed.
        """
        applied = self.loop.consumed_position
        self._registration.report(applied, pinned_in(self._log, applied), at_once=at_once)

    def start_query(self, session: SparkSession) -> None:
        """Apply to lagging tables the changes up to the sink's position, then start the streaming query there."""
        self.sink.attach(session)
        for table in self.loop.lagging_tables:
            self.loop.catch_up(table, session)
        base = Path(self._definition.spark.checkpoint.removeprefix("file://"))
        make_private_directory(base)
        self._checkpoint = Path(tempfile.mkdtemp(prefix=f"{self._settings.name}-", dir=base))
        rows = (
            session.readStream.format("cdc")
            .option("path", self._definition.log.path)
            .option("storage", self._definition.log.storage.to_json())
            .option("tables", tables_option(self._settings.tables))
            .option("boundaries", "true")  # so that Spark also makes a batch if only the position moved
            .option("maxRowsPerTrigger", str(self._parts.batch_rows))
            .option("startingPosition", str(self.loop.position))
            .load()
        )
        self._query = (
            rows.writeStream.foreachBatch(self._apply_micro_batch)
            # on this machine, even if a cluster has another default store; unquoted, because Hadoop does not decode %20
            .option("checkpointLocation", f"file://{self._checkpoint}")
            .queryName(f"{self._definition.name}-{self._settings.name}")
            .trigger(processingTime=f"{int(max(self._definition.spark.trigger, QUERY_INTERVAL) * 1000)} milliseconds")
            .start()
        )

    def raise_query_error(self) -> None:
        """Raise the error that ended the streaming query; raise SinkError if it ended without an error."""
        raised = self._query.exception() if self._query else None
        raise (
            self._batch_error
            or raised
            or SinkError(f"the streaming query of sink {self._settings.name!r} ended without an error message")
        )

    def is_trimmed(self) -> bool:
        """Whether the log no longer contains the changes after the sink's position."""
        try:
            LogReader(self._definition.log.root).latest_boundary(self.loop.position)
        except LogTrimmed:
            return True
        except LogError:
            return False
        return False

    def close(self) -> None:
        """Wait for the running batch, stop the query, close the sink, and remove the query's checkpoint."""
        if self._throttle is not None:
            self._throttle.stop()
        self.loop.drain()
        if self._query is not None:
            self._query.stop()
        self.register(at_once=True)
        self.sink.close()
        if self._checkpoint is not None:
            shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._parts.first_batch.leave(self)

    def _is_batch_urgent(self) -> bool:
        """Return whether the next batch must not be throttled.

        A request about a cut or a parked row waits for the batch, or the batch has reached its maximum size.
        """
        if self.loop.quarantine.requested_relations or self._parts.cuts.has_requests(self._settings.name):
            return True
        try:
            self._log.refresh()
            full = self._log.latest_boundary(self.loop.position, self._parts.batch_rows)
            return full < self._log.latest_boundary(self.loop.position)
        except LogError:
            return True  # the batch itself raises the error

    def _apply_micro_batch(self, rows, batch_id):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Spark inspects it
        self.has_first_batch = True
        self._progress.awaits_spark = False
        self._parts.first_batch.leave(self)
        hit("after_offsets")
        try:
            end = _end_of_batch(self._checkpoint, batch_id)  # type: ignore[arg-type]
            self.loop(rows, end)
            hit("before_commits")
            if self._throttle is not None:
                # inside the batch, so that Spark plans the next one afterwards, with all rows that are durable then
                self._throttle.wait()
        except Exception as exc:
            self._batch_error = exc  # Spark forwards only its text
            raise


def _end_of_batch(checkpoint: Path, batch: int) -> Position:
    """Return the last position of a batch, from the offset log that Spark writes before it runs the batch."""
    return Position(json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])["position"])
