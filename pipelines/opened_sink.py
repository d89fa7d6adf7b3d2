"""An opened sink: its loop over the change log, its streaming query, and its registration as a consumer of the log.

`SinkRunner` creates an `OpenedSink` when it opens the sink. It closes this object once, and never opens it again.
The runner's thread calls the methods, except for `_begin_query_batch` and `_end_query_batch`, which a thread of Spark
calls.
"""

from __future__ import annotations

import time
from typing import Final

from pyspark.sql import SparkSession

from cdc.config import Definition, EngineChoice
from cdc.config.sinks import DefinedSink
from cdc.errors import LogError, LogTrimmed
from cdc.log.reader import LogReader, log_exists
from pipelines.engine_decision import Decision, Engine
from pipelines.executor_cores import ExecutorCores
from pipelines.large_range_query import LargeRangeQuery
from pipelines.range_folder import RangeFolder
from pipelines.runtime.consumer_registration import sink_registration
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.runtime.throttle import ThrottleState
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.sink_parts import SinkParts
from pipelines.sinks.contract import ObservedSink, SparkAwaited

SHARE: Final = 6
"""Multiple of the duration of a batch after which the next one begins, if LONGEST allows it."""
LONGEST: Final = 1.5
"""Maximum batch interval as a multiple of the one in the definition."""
KEY_INDEXES: Final = "key-index"
"""Name of the folder with the key indexes of all Delta sinks, next to the checkpoints of the streaming queries.

A key index finds the rows of a target by key, without reading the target.
"""


def batch_interval(shortest: float, batch_seconds: float, tables: int) -> float:
    """Return the seconds from the start of a batch to the start of the next one.

    shortest: the batch interval of the definition. batch_seconds, tables: how long the last batch took, and how many
    tables it had. A batch of several tables takes long because each table has fixed costs. The interval is then longer,
    so that a batch takes a sixth of it, if LONGEST allows it.
    """
    return max(shortest, min(batch_seconds * SHARE, shortest * LONGEST)) if tables > 1 else shortest


def has_log(definition: Definition, sink: DefinedSink) -> bool:
    """Return whether the log that the sink applies has something; that of views begins later than the change log."""
    root = definition.log_of(sink)
    return log_exists(root) and LogReader(root).durable is not None


