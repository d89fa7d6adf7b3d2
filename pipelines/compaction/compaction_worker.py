"""The thread of the apply process that compacts the log: at an interval, and for commands from the catalog.

No sink waits for a compaction. Spark jobs of a compaction run in a separate scheduler pool, which gets the capacity
that the sinks do not use. While the sinks catch up, or copy a table, the compaction at the interval is put off, by one
interval at most: it would take their cores, and what it wrote would soon be merged with the rest of the copy. A failed
compaction is logged and tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

import structlog

from cdc import metrics
from cdc.bucket_files import Root
from cdc.catalog import Catalog
from cdc.catalog.commands import COMPACT, Command
from cdc.config import Definition
from cdc.errors import CdcError, LogError
from cdc.log.compacted_table import read_compacted_state
from cdc.log.reader import LogReader, log_exists
from cdc.log.trim_plan import request_trim
from pipelines.compaction.compaction_steps import CompactionLimits, CompactionResult, StartSpark, compact
from pipelines.runtime.spark_session import COMPACTION_POOL, SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST_AFTER: Final = 60.0
"""Maximum seconds from the start of the process to its first compaction; meanwhile the sinks open."""
CHECK_EVERY: Final = 1.0
"""Maximum seconds between two checks for compaction commands in the catalog."""
RETRY_AFTER: Final = 60.0
"""Maximum seconds until a failed compaction is tried again."""

log = structlog.get_logger("compaction")


class CompactionWorker(Thread):
    """Thread that compacts the log of one pipeline until `stop` is set.

    `limits` and `longest_delay` may be changed before the start.
    """

    def __init__(
        self, definition: Definition, catalog: Catalog, recorder: metrics.Metrics, spark: StartSpark, stop: Event
    ) -> None:
        """spark: called for a compaction that needs Spark; on a cluster, every compaction does."""
        super().__init__(name="compaction", daemon=True)
        self._root, self._every = definition.log.root, definition.log.compact.every
        self._of_views = definition.log.of_views if definition.views else None
        self._pipeline = definition.name
        self._catalog = catalog
        self._metrics = recorder
        self._spark, self._stop_event = spark, stop
        self._is_local = SparkSettings.of(definition, "").local
        self.limits = CompactionLimits()
        self.sinks_catch_up: Callable[[], bool] = lambda: False
        """Whether the sinks catch up or copy a table, so that the compaction at the interval is put off."""
        self.longest_delay = self._every
        """Maximum seconds by which a compaction at the interval is put off."""

    def run(self) -> None:
        """Compact the log at the interval, and on commands from the catalog, until `stop` is set."""
        due = time.monotonic() + min(self._every, FIRST_AFTER)
        while not self._stop_event.wait(min(CHECK_EVERY, self._every or CHECK_EVERY)):
            for command in self._pending_commands():
                self._answer(command)
            if self._every and self._is_due(due):
                result = self._compact(self._root, everything=False)
                if self._of_views is not None:
                    self._compact(self._of_views, everything=False)
                delay = min(self._every, RETRY_AFTER) if isinstance(result, CdcError) else self._every
                due = time.monotonic() + delay

    def _is_due(self, due: float) -> bool:
        """Return whether the compaction of the interval that ended at `due`, on the monotonic clock, begins now."""
        late = time.monotonic() - due
        return late >= self.longest_delay or (late >= 0 and not self.sinks_catch_up())

    def _answer(self, command: Command) -> None:
        result = self._compact(self._root, everything=bool(command.payload.get("everything")))
        if isinstance(result, CdcError):
            answer: dict[str, Any] = {"error": result.to_json()}
        else:
            answer = {"outcome": result.to_json(), "summary": result.summary}
        try:
            self._catalog.commands.finish(command.id, answer, ok=isinstance(result, CompactionResult))
        except CdcError as exc:  # the repeated compaction finds nothing to do
            log.warning(
                "cannot record the result of a compaction in the catalog; the command stays open and runs again",
                id=command.id,
                code=exc.code,
                message=exc.message,
            )

    def _compact(self, root: Root, *, everything: bool) -> CompactionResult | CdcError:
        began = time.monotonic()
        try:
            if root == self._of_views and not log_exists(root):  # no view was computed yet
                return CompactionResult()
            spark = self._session if self._is_local else self._session()
            result = compact(spark, root, everything=everything, limits=self.limits)
            if root == self._root:  # the metrics are those of the change log
                self._record_metrics(result, time.monotonic() - began)
        except Exception as exc:  # noqa: BLE001 - no error of a compaction may stop the sinks
            return self._record_failure(exc)
        if result.rows_in or result.merged:
            request_trim(root)
            seconds = round(time.monotonic() - began, 1)
            log.info("compacted the log", log=str(root), outcome=result.to_json(), seconds=seconds)
        return result

    def _session(self) -> SparkSession | None:
        session = self._spark()
        if session is not None:  # a local property applies to this thread only
            session.sparkContext.setLocalProperty("spark.scheduler.pool", COMPACTION_POOL)
        return session

    def _record_failure(self, exc: Exception) -> CdcError:
        error = (
            exc
            if isinstance(exc, CdcError)
            else LogError(f"the compaction of the log failed with {type(exc).__name__}: {str(exc)[:300]}")
        )
        if not self._stop_event.is_set():  # while stopping, the session may already be closed
            self._metrics.add(metrics.ERRORS, 1, self._pipeline, "apply", error.code)
            log.warning(
                "cannot compact the log; the sinks continue, and the next compaction tries again",
                code=error.code,
                message=error.message,
                exc_info=exc,
            )
        return error

    def _record_metrics(self, result: CompactionResult, seconds: float) -> None:
        if result.rows_in or result.merged:
            self._metrics.set(metrics.COMPACTION_CHANGES, result.rows_in, self._pipeline)
            self._metrics.set(metrics.COMPACTION_SECONDS, seconds, self._pipeline)
        self._metrics.add(metrics.COMPACTED_ROWS, result.rows_in, self._pipeline)
        self._metrics.set(metrics.LOG_HORIZON, int(result.horizon), self._pipeline)
        state = read_compacted_state(self._root)
        self._metrics.set(metrics.COMPACTED_BYTES, sum(run.size for run in state.runs) if state else 0, self._pipeline)
        self._metrics.set(metrics.LOG_OLDEST, int(LogReader(self._root).oldest), self._pipeline)

    def _pending_commands(self) -> list[Command]:
        try:
            return self._catalog.commands.pending(self._pipeline, COMPACT)
        except CdcError as exc:
            log.warning(
                "cannot read compaction commands from the catalog; the commands wait until the catalog can be read",
                code=exc.code,
                message=exc.message,
            )
            return []
