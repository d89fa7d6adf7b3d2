"""Progress: what the apply process tells the catalog of its sinks, once a second, from a thread of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from threading import Event, Lock, Thread
from typing import Final

import structlog

from cdc import metrics
from cdc.catalog import AWAITS_SPARK, Catalog, DeadLetter, ProcessReport, SinkProgress, TableProgress
from cdc.errors import CdcError
from cdc.remedy import complete_remedy
from cdc.stores.published import Published, TableRecord
from pipelines.runtime.external_commits import ExternalCommitReport
from pipelines.runtime.throttle import BatchThrottle, CommitRate

REPORT_EVERY: Final = 0.5
"""Seconds; a process that is silent for five is shown as down."""

log = structlog.get_logger("apply")


class SinkFigures:
    """The latest figures of one sink; the loop writes them, the board reads them."""

    def __init__(
        self, pipeline: str, sink: str, figures: metrics.Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._pipeline, self.sink, self._figures, self._clock = pipeline, sink, figures, clock
        self._record: Published | None = None
        self._lag = 0.0
        self._pending: tuple[int, float] | None = None
        """(end of the batch that is not published yet, since when), over any number of tries."""
        self._rows: dict[int, int] = {}
        self._error: CdcError | None = None
        self._letters: tuple[DeadLetter, ...] | None = None
        self._lock = Lock()
        self._cadence: BatchThrottle | None = None
        self.pace: CommitRate | None = None
        """Of a sink that has one."""
        self.foreign: ExternalCommitReport | None = None
        """What other clients changed in its targets, of a sink that can tell."""
        self.awaits_spark = False
        """Whether nothing can be applied until Spark has started."""

    def begins(self, end: int) -> None:
        """A batch up to there is being made, perhaps not for the first time: the lag grows until it is published."""
        with self._lock:
            if self._pending is None:
                self._pending = end, self._clock()

    def published(self, record: Published, *, lag: float | None, rows: Mapping[int, int]) -> None:
        """A batch was published: rows merged by relation, lag in seconds of its median row; None: it has no rows.

        Then the lag is at most that of its end, so that after a long copy an idle sink is not shown as late.
        """
        with self._lock:
            self._record, self._error = record, None
            if self._pending is not None and record.position >= self._pending[0]:
                self._pending = None
            if lag is None:
                since = self._clock() - record.committed_at / 1e6 if record.committed_at else self._lag
                lag = min(self._lag, max(0.0, since))
            self._lag = lag
            for relation, count in rows.items():
                self._rows[relation] = self._rows.get(relation, 0) + count
        labels = self._pipeline, self.sink
        self._figures.add(metrics.BATCHES, 1, *labels)
        self._figures.add(metrics.APPLY_ROWS, sum(rows.values()), *labels)
        self._figures.set(metrics.SINK_POSITION, record.position, *labels)
        self._figures.set(metrics.SINK_LAG_SECONDS, lag, *labels)
        if rows:
            self._figures.observe(metrics.SINK_LATENCY, lag, *labels)

    def parked(self, letters: tuple[DeadLetter, ...]) -> None:
        """What the sink has set aside."""
        with self._lock:
            self._letters = letters
        self._figures.set(metrics.DLQ_RECORDS, len(letters), self._pipeline, self.sink)

    def to_letters(self) -> tuple[DeadLetter, ...] | None:
        """The rows of the catalog's dead letters; None while nobody has looked."""
        with self._lock:
            return self._letters

    def took(self, seconds: float) -> None:
        """How long the batch took; what it wrote again is told as well."""
        labels = self._pipeline, self.sink
        self._figures.set(metrics.APPLY_SECONDS, seconds, *labels)
        self._figures.observe(metrics.APPLY_DURATION, seconds, *labels)
        for table, commits in {} if self.foreign is None else self.foreign.counted().items():
            self._figures.add(metrics.FOREIGN_COMMITS, commits, *labels, table)
        if self.pace is None:
            return
        before, now = self._cadence, self.pace.cadence
        self._figures.add(metrics.REWRITTEN_BYTES, self.pace.rewritten, *labels)
        if before is not None:
            self._figures.set(metrics.CADENCE, 0.0, *labels, before.table)
        if now is not None:
            self._figures.set(metrics.CADENCE, now.seconds, *labels, now.table)
        self._cadence = now

    def failed(self, error: CdcError) -> None:
        """The sink's query stopped."""
        with self._lock:
            self._error = error
        self._figures.add(metrics.ERRORS, 1, self._pipeline, "apply", error.code)

    def to_sink(self) -> SinkProgress | None:
        """The row of the catalog's sinks."""
        with self._lock:
            record, error, slowed = self._record, self._error, AWAITS_SPARK if self.awaits_spark else self._cadence
            if record is None and error is None:
                return None
            waits = 0.0 if self._pending is None else self._clock() - self._pending[1]
            moment = datetime.fromtimestamp(record.committed_at / 1e6, UTC) if record and record.committed_at else None
            return SinkProgress(
                sink=self.sink,
                position=record.position if record else 0,
                committed_at=moment,
                lag_seconds=max(self._lag, waits),
                state="failed" if error else "running",
                reason=f"{error.code} {error.message} → {error.fix}" if error else str(slowed) if slowed else None,
            )

    def to_tables(self) -> list[TableProgress]:
        """The rows of the catalog's tables."""
        with self._lock:
            tables = self._record.tables.values() if self._record else ()
            return [
                TableProgress(
                    sink=self.sink,
                    topic=table.topic,
                    state=table.state,
                    reason=complete_remedy(table.reason or "", sink=self.sink, topic=table.topic)
                    or self._worth_knowing(table),
                    position=table.position,
                    version=table.version,
                    rows=self._rows.get(table.relation, 0),
                )
                for table in tables
            ]

    def _worth_knowing(self, table: TableRecord) -> str | None:
        """Of a table that goes on."""
        commit = None if self.foreign is None else self.foreign.last(table.topic)
        said = [str(commit)] if commit is not None else []
        if table.parked:
            keys = "1 key is" if len(table.parked) == 1 else f"{len(table.parked):,} keys are"
            said.append(f"{keys} parked: 'cdc dlq ls' says why")
        return "; ".join(said) or None


