"""Rate history: the last minutes of a pipeline in memory, so that rates and curves need no Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from threading import Lock
from typing import Any, Final

from cdc.service.status import PipelineStatus

SAMPLES: Final = 600
"""Ten minutes at one sample per second: enough for a sparkline, in 100 kB of memory."""
RATE_SPAN: Final = 10.0
"""Seconds over which rows/s are computed; less jumps between 0 and batches, more hides a stop."""


@dataclass(frozen=True, slots=True)
class LagSample:
    """Row counts and lags at one time, by edge: `source` or `sink:NAME`."""

    at: datetime
    rows: Mapping[str, float]
    lag_seconds: Mapping[str, float]


class RateHistory:
    """A ring buffer of samples; one thread adds, others read."""

    def __init__(self, size: int = SAMPLES) -> None:
        self._samples: deque[LagSample] = deque(maxlen=size)
        self._lock = Lock()

    def add(self, status: PipelineStatus, at: datetime) -> None:
        """Add a sample of the status."""
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
        """Edge → rows per second over the last RATE_SPAN; a counter that restarted counts from 0."""
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
        """Edge → lag in seconds, oldest first, at most one value per sample."""
        samples = self._read()
        edges = samples[-1].lag_seconds if samples else ()
        return {edge: [s.lag_seconds[edge] for s in samples if edge in s.lag_seconds] for edge in edges}

    def to_json(self) -> dict[str, Any]:
        """The rates and lags that the page shows in addition to the status."""
        return {"rates": self.rates(), "lags": {edge: _downsample(lags) for edge, lags in self.lags().items()}}

    def _read(self) -> list[LagSample]:
        with self._lock:
            return list(self._samples)


def _total_increase(values: list[float]) -> float:
    return sum(new - old if new >= old else new for old, new in pairwise(values))


def _downsample(values: list[float], most: int = 120) -> list[float]:
    """At most `most` values, each the highest of its share so that spikes stay visible."""
    share = -(-len(values) // most) or 1
    return [round(max(values[i : i + share]), 3) for i in range(0, len(values), share)]