class OpenedSink:
    """One opened sink with its loop, its streaming query and its registration, which are closed together."""

    def __init__(
        self,
        definition: Definition,
        sink: DefinedSink,
        parts: SinkParts,
        progress: SinkFigures,
    ) -> None:
        self._definition = definition
        self._settings = sink
        self._parts = parts
        self._progress = progress
        checkpoint = definition.spark.checkpoint.removeprefix("file://")
        self.sink = build_sink(sink, f"{checkpoint}/{KEY_INDEXES}/{sink.name}" if checkpoint else None)
        try:
            if (session := parts.spark.available) is not None:
                self.sink.attach(session)  # a sink with writer spark cannot be opened without it
            self._log = LogReader(definition.log_of(sink))
            self._fold = RangeFolder(self._log, sink.name, sink.tables, sink.keeps_history)
            self._fold.limits, self._fold.choice = parts.limits, definition.spark.engine
            self.loop = SinkLoop(self.sink, self._fold, parts.cuts, progress)
            self.loop.open()
            self._registration = sink_registration(definition.log_of(sink), self._log.log_id, sink)
        except BaseException:
            self.sink.close()
            raise
        if isinstance(self.sink, ObservedSink):
            progress.commit_rate, progress.external_commits = self.sink.commit_rate, self.sink.external_commits
            progress.index_notice, progress.nulled = self.sink.index_notice, self.sink.nulled
        self._throttle = (
            None if progress.commit_rate is None else ThrottleState(progress.commit_rate, self._is_batch_urgent)
        )
        self._cores = parts.cores or ExecutorCores(parts.spark, definition.spark.master)
        self._core_wanted_at: float | None = None
        """Time since which a batch waits for a core of the cluster, on the monotonic clock; None if none does."""
        self._is_attached = self._has_tried_to_catch_up = False
        self._opened_at = self.loop.position
        self.query: LargeRangeQuery | None = None
        """The streaming query; None while no range needs it."""

    @property
    def is_throttled(self) -> bool:
        """Whether the next batch has to wait because earlier batches rewrote too many bytes per second."""
        return self._throttle is not None and self._throttle.is_waiting

    @property
    def seconds_to_batch(self) -> float:
        """Seconds until the batch interval has passed since the last batch began; 0 if it has."""
        loop = self.loop
        interval = batch_interval(self._definition.spark.trigger, loop.batch_seconds, loop.batch_tables)
        return max(0.0, loop.batch_began + interval - time.monotonic())

    @property
    def has_progress(self) -> bool:
        """Whether the sink has published at least one batch since it was opened."""
        return self.loop.position > self._opened_at

    @property
    def is_query_idle(self) -> bool:
        """Whether the streaming query can stop: no range has needed Spark for a while, and no batch waits."""
        query, seconds = self.query, self._parts.query_idle
        if query is None or self._definition.spark.engine is EngineChoice.SPARK:
            return False
        return query.idle_seconds > seconds and not self.is_throttled

    def advance(self) -> Decision:
        """Apply the next slice of the log in this process, unless it is for Spark; return what was decided."""
        try:
            if self.loop.advance(self._parts.limits.slice_rows, self._cores.now):
                return self.loop.decision
        except SparkAwaited as exc:
            return Decision(Engine.SPARK, str(exc))
        return Decision(Engine.SPARK, self.loop.decision.spark_reason or "a table has to be caught up")

    def awaits_core(self, decision: Decision) -> bool:
        """Return whether the cluster has given no core for a while, although what waits is for its executors."""
        cores = self._cores.now()
        if not decision.wants_spark or not cores.is_cluster or cores.free or self._parts.spark.available is None:
            self._core_wanted_at = None
            return False
        self._core_wanted_at = self._core_wanted_at or time.monotonic()
        return time.monotonic() - self._core_wanted_at >= self._parts.core_wait

    def register(self, *, at_once: bool = False) -> None:
        """Register the lowest applied position of the sink's tables. Retention can then trim the log up to there.

        at_once: write the registration even if its interval has not passed.
        """
        applied = self.loop.consumed_position
        self._registration.report(applied, self._log.pinned_version(applied), at_once=at_once)

    def catch_up(self) -> None:
        """Give the sink the Spark session once there is one, and catch up the tables that lagged when the sink opened.

        Raises SparkAwaited if there is no session and a range or a merge is too large for this process; later calls do
        nothing until there is one.
        """
        session = self._parts.spark.available
        if session is not None and not self._is_attached:
            self.sink.attach(session)
            self._fold.is_cluster = self._cores.now().is_cluster
            self._is_attached = True
        if self.loop.has_caught_up or (session is None and self._has_tried_to_catch_up):
            return
        self._has_tried_to_catch_up = True
        self.loop.catch_up_all(session)

    def offer_cut(self) -> None:
        """Hand the published cut over to the views, if they read this sink."""
        cuts = self._parts.input_cuts
        if cuts is not None and cuts.sink == self._settings.name and self.loop.position:
            cuts.offer(self.sink, self.loop.record)

    def start_query(self, session: SparkSession) -> None:
        """Start the streaming query at the sink's position."""
        query = LargeRangeQuery(self.loop, self._begin_query_batch, self._end_query_batch)
        limits = self._parts.limits.micro_batch(self._definition.spark.engine, is_cluster=self._fold.is_cluster)
        query.start(session, self._definition, self._settings, limits)
        self.query = query

    def stop_query(self) -> None:
        """Stop the streaming query after its running batch."""
        query, self.query = self.query, None
        if query is not None:
            query.stop()
        self._parts.first_batch.leave(self)

    def is_trimmed(self) -> bool:
        """Whether the log no longer contains the changes after the sink's position."""
        try:
            LogReader(self._definition.log_of(self._settings)).latest_boundary(self.loop.position)
        except LogTrimmed:
            return True
        except LogError:
            return False
        return False

    def close(self) -> None:
        """Wait for the running batch, stop the query, and close the sink."""
        if self._throttle is not None:
            self._throttle.stop()
        self.loop.drain()
        self.stop_query()
        self.register(at_once=True)
        self.sink.close()

    def _is_batch_urgent(self) -> bool:
        """Return whether the next batch must not be throttled.

        A request about a cut or a parked row waits for the batch, or the batch has reached its maximum size.
        """
        if self.loop.quarantine.requested_relations or self._parts.cuts.open(self._settings.name):
            return True
        try:
            self._log.refresh()
            full = self._log.latest_boundary(self.loop.position, self._parts.limits.slice_rows)
            return full < self._log.latest_boundary(self.loop.position)
        except LogError:
            return True  # the batch itself raises the error

    def _begin_query_batch(self) -> None:
        self._cores.wait()  # the runner applies slices meanwhile, because the batch has not begun
        self._progress.awaits_spark = self._progress.awaits_core = False
        self._parts.first_batch.leave(self)

    def _end_query_batch(self) -> None:
        if self._throttle is not None:
            self._throttle.wait()
