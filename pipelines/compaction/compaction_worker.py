"""Upkeep: the apply process compacts the log in a thread of its own, one compaction at a time, beside the sinks.

No sink waits for it: what Spark does for it comes from a pool that gets what the sinks leave, and a failure is told
and tried again. Killed anywhere, the log is as before the compaction or as after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

import structlog

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.commands import COMPACT, Command
from cdc.config import Definition
from cdc.errors import CdcError, LogError
from cdc.log import retention_worker
from cdc.log.compacted_state import read_compacted_state
from cdc.log.reader import LogReader
from pipelines.compaction.compact import CompactionLimits, CompactionResult, compact, is_large
from pipelines.runtime.session import COMPACTION_POOL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST_AFTER: Final = 60.0
"""Seconds from the start to the first look: the sinks catch up first."""
LOOK_EVERY: Final = 1.0
"""Seconds between two looks for who asks."""
AGAIN_AFTER: Final = 60.0
"""Seconds until a compaction that failed is tried again."""

log = structlog.get_logger("compaction")

Spark = Callable[[], "SparkSession | None"]


class CompactionWorker(Thread):
    """Compacts one pipeline's log now and then, and when asked, until stop is set; `limits` may be set before."""

    def __init__(
        self, definition: Definition, catalog: Catalog, figures: metrics.Metrics, spark: Spark, stop: Event
    ) -> None:
        """spark: waits for the session; None from it means that this process folds by itself."""
        super().__init__(name="compaction", daemon=True)
        self._root, self._every = definition.log.root, definition.log.compact.every
        self._pipeline, self._catalog, self._figures = definition.name, catalog, figures
        self._spark, self._stop_event = spark, stop
        self.limits = CompactionLimits()

    def run(self) -> None:
        """Look for what is due."""
        due = time.monotonic() + min(self._every, FIRST_AFTER)
        while not self._stop_event.wait(min(LOOK_EVERY, self._every or LOOK_EVERY)):
            for command in self._asked():
                self._answer(command)
            if self._every and time.monotonic() >= due:
                made = self._compact(everything=False)
                due = time.monotonic() + (min(self._every, AGAIN_AFTER) if isinstance(made, CdcError) else self._every)

    def _answer(self, command: Command) -> None:
        made = self._compact(everything=bool(command.payload.get("everything")))
        if isinstance(made, CdcError):
            said: dict[str, Any] = {"error": made.to_json()}
        else:
            said = {"outcome": made.to_json(), "summary": made.summary}
        try:
            self._catalog.commands.finish(command.id, said, ok=isinstance(made, CompactionResult))
        except CdcError as exc:  # asked again, it finds nothing to do
            log.warning("catalog is unreachable", code=exc.code)

    def _compact(self, *, everything: bool) -> CompactionResult | CdcError:
        began = time.monotonic()
        try:
            session = self._session() if self._is_large(everything=everything) else None
            made = compact(session, self._root, everything=everything, limits=self.limits)
            self._measure(made, time.monotonic() - began)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the sinks go on
            return self._failed(exc)
        if made.rows_in or made.merged:
            retention_worker.request_trim(self._root)
            log.info("compacted", outcome=made.to_json(), seconds=round(time.monotonic() - began, 1))
        return made

    def _is_large(self, *, everything: bool) -> bool:
        return is_large(self._root, everything=everything, large=self.limits.large)

    def _session(self) -> SparkSession | None:
        session = self._spark()
        if session is not None:  # of this thread alone
            session.sparkContext.setLocalProperty("spark.scheduler.pool", COMPACTION_POOL)
        return session

    def _failed(self, exc: Exception) -> CdcError:
        error = exc if isinstance(exc, CdcError) else LogError(f"{type(exc).__name__}: {str(exc)[:300]}")
        if not self._stop_event.is_set():  # else the session was stopped under it
            self._figures.add(metrics.ERRORS, 1, self._pipeline, "apply", error.code)
            log.warning("the log is not compacted", code=error.code, message=error.message, exc_info=exc)
        return error

    def _measure(self, made: CompactionResult, seconds: float) -> None:
        if made.rows_in or made.merged:
            self._figures.set(metrics.COMPACTION_CHANGES, made.rows_in, self._pipeline)
            self._figures.set(metrics.COMPACTION_SECONDS, seconds, self._pipeline)
        self._figures.add(metrics.COMPACTED_ROWS, made.rows_in, self._pipeline)
        self._figures.set(metrics.LOG_HORIZON, int(made.horizon), self._pipeline)
        held = read_compacted_state(self._root)
        self._figures.set(metrics.COMPACTED_BYTES, sum(run.size for run in held.runs) if held else 0, self._pipeline)
        self._figures.set(metrics.LOG_OLDEST, int(LogReader(self._root).oldest), self._pipeline)

    def _asked(self) -> list[Command]:
        try:
            return self._catalog.commands.pending(self._pipeline, COMPACT)
        except CdcError as exc:
            log.warning("catalog is unreachable", code=exc.code)
            return []
