"""Pipeline probe: observes the pipeline of the demo through the catalog and the log, as any client could."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from time import monotonic
from typing import Any, Final

import pyarrow.compute as pc

from cdc.catalog import REPORT_MAX_AGE, Catalog
from cdc.config.definition import LOG_OF_VIEWS
from cdc.config.views import NAME_OF_VIEWS
from cdc.demo.workspace import DOCUMENTS, MARTS, Workspace
from cdc.errors import LogError
from cdc.log.reader import LogReader, read_file
from cdc.log_row import Operation
from cdc.metrics import COMPILING, SLOT_RETAINED, SOURCE_LAG_SECONDS
from cdc.position import Position
from cdc.service.machine_load import LoadMeter, MachineLoad
from cdc.service.position_history import PositionHistory

PIPELINE: Final = "shop"
LAKE: Final = "lake"
SEARCH: Final = "find"
MEASURE_EVERY: Final = 1.0
"""Seconds between two measurements of the machine's load."""
CAUGHT_UP_LAG: Final = 5.0
"""Seconds of lag below which a sink has caught up after the first copy; its freshness is measured from then on."""


@dataclass(frozen=True, slots=True)
class PipelineSnapshot:
    """The state of the demo's pipeline at one time."""

    durable: Position | None
    sinks: dict[str, Position]
    """Position of the published cut of each sink; a sink is missing before its first cut."""
    lag: dict[str, float]
    """Lag in seconds by sink."""
    source_lag: float | None
    slot_retained: float | None
    """Bytes of WAL that the source retains for the slot; None if unknown."""
    versions: dict[tuple[str, str], tuple[int | None, int]]
    """(sink, topic) → (version of the target table, number of its rows); the version may be None."""
    compiling: bool = False
    """True while the reader compiles its decoder."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reported reason why a sink is slow, by sink."""
    stalled: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each sink is behind the log, by sink; the key '' has the seconds since the log last grew."""
    slow: str | None = None
    """Text that names this machine's load as the cause of a long lag; None if all lags are short or the load is low."""


@dataclass(slots=True)
class Freshness:
    """Collects the lag of each batch that a sink publishes, for the median freshness of the sink.

    The collection of a sink begins with its first batch whose lag is below CAUGHT_UP_LAG.
    """

    _samples: dict[str, list[float]] = field(default_factory=dict)
    _seen: dict[str, Position] = field(default_factory=dict)

    def add(self, snapshot: PipelineSnapshot) -> None:
        """Add the lags of the batches that are new in a pipeline snapshot."""
        for sink, position in snapshot.sinks.items():
            if position == self._seen.get(sink):
                continue
            self._seen[sink] = position
            samples = self._samples.setdefault(sink, [])
            if samples or snapshot.lag[sink] < CAUGHT_UP_LAG:
                samples.append(snapshot.lag[sink])

    def p50_ms(self, sink: str) -> float | None:
        """Return the sink's median freshness in milliseconds; None if no batch of the sink was counted."""
        samples = self._samples.get(sink)
        return round(median(samples) * 1000, 1) if samples else None


class PipelineProbe:
    """Takes snapshots of the pipeline from catalog and log; a snapshot takes a few milliseconds."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._durable, self._moved = PositionHistory(), (monotonic(), Position(0))
        self._meter, self._measured = LoadMeter(), 0.0
        self._load: MachineLoad | None = None
        self._catalog = Catalog.open(workspace.catalog_url)
        self._log: LogReader | None = None

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    @property
    def log(self) -> LogReader | None:
        """Return the reader of the log; None before the log exists."""
        if self._log is None:
            try:
                self._log = LogReader(str(self._workspace.log))
            except LogError:
                return None
        self._log.refresh()
        return self._log

    def snapshot(self) -> PipelineSnapshot:
        """Return the present state of the pipeline."""
        log, now = self.log, monotonic()
        durable = log.durable if log is not None else None
        sinks = [sink for sink in self._catalog.sinks.ls(PIPELINE) if sink.position > 0]
        tables = list(self._catalog.tables.ls(PIPELINE))
        metrics, lag = self._metrics(), {sink.sink: sink.lag_seconds for sink in sinks}
        load, stalled = self._measure(now), self._stalled(now, durable, {s.sink: Position(s.position) for s in sinks})
        slowest = max((max(seconds, stalled.get(sink, 0.0)) for sink, seconds in lag.items()), default=None)
        return PipelineSnapshot(
            durable=durable,
            sinks={sink.sink: Position(sink.position) for sink in sinks},
            lag=lag,
            source_lag=metrics.get(SOURCE_LAG_SECONDS.name),
            slot_retained=metrics.get(SLOT_RETAINED.name),
            versions={(table.sink, table.topic): (table.version, table.rows) for table in tables if table.sink},
            compiling=bool(metrics.get(COMPILING.name)),
            reasons={sink.sink: sink.reason for sink in sinks if sink.reason},
            stalled=stalled,
            slow=None if load is None else load.reason(slowest),
        )

    def late_views(self, target: Position) -> list[str]:
        """Return the views that are not computed up to `target`, or else the sinks that have not applied them."""
        views = [table for table in self._catalog.tables.ls(PIPELINE) if table.sink == NAME_OF_VIEWS]
        late = [view.topic for view in views if view.position < target]
        if late or not views:
            return late or [NAME_OF_VIEWS]
        durable = LogReader(self._workspace.log / LOG_OF_VIEWS).durable or Position(0)
        sinks = [sink for sink in self._catalog.sinks.ls(PIPELINE) if sink.sink in {DOCUMENTS, MARTS}]
        return [sink.sink for sink in sinks if sink.position < durable]

    def _stalled(self, now: float, durable: Position | None, sinks: Mapping[str, Position]) -> dict[str, float]:
        if durable is None:
            return {}
        if durable != self._moved[1]:
            self._moved = now, durable
        self._durable.add(now, durable)
        self._durable.forget(min(sinks.values(), default=Position(0)))
        behind = {sink: self._durable.seconds_behind(position, now) for sink, position in sinks.items()}
        return {"": now - self._moved[0], **behind}

    def _measure(self, now: float) -> MachineLoad | None:
        if now - self._measured >= MEASURE_EVERY:
            self._measured = now
            pids = {report.process: report.pid for report in self._catalog.processes.ls(PIPELINE)}
            self._load = self._meter.measure(now, pids)
        return self._load

    def copied(self, upto: Position) -> list[tuple[str, int]]:
        """Return pairs of a topic and the number of its copied rows in the log up to a position, sorted by topic."""
        log = self.log
        files = log.files(Position(0), upto) if log is not None else []
        counts: Counter[str] = Counter()
        for file in files:
            rows = read_file(file, Position(0), upto, ["topic", "op"])
            topics = rows.filter(pc.equal(rows["op"], Operation.READ.value))["topic"]
            counts.update({entry["values"]: entry["counts"] for entry in pc.value_counts(topics).to_pylist()})
        return sorted(counts.items())

    def _metrics(self) -> dict[str, float]:
        """Return the current metrics of reader and server by name.

        If a metric has values for several labels, the result has only one of these values.
        """
        found: dict[str, float] = {}
        for report in self._catalog.processes.ls(PIPELINE):
            old = report.age(datetime.now(UTC)) > REPORT_MAX_AGE
            if report.process in {"reader", "server"} and not old:
                metrics: Any = report.figures
                found |= {name: float(value) for name, _, value in metrics}
        return found
