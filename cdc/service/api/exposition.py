"""Prometheus text: the figures that processes left in the catalog, and what follows from their silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cdc.metrics import (
    BACKFILL_ESTIMATED,
    BACKFILL_ETA,
    BACKFILL_SHARE,
    EVERY,
    HEALTH,
    SINK_LAG_SECONDS,
    SINK_POSITION,
    SOURCE_LAG_SECONDS,
    TABLE_STATE,
    Kind,
    Metric,
)
from cdc.position import Position
from cdc.service.status import PipelineStatus
from cdc.snapshot.progress import BackfillStatus

MOST_TABLES: Final = 500
"""Above this many, only tables that are not streaming get a series: scrapes must not grow without end."""
_QUIET: Final = frozenset({"streaming", "live", "copied"})


class Figures(Collector):
    """The families of one scrape."""

    def __init__(self, status: PipelineStatus, figures: Iterable[Any]) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        for name, labels, value in figures:
            # a newer process may know more metrics than this server
            if name in EVERY:
                self._values.setdefault(name, {})[tuple(labels)] = float(value)
        self._overlay(status)

    def collect(self) -> Iterator[Family]:
        """Every family that has a value, in the order of cdc.metrics."""
        for name, metric in EVERY.items():
            if values := self._values.get(name):
                yield _family(metric, values)

    def _overlay(self, status: PipelineStatus) -> None:
        """What the server knows better than the processes: that one is silent, and lags that grow meanwhile."""
        for process in status.processes:
            self._set(HEALTH, float(process.state in {"running", "copied"}), status.name, process.process)
        if status.source.lag_seconds is not None:
            self._set(SOURCE_LAG_SECONDS, status.source.lag_seconds, status.name)
        for sink in status.sinks:
            if sink.lag_seconds is not None:
                self._set(SINK_LAG_SECONDS, sink.lag_seconds, status.name, sink.name)
            if sink.position is not None:
                self._set(SINK_POSITION, float(Position.parse(sink.position)), status.name, sink.name)
        many = len(status.tables) > MOST_TABLES
        for table in status.tables:
            if not many or table.state not in _QUIET:
                self._set(TABLE_STATE, 1.0, status.name, table.sink, table.topic, table.state)
        for backfill in status.backfills:
            if backfill.pending:
                self._overlay_backfill(status.name, backfill)

    def _overlay_backfill(self, pipeline: str, backfill: BackfillStatus) -> None:
        """How far the tables have come: the catalog keeps it, so that a reader that starts again does not forget it."""
        for topic, progress in backfill.tables.items():
            if progress.state == "done" or (progress.state == "queued" and len(backfill.tables) > MOST_TABLES):
                continue
            figures = (
                (BACKFILL_ESTIMATED, progress.estimate),
                (BACKFILL_SHARE, progress.share),
                (BACKFILL_ETA, progress.seconds_left),
            )
            for metric, value in figures:
                if value is not None:
                    self._set(metric, float(value), pipeline, topic)

    def _set(self, metric: Metric, value: float, *labels: str) -> None:
        self._values.setdefault(metric.name, {})[labels] = value


def exposition(status: PipelineStatus, figures: Iterable[Any]) -> bytes:
    """The body of `/metrics`; figures are [[name, [label…], value]…] of all processes."""
    registry = CollectorRegistry()
    registry.register(Figures(status, figures))
    return generate_latest(registry)


def _family(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family
