"""StatusSampler: takes a status of the pipeline every few seconds and shares it with all clients.

The sampler keeps the row counts and lags of the last minutes in memory, so the page shows rates and curves without
Prometheus.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from cdc.catalog import Catalog, ProcessReport
from cdc.config import Definition
from cdc.errors import CdcError
from cdc.metrics import SLOT_RETAINED
from cdc.position import Position
from cdc.service.api.access import may_change
from cdc.service.defined_pipeline import DefinedPipeline
from cdc.service.log_sampler import LogSampler, utc_now
from cdc.service.machine_load import LoadMeter, MachineLoad
from cdc.service.page.document import PageContext, page, render
from cdc.service.position_history import PositionHistory
from cdc.service.source_sampler import SourceSampler
from cdc.service.status import PipelineStatus, pipeline_status, with_delays, with_source

SAMPLE_INTERVAL: Final = 1.0
"""Seconds between two samples while an event stream is open, which shows each of them."""
UNWATCHED_INTERVAL: Final = 3.0
"""Seconds between two samples while no event stream is open; a sample takes about 10 ms of processor time.

Each sample reports to the catalog that the server runs, so the interval is shorter than REPORT_MAX_AGE."""
SAMPLES: Final = 600
"""Number of samples in memory, about 100 kB: those of ten minutes while a page is open, else of thirty."""
RATE_SPAN: Final = 10.0
"""Seconds over which rates are computed.

Over a shorter time the rates jump with each batch; over a longer time they hide a stop.
"""
MEASURE_EVERY: Final = 5.0
"""Seconds between two measurements of the machine's load, at least; a measurement reads one file per process."""
_TOLERANCE: Final = 0.5
"""Number of seconds by which a sample may be early, so that a late one does not delay the next by an interval."""
LOCAL: Final = "local socket"
# a quoted value is matched as a whole, because a password may contain 'host='
_PAIR: Final = re.compile(r"([a-z_]+)\s*=\s*('(?:[^'\\]|\\.)*'|\S*)")

log = structlog.get_logger("server")


@dataclass(frozen=True, slots=True)
class LagSample:
    """Row counts and lags of the pipeline at one time, each a mapping by edge: `source` or `sink:NAME`."""

    at: datetime
    rows: Mapping[str, float]
    lag_seconds: Mapping[str, float]


class RateHistory:
    """A ring buffer of LagSamples; one thread adds samples, other threads read them."""

    def __init__(self, size: int = SAMPLES) -> None:
        self._samples: deque[LagSample] = deque(maxlen=size)
        self._lock = Lock()

    def add(self, status: PipelineStatus, at: datetime) -> None:
        """Add a sample with the row counts and lags of a status."""
        edges = {"source": (status.source.rows, status.source.lag_seconds)}
        edges |= {f"sink:{sink.name}": (sink.rows, sink.lag_seconds) for sink in status.sinks}
        sample = LagSample(
            at=at,
            rows={edge: rows for edge, (rows, _) in edges.items()},
            lag_seconds={edge: lag for edge, (_, lag) in edges.items() if lag is not None},
        )
        with self._lock:
            self._samples.append(sample)

    def rates(self) -> dict[str, float]:
        """Return the rows per second over RATE_SPAN seconds, by edge (source or sink).

        A row count that starts again at 0, because its process restarted, does not make the rate negative.
        """
        samples = self._read()
        if not samples:
            return {}
        newest = samples[-1]
        recent = [s for s in samples if (newest.at - s.at).total_seconds() <= RATE_SPAN]
        span = (newest.at - recent[0].at).total_seconds()
        return {
            edge: _total_increase([s.rows.get(edge, 0.0) for s in recent]) / span if span else 0.0
            for edge in newest.rows
        }

    def lags(self) -> dict[str, list[float]]:
        """Return the lags in seconds by edge (source or sink), oldest first; samples without a lag are left out."""
        samples = self._read()
        edges = samples[-1].lag_seconds if samples else ()
        return {edge: [s.lag_seconds[edge] for s in samples if edge in s.lag_seconds] for edge in edges}

    def to_json(self) -> dict[str, Any]:
        """Return the rates and lags that the page shows in addition to the status."""
        return {"rates": self.rates(), "lags": {edge: _downsample(lags) for edge, lags in self.lags().items()}}

    def _read(self) -> list[LagSample]:
        with self._lock:
            return list(self._samples)


