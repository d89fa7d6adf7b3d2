"""Status of the sinks of an apply process: recorded by their loops, reported to the catalog once or twice a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event, Lock, Thread
from typing import Final

import structlog

from cdc import metrics
from cdc.catalog import (
    AWAITS_SPARK,
    NO_CORE,
    Catalog,
    DeadLetter,
    ProcessReport,
    RecordedProgress,
    SinkProgress,
    TableProgress,
)
from cdc.errors import CdcError, complete_remedy
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord, TargetState, by_topic
from pipelines.runtime.nulled_counts import NulledCounts
from pipelines.runtime.throttle import BatchThrottle, CommitRate

REPORT_EVERY: Final = 0.5
"""Seconds between two reports. A process is shown as down after five seconds without a report."""
IDLE_REPORT_EVERY: Final = 1.0
"""Seconds from a report without news about a sink or table to the next report."""
LATE: Final = 60.0
"""Lag in seconds above which a sink catches up."""

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class ExternalCommit:
    """A commit in which another Delta client changed rows of a target."""

    version: int
    operation: str
    """Operation that the Delta log records for the commit, for instance DELETE."""

    def __str__(self) -> str:
        return (
            f"another client committed version {self.version} of the target ({self.operation}): "
            "run 'cdc verify' to find changed rows"
        )


class ExternalCommitReport:
    """Commits of other Delta clients in the targets of a sink, since the sink was opened; thread-safe."""

    def __init__(self) -> None:
        self._last: dict[str, ExternalCommit] = {}
        self._uncounted: dict[str, int] = {}
        self._lock = Lock()

    def add(self, topic: str, commits: Sequence[ExternalCommit]) -> None:
        """Add commits that were found in the target of a table, oldest first."""
        with self._lock:
            self._last[topic] = commits[-1]
            self._uncounted[topic] = self._uncounted.get(topic, 0) + len(commits)

    def last(self, topic: str) -> ExternalCommit | None:
        """Return the last commit of another client in the target of a table; None if there was none."""
        with self._lock:
            return self._last.get(topic)

    def pop_counts(self) -> dict[str, int]:
        """Return the number of commits that were added since the last call, by topic."""
        with self._lock:
            counts, self._uncounted = self._uncounted, {}
        return counts


class SinkFigures:
    """Position, lag, errors and dead letters of one sink; its loop writes them, the reporter reads them."""

    def __init__(
        self, pipeline: str, sink: str, figures: metrics.Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._pipeline = pipeline
        self.sink = sink
        self._figures = figures
        self._clock = clock
        self._record: Published | None = None
        self._lag = 0.0
        self._pending: tuple[int, float] | None = None
        """(end of the batch that is not published yet, time of its first attempt); None if no batch has begun."""
        self._rows: dict[int, int] = {}
        self._error: CdcError | None = None
        self._dead_letters: tuple[DeadLetter, ...] | None = None
        self._lock = Lock()
        self._reported_throttle: BatchThrottle | None = None
        self.commit_rate: CommitRate | None = None
        """The limit on rewritten bytes; None if the sink has no limit."""
        self.external_commits: ExternalCommitReport | None = None
        """Commits of other clients in the targets; None: the sink cannot detect them."""
        self.nulled: NulledCounts | None = None
        """Values that the targets have as NULL, because their types cannot represent them; None: there are none."""
        self.index_notice: Callable[[str], str | None] = lambda _uri: None
        """Function from the URI of a target to a sentence about its missing or incomplete key index."""
        self.awaits_spark = False
        """Whether the sink applies nothing until Spark begins a batch of its query."""
        self.awaits_core = False
        """Whether a batch has waited for a core of the cluster for half a minute."""

    def start_batch(self, end: int) -> None:
        """Record that the batch ending at `end` begins, or begins again. The lag grows until the batch is published."""
        with self._lock:
            if self._pending is None:
                self._pending = end, self._clock()

    def record_published(
        self, record: Published, *, lag: float | None, rows: Mapping[int, int], engine: str | None = None
    ) -> None:
        """Record a published batch.

        engine: what applied it, `here` or `spark`; None: the record was only read.
        rows: number of merged rows by relation. lag: the lag of the batch's median row in seconds; None if the batch
        has no rows. Without rows, the reported lag becomes the time since the last commit of the batch, if that is
        less than the present lag. So an idle sink is not shown as late after a long copy.
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
        if engine is not None:
            self._figures.add(metrics.ENGINE_BATCHES, 1, *labels, engine)
            self._figures.add(metrics.ENGINE_ROWS, sum(rows.values()), *labels, engine)
            self._figures.set(metrics.SINK_IN_SPARK, float(engine == "spark"), *labels)

    def record_dead_letters(self, letters: tuple[DeadLetter, ...]) -> None:
        """Record the rows that the sink has parked at present."""
        with self._lock:
            self._dead_letters = letters
        self._figures.set(metrics.DLQ_RECORDS, len(letters), self._pipeline, self.sink)

    def to_dead_letters(self) -> tuple[DeadLetter, ...] | None:
        """Return the dead letters for the catalog; None before the first call of `record_dead_letters`."""
        with self._lock:
            return self._dead_letters

    def record_duration(self, seconds: float, engine: str | None = None) -> None:
        """Record the duration of a batch, the bytes that it rewrote, and the resulting delay of the next batch.

        engine: what applied it, `here` or `spark`.
        """
        labels = self._pipeline, self.sink
        self._figures.set(metrics.APPLY_SECONDS, seconds, *labels)
        self._figures.observe(metrics.APPLY_DURATION, seconds, *labels)
        if engine is not None:
            self._figures.add(metrics.ENGINE_SECONDS, seconds, *labels, engine)
        for table, commits in {} if self.external_commits is None else self.external_commits.pop_counts().items():
            self._figures.add(metrics.FOREIGN_COMMITS, commits, *labels, table)
        for table, count in {} if self.nulled is None else self.nulled.pop_counts().items():
            self._figures.add(metrics.NULLED_VALUES, count, *labels, table)
        if self.commit_rate is None:
            return
        before, now = self._reported_throttle, self.commit_rate.throttle
        self._figures.add(metrics.REWRITTEN_BYTES, self.commit_rate.rewritten, *labels)
        if before is not None:
            self._figures.set(metrics.CADENCE, 0.0, *labels, before.table)
        if now is not None:
            self._figures.set(metrics.CADENCE, now.seconds, *labels, now.table)
        self._reported_throttle = now

    def record_failure(self, error: CdcError) -> None:
        """Record the error that closed the sink."""
        with self._lock:
            self._error = error
        self._figures.add(metrics.ERRORS, 1, self._pipeline, "apply", error.code)

    def to_sink(self) -> SinkProgress | None:
        """Return the state of the sink for the catalog; None until the sink was opened or failed for the first time."""
        with self._lock:
            record, error = self._record, self._error
            delay = self._spark_delay() or self._reported_throttle
            if record is None and error is None:
                return None
            committed_at = (
                datetime.fromtimestamp(record.committed_at / 1e6, UTC) if record and record.committed_at else None
            )
            return SinkProgress(
                sink=self.sink,
                position=record.position if record else 0,
                committed_at=committed_at,
                lag_seconds=self._present_lag(),
                state="failed" if error else "running",
                reason=f"{error.code} {error.message} → {error.fix}" if error else str(delay) if delay else None,
            )

    def _present_lag(self) -> float:
        return max(self._lag, 0.0 if self._pending is None else self._clock() - self._pending[1])

    @property
    def is_catching_up(self) -> bool:
        """Whether the sink runs, and copies a table or is more than LATE seconds late."""
        with self._lock:
            if self._record is None or self._error is not None:
                return False
            copies = any(table.state == TargetState.SNAPSHOTTING for table in self._record.tables.values())
            return copies or self._present_lag() > LATE

    def _spark_delay(self) -> str | None:
        """Return why a batch for Spark has not begun; None if no batch waits for Spark."""
        if self.awaits_spark:
            return f"{AWAITS_SPARK}: {NO_CORE}" if self.awaits_core else AWAITS_SPARK
        return f"{NO_CORE}; the apply process takes small batches" if self.awaits_core else None

    @property
    def has_published(self) -> bool:
        """Whether the published record is known; it is not before the sink was opened."""
        return self._record is not None

    def to_tables(self) -> list[TableProgress]:
        """Return the state of each published table of the sink for the catalog, without tables that were removed."""
        with self._lock:
            published = by_topic(self._record.tables.values() if self._record else ()).values()
            tables = [table for table in published if not _is_removed(table)]
            return [
                TableProgress(
                    sink=self.sink,
                    topic=table.topic,
                    state=table.state,
                    reason=complete_remedy(table.reason or "", sink=self.sink, topic=table.topic)
                    or self._notice(table),
                    position=table.position,
                    version=table.version,
                    rows=self._rows.get(table.relation, 0),
                )
                for table in tables
            ]

    def _notice(self, table: TableRecord) -> str | None:
        """Return the notice for a running table; None if there is nothing to report.

        It reports the last commit of another client, the number of parked keys, and why the table has no key index.
        """
        commit = None if self.external_commits is None else self.external_commits.last(table.topic)
        notices = [str(commit)] if commit is not None else []
        if table.parked:
            keys = "1 key is" if len(table.parked) == 1 else f"{len(table.parked):,} keys are"
            notices.append(f"{keys} parked: 'cdc dlq ls' shows why")
        if nulled := 0 if self.nulled is None else self.nulled.total(table.topic):
            notices.append(f"{nulled:,} values are NULL since the start, because their types cannot represent them")
        if (notice := self.index_notice(table.target)) is not None:
            notices.append(notice)
        return "; ".join(notices) or None


