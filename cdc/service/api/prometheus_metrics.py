"""Prometheus exposition: metrics that processes reported to the catalog, and values that the server measured."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cdc.catalog import ProcessReport
from cdc.metrics import (
    BACKFILL_ESTIMATED,
    BACKFILL_ETA,
    BACKFILL_SHARE,
    BUCKET,
    BUILD_INFO,
    COMPACTED_AT,
    COMPACTED_BYTES,
    CONSUMER_HOLDS,
    CONSUMER_LAG_BYTES,
    CONSUMER_LAG_SECONDS,
    CONSUMER_LATE,
    CONSUMER_SILENT,
    FEEDBACK_AGE,
    HEALTH,
    HORIZON_LAG_BYTES,
    HORIZON_LAG_SECONDS,
    LOG_HELD,
    LOG_HORIZON,
    LOG_OLDEST,
    LOG_SEGMENTS,
    METRICS_BY_NAME,
    MOMENTARY,
    READ_AT_SOURCE,
    REPORT_AGE,
    SINK_LAG_SECONDS,
    SINK_POSITION,
    SLOT_ACTIVE,
    SLOT_RETAINED,
    SLOT_SAFE,
    SLOT_SECONDS_LEFT,
    SLOT_UNCONFIRMED,
    SLOT_WAL_STATUS,
    SOURCE_LAG_BYTES,
    SOURCE_LAG_SECONDS,
    SOURCE_UP,
    SUM,
    TABLE_STATE,
    VERIFIED_THROUGH,
    VERIFY_MISMATCHED,
    VERIFY_STATE,
    VERIFY_SUCCESS,
    WAL_RATE,
    Kind,
    Metric,
)
from cdc.position import Position
from cdc.service.log_status_records import ConsumerLine, LogState, LogStatus
from cdc.service.status import NOT_REPORTING, PipelineStatus, SourceStatus
from cdc.snapshot.backfill_status import BackfillStatus

MAX_TABLES: Final = 500
"""Number of tables above which only unhealthy tables get a series, to bound the size of a scrape."""
_HEALTHY_STATES: Final = frozenset({"streaming", "live", "copied", "dropped"})
_REPORTED: Final = frozenset(
    f"{name}{suffix}"
    for name, metric in METRICS_BY_NAME.items()
    if name not in READ_AT_SOURCE
    for suffix in ((BUCKET, SUM) if metric.kind is Kind.HISTOGRAM else ("",))
)
"""Names of the series that are copied from the reports of processes; the server measures all others at the source."""


class MetricFamilies(Collector):
    """The metric families of one scrape."""

    def __init__(self, status: PipelineStatus, figures: Iterable[Any]) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        for name, labels, value in figures:
            # a newer process may know more metrics than this server
            if name in _REPORTED:
                self._values.setdefault(name, {})[tuple(labels)] = float(value)
        self._overlay(status)

    def collect(self) -> Iterator[Family]:
        """Yield every metric family that has a value, in the order of cdc.metrics."""
        for name, metric in METRICS_BY_NAME.items():
            if metric.kind is Kind.HISTOGRAM:
                if buckets := self._values.get(f"{name}{BUCKET}"):
                    yield _histogram(metric, buckets, self._values.get(f"{name}{SUM}", {}))
            elif values := self._values.get(name):
                yield _family(metric, values)

    def _overlay(self, status: PipelineStatus) -> None:
        """Replace values that processes reported with values of the status.

        The status is correct even if a process has stopped reporting: for example, its lag there continues to grow.
        """
        self._set(BUILD_INFO, 1.0, status.name, version("cdc"), platform.python_version())
        for process in status.processes:
            self._set(HEALTH, float(process.state in {"running", "copied"}), status.name, process.process)
            self._set_known(REPORT_AGE, process.age_seconds, status.name, process.process)
        self._overlay_source(status.name, status.source)
        if status.source.lag_seconds is not None:
            self._set(SOURCE_LAG_SECONDS, status.source.lag_seconds, status.name)
        for sink in status.sinks:
            if sink.lag_seconds is not None:
                self._set(SINK_LAG_SECONDS, sink.lag_seconds, status.name, sink.name)
            if sink.position is not None:
                self._set(SINK_POSITION, float(Position.parse(sink.position)), status.name, sink.name)
        many = len(status.tables) > MAX_TABLES
        for table in status.tables:
            if not many or table.state not in _HEALTHY_STATES:
                self._set(TABLE_STATE, 1.0, status.name, table.sink, table.topic, table.state)
        self._overlay_verified(status)
        for backfill in filter(attrgetter("pending"), status.backfills):
            self._overlay_backfill(status.name, backfill)
        if status.log is not None and status.log.state is LogState.READ:
            self._overlay_log(status.name, status.log, datetime.fromisoformat(status.at))

    def _overlay_log(self, pipeline: str, log: LogStatus, now: datetime) -> None:
        """Set the metrics of the log to the values of its status.

        Values that apply reported can be outdated: apply does not notice a compaction by another process.
        """
        figures = (
            (LOG_SEGMENTS, log.segment_count),
            (COMPACTED_BYTES, log.compacted_bytes),
            (LOG_HORIZON, None if log.horizon is None else Position.parse(log.horizon)),
            (LOG_OLDEST, Position.parse(log.oldest) if log.oldest else 0),
            (HORIZON_LAG_BYTES, log.horizon_behind_bytes),
            (HORIZON_LAG_SECONDS, log.horizon_behind_seconds),
            (COMPACTED_AT, None if log.compaction is None else datetime.fromisoformat(log.compaction.at).timestamp()),
        )
        parts = {"changes": log.changes_bytes, "compacted": log.compacted_bytes, "leaving": log.leaving_bytes}
        for metric, value in figures:
            self._set_known(metric, value, pipeline)
        for part, size in parts.items():
            self._set_known(LOG_HELD, size, pipeline, part)
        # of consumers with the same name, the one furthest behind is set last and wins
        for line in sorted(log.consumers, key=lambda line: -Position.parse(line.position)):
            self._overlay_consumer(pipeline, line, now)

    def _overlay_source(self, pipeline: str, source: SourceStatus) -> None:
        """Set the metrics that the server process measured at the source.

        If the source does not answer, only SOURCE_UP is set, to 0. Before the first measurement nothing is set.
        """
        observed = source.observed
        if observed is None:
            return
        self._set(SOURCE_UP, float(observed.up), pipeline)
        figures = (
            (WAL_RATE, observed.wal_bytes_per_second),
            (FEEDBACK_AGE, observed.feedback_age_seconds),
            (SLOT_ACTIVE, observed.slot_active),
            (SLOT_RETAINED, observed.retained_bytes),
            (SLOT_SAFE, observed.safe_bytes),
            (SLOT_UNCONFIRMED, observed.unconfirmed_seconds),
            (SLOT_SECONDS_LEFT, observed.seconds_left),
        )
        for metric, value in figures:
            self._set_known(metric, value, pipeline)
        self._set_known(SOURCE_LAG_BYTES, source.lag_bytes, pipeline, "durable")
        self._set_known(SOURCE_LAG_BYTES, observed.unconfirmed_bytes, pipeline, "confirmed")
        if observed.wal_status is not None:
            self._set(SLOT_WAL_STATUS, 1.0, pipeline, observed.wal_status)

    def _overlay_consumer(self, pipeline: str, line: ConsumerLine, now: datetime) -> None:
        seen = (now - datetime.fromisoformat(line.seen_at)).total_seconds()
        figures = (
            (CONSUMER_LAG_BYTES, line.behind_bytes),
            (CONSUMER_LAG_SECONDS, line.behind_seconds),
            (CONSUMER_SILENT, max(0.0, seen)),
            (CONSUMER_HOLDS, line.holds_bytes),
            (CONSUMER_LATE, float(line.state == "late")),
        )
        for metric, value in figures:
            self._set_known(metric, value, pipeline, line.name)

    def _overlay_verified(self, status: PipelineStatus) -> None:
        """Set the metrics of verifications from the results in the catalog."""
        if status.verification is not None:
            self._set(VERIFY_STATE, 1.0, status.name, status.verification.state)
        for table in status.verified:
            figures = (
                (VERIFY_SUCCESS, _unix(table.equal_at)),
                (VERIFY_MISMATCHED, table.mismatched),
                (VERIFIED_THROUGH, _unix(table.verified_through)),
            )
            for metric, value in figures:
                self._set_known(metric, value, status.name, table.sink, table.topic)

    def _overlay_backfill(self, pipeline: str, backfill: BackfillStatus) -> None:
        """Set the progress metrics of a backfill's tables from the catalog.

        The catalog keeps the progress when the reader restarts.
        """
        for topic, progress in backfill.tables.items():
            if progress.state == "done" or (progress.state == "queued" and len(backfill.tables) > MAX_TABLES):
                continue
            figures = (
                (BACKFILL_ESTIMATED, progress.estimate),
                (BACKFILL_SHARE, progress.share),
                (BACKFILL_ETA, progress.seconds_left),
            )
            for metric, value in figures:
                self._set_known(metric, value, pipeline, topic)

    def _set_known(self, metric: Metric, value: float | None, *labels: str) -> None:
        if value is not None:
            self._set(metric, float(value), *labels)

    def _set(self, metric: Metric, value: float, *labels: str) -> None:
        self._values.setdefault(metric.name, {})[labels] = value


def reported_values(status: PipelineStatus, reports: Iterable[ProcessReport]) -> list[Any]:
    """Return the metrics of all processes as [[name, [label…], value]…].

    If a process has stopped reporting, metrics of its present activity (MOMENTARY) are left out.
    """
    silent = {process.process for process in status.processes if process.state in NOT_REPORTING}
    return [
        figure
        for report in reports
        for figure in report.figures
        if report.process not in silent or figure[0] not in MOMENTARY
    ]


def prometheus_text(status: PipelineStatus, figures: Iterable[Any]) -> bytes:
    """Return the body of `/metrics`; `figures` is the result of `reported_values`."""
    registry = CollectorRegistry()
    registry.register(MetricFamilies(status, figures))
    return generate_latest(registry)


def _unix(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()


def _histogram(
    metric: Metric, buckets: Mapping[tuple[str, ...], float], sums: Mapping[tuple[str, ...], float]
) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    by_labels: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for (*labels, bound), count in buckets.items():
        by_labels.setdefault(tuple(labels), []).append((bound, count))
    for found, counts in sorted(by_labels.items()):
        family.add_metric(found, sorted(counts, key=lambda count: float(count[0])), sums.get(found, 0.0))
    return family


def _family(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family