class StatusSampler:
    """Keeps the latest status of one pipeline and shares it with all clients.

    One task calls `sample`. Methods that return a status are safe to call from any thread.
    """

    def __init__(
        self,
        catalog: Catalog,
        definition: Definition,
        log_root: str,
        clock: Callable[[], datetime] = utc_now,
        file: Path | None = None,
    ) -> None:
        self.catalog = catalog
        self.name = definition.name
        self.history = RateHistory()
        self.samples = 0
        """Number of samples taken so far; an event stream detects a new sample by a new number."""
        self.is_stopping = False
        """True when the server stops, so that event streams end."""
        self.streams = 0
        """Number of open event streams."""
        self._clock = clock
        self._file = None if file is None else str(file)
        self.defined = DefinedPipeline.of(definition, self._file)
        """What the definition has: the status shows nothing of what was removed from it."""
        definition_name = "FILE" if file is None else shlex.quote(str(file))
        self.log = LogSampler(definition.log.root, definition_name, clock)
        """Sampler of the log; it reads the log only while clients request the status."""
        self.source = SourceSampler(definition)
        """Sampler of the source; it queries the source all the time, because a rate needs earlier samples."""
        self._heartbeat = definition.source.heartbeat or 0.0
        self._durable = PositionHistory()
        self._meter = LoadMeter()
        self._load: MachineLoad | None = None
        self._load_due = self._sampled_at = 0.0
        self._context = PageContext(
            source=describe_dsn(definition.source.dsn.reveal()),
            log=log_root,
            sink_types={sink.name: sink.product for sink in definition.sinks}
            | {delivery.name: delivery.type for delivery in definition.deliveries},
            definition=definition_name,
            may_change=may_change(definition.service),
        )
        self._latest: PipelineStatus | None = None
        self._rendered: tuple[PipelineStatus, dict[str, Any]] | None = None
        """Status of the last rendered sample, with the title and the sections that were rendered from it."""
        self._lock = Lock()

    @property
    def load(self) -> MachineLoad | None:
        """The machine's load; None while it is unknown."""
        return self._load

    def is_due(self, now: float) -> bool:
        """Whether a sample is due, which depends on whether a client watches; `now` is a monotonic time."""
        return now - self._sampled_at >= (SAMPLE_INTERVAL if self.streams else UNWATCHED_INTERVAL) - _TOLERANCE

    def sample(self) -> None:
        """Report to the catalog that the server runs, and take one sample.

        If the catalog does not answer, no sample is taken.
        """
        self._sampled_at = time.monotonic()
        try:
            self.source.refresh()
            report = ProcessReport(self.name, "server", os.getpid(), "running", figures=self._source_metrics())
            self.catalog.processes.report(report)
            reported = pipeline_status(self.catalog, self.name, self._clock(), self.log.current, defined=self.defined)
        except CdcError as error:
            log.warning(
                "the server cannot use the catalog, so page and status show no newer values until the catalog answers",
                code=error.code,
                message=error.message,
            )
            return
        self._record_positions(reported)
        self._measure_load(reported)
        status = self._add_measurements(reported)
        self.history.add(status, self._clock())
        self._latest = status
        self.samples += 1

    def report_stopped(self) -> None:
        """Stop the samplers, and report to the catalog that the server stopped."""
        self.log.stop()
        self.source.stop()
        try:
            self.catalog.processes.report(ProcessReport(self.name, "server", os.getpid(), "stopped"))
        except CdcError as error:
            log.warning(
                "cannot report to the catalog that the server stopped, so the status will show the server as stale",
                code=error.code,
                message=error.message,
            )

    def status(self) -> PipelineStatus:
        """Return the present status from the catalog alone, without samples of log and source.

        Raises CatalogUnavailable.
        """
        return pipeline_status(self.catalog, self.name, self._clock(), defined=self.defined)

    def full_status(self) -> PipelineStatus:
        """Return the present status from the catalog, with the last samples of log and source.

        Raises CatalogUnavailable.
        """
        reported = pipeline_status(self.catalog, self.name, self._clock(), self.log.refresh(), defined=self.defined)
        self.source.refresh()
        return self._add_measurements(reported)

    def status_of(self, name: str) -> PipelineStatus:
        """Return the status of any pipeline in the catalog.

        Only the status of this server's own pipeline includes the samples of log and source.

        Raises CatalogUnavailable.
        """
        return self.full_status() if name == self.name else pipeline_status(self.catalog, name, self._clock())

    def latest(self) -> PipelineStatus:
        """Return the status of the last sample; before the first sample, return the present status from the catalog.

        The method also starts a sample of the log if one is due.
        """
        self.log.refresh()
        return self._latest or self.status()

    def _record_positions(self, status: PipelineStatus) -> None:
        """Record the durable position with the present time, and forget positions that every sink has applied."""
        if status.source.position is None:
            return
        with self._lock:
            self._durable.add(self._clock().timestamp(), int(Position.parse(status.source.position)))
            applied = [Position.parse(sink.position) for sink in status.sinks if sink.position is not None]
            self._durable.forget(min(applied, default=Position(0)))

    def _add_measurements(self, status: PipelineStatus) -> PipelineStatus:
        """Return the status with values that the server process measures itself, in place of reported values."""
        with self._lock:
            delayed = with_delays(status, self._durable, self._clock().timestamp())
        loaded = replace(delayed, load=self._load)
        return with_source(loaded, self.source.current, self._heartbeat, file=self._file)

    def _measure_load(self, status: PipelineStatus) -> None:
        """Measure the load of the machine, but not more often than MEASURE_EVERY, because a measurement is slow."""
        now = time.monotonic()
        if now >= self._load_due:
            self._load_due = now + MEASURE_EVERY
            running = {p.process: p.pid for p in status.processes if p.pid is not None and p.state == "running"}
            self._load = self._meter.measure(now, running | {"server": os.getpid()})

    def _source_metrics(self) -> list[list[object]]:
        """Return the metrics of the source for a report to the catalog; empty while the source does not answer."""
        observed = self.source.current
        if observed is None or observed.retained_bytes is None:
            return []
        return [[SLOT_RETAINED.name, [self.name], observed.retained_bytes]]

    def page(self) -> str:
        """Return the page as HTML."""
        return page(self.full_status(), self._context, self.history.to_json())

    def sections(self) -> dict[str, Any]:
        """Return title and sections of the page; they are rendered once per sample for all clients."""
        status = self.latest()
        with self._lock:
            if self._rendered is None or self._rendered[0] is not status:
                title = f"{status.name} · {status.state} · cdc"
                content = {"title": title, "sections": render(status, self._context, self.history.to_json())}
                self._rendered = status, content
            return self._rendered[1]


def describe_dsn(dsn: str) -> str:
    """Return host, port and database of a valid DSN for the page; user and password are left out."""
    if "://" in dsn:
        parts = urlsplit(dsn)
        return f"{parts.netloc.rpartition('@')[2] or LOCAL}{parts.path}"
    words = {name: value.strip("'") for name, value in _PAIR.findall(dsn)}
    shown = words.get("host", LOCAL) + (f":{words['port']}" if "port" in words else "")
    return f"{shown}/{words['dbname']}" if "dbname" in words else shown


def _total_increase(values: list[float]) -> float:
    return sum(new - old if new >= old else new for old, new in pairwise(values))


def _downsample(values: list[float], most: int = 120) -> list[float]:
    """Divide the values into at most `most` groups of neighbours, and return the highest value of each group.

    So short peaks stay visible in the curve.
    """
    share = -(-len(values) // most) or 1
    return [round(max(values[i : i + share]), 3) for i in range(0, len(values), share)]