def _is_removed(table: TableRecord) -> bool:
    """Return True if the definition no longer includes the table."""
    is_dropped = table.state == TargetState.DROPPED and table.schema is not None
    return is_dropped and TableSchema.from_json(table.schema or "").removed


class ProgressReporter(Thread):
    """Thread that writes the state of the apply process and of its sinks to the catalog, until the process ends."""

    def __init__(self, catalog: Catalog, pipeline: str, figures: metrics.Metrics, ended: Event) -> None:
        """ended: set by the caller when `state` and `error` have their final values."""
        super().__init__(name="board")
        self._catalog = catalog
        self._pipeline = pipeline
        self._ended = ended
        self.figures = figures
        self.standby: Callable[[], bool] = lambda: False
        """Whether another process has the leases of all sinks. If so, that process reports instead of this one."""
        self.sinks: list[SinkFigures] = []
        self._mirrored: dict[str, tuple[DeadLetter, ...]] = {}
        self._sinks, self._tables = RecordedProgress[SinkProgress](), RecordedProgress[TableProgress]()
        self._has_continued = False
        """Whether the counters of the earlier process were added."""
        self._reported_topics: dict[str, frozenset[str]] = {}
        """Sink → topics of the tables that the catalog has of it."""
        self.state = "starting"
        self.error: CdcError | None = None

    def run(self) -> None:
        """Report every REPORT_EVERY or IDLE_REPORT_EVERY seconds until `ended` is set, then report once more."""
        has_news = True
        while True:
            stopping = self._ended.wait(REPORT_EVERY if has_news else IDLE_REPORT_EVERY)
            try:
                has_news = self._report("stopped" if stopping and self.error is None else self.state)
            except CdcError as exc:
                self._sinks.forget()
                self._tables.forget()
                log.warning(
                    "cannot write the progress of sinks to the catalog; the sinks continue, but 'cdc status' is stale",
                    code=exc.code,
                    message=exc.message,
                )
            if stopping:
                return

    def _report(self, state: str) -> bool:
        """Write a report; return whether the state of a sink or of a table has changed."""
        if self.standby():
            return False
        if not self._has_continued:
            self.figures.continue_from(self._catalog.processes.figures(self._pipeline, "apply"))
            self._has_continued = True
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
        now, sinks = time.monotonic(), list(self.sinks)
        progress = [sink_progress for sink in sinks if (sink_progress := sink.to_sink()) is not None]
        changed_sinks = self._sinks.due(progress, now)
        for sink_progress in changed_sinks:
            self._catalog.sinks.record(self._pipeline, sink_progress)
        tables = {sink.sink: sink.to_tables() for sink in sinks if sink.has_published}
        changed_tables = self._tables.due([table for of_sink in tables.values() for table in of_sink], now)
        if changed_tables:
            self._catalog.tables.record(self._pipeline, changed_tables)
        self._forget_tables({name: frozenset(table.topic for table in of_sink) for name, of_sink in tables.items()})
        for sink in sinks:
            letters = sink.to_dead_letters()
            if letters is not None and letters != self._mirrored.get(sink.sink):
                self._catalog.dead_letters.mirror(self._pipeline, sink.sink, letters)
                self._mirrored[sink.sink] = letters
        return bool(changed_sinks or changed_tables)

    def _forget_tables(self, topics: Mapping[str, frozenset[str]]) -> None:
        """Delete from the catalog the tables that a sink no longer has: removed or renamed ones. topics: by sink."""
        if topics == self._reported_topics:
            return
        listed = self._catalog.tables.ls(self._pipeline)
        for sink, present in topics.items():
            gone = {table.topic for table in listed if table.sink == sink} - present
            if gone:
                self._catalog.tables.forget(self._pipeline, sink, gone)
        self._reported_topics = dict(topics)