class ProgressReporter(Thread):
    """Writes every sink's progress to the catalog until the process' outcome is known."""

    def __init__(self, catalog: Catalog, pipeline: str, figures: metrics.Metrics, ended: Event) -> None:
        """ended: set once `state` and `error` are what the last report is to say."""
        super().__init__(name="board")
        self._catalog, self._pipeline, self._ended = catalog, pipeline, ended
        self.figures = figures
        self.standby: Callable[[], bool] = lambda: False
        """Whether another process holds every sink: that one reports."""
        self.sinks: list[SinkFigures] = []
        self._mirrored: dict[str, tuple[DeadLetter, ...]] = {}
        self.state = "starting"
        self.error: CdcError | None = None

    def run(self) -> None:
        """Report, and once more at the end."""
        while True:
            stopping = self._ended.wait(REPORT_EVERY)
            try:
                self._report("stopped" if stopping and self.error is None else self.state)
            except CdcError as exc:
                log.warning("catalog is unreachable", code=exc.code)
            if stopping:
                return

    def _report(self, state: str) -> None:
        if self.standby():
            return
        self._catalog.processes.report(
            ProcessReport(
                pipeline=self._pipeline,
                process="apply",
                pid=os.getpid(),
                state=state,
                error=None if self.error is None else self.error.to_json(),
                figures=self.figures.to_json(),
            )
        )
        for sink in list(self.sinks):
            if (progress := sink.to_sink()) is not None:
                self._catalog.sinks.record(self._pipeline, progress)
                self._catalog.tables.record(self._pipeline, sink.to_tables())
            letters = sink.to_letters()
            if letters is not None and letters != self._mirrored.get(sink.sink):
                self._catalog.dead_letters.mirror(self._pipeline, sink.sink, letters)
                self._mirrored[sink.sink] = letters
