"""Every metric: name, kind, labels and when it moves. Nothing else in the code makes one up.

Processes keep their figures in a `Figures` and hand snapshots to the catalog; the server turns them
into Prometheus text. Units are base units: seconds, bytes, rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Final


class Kind(StrEnum):
    """How a metric moves."""

    #: Only up, from 0 at the start of its process.
    COUNTER = "counter"
    #: Up and down.
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as `/metrics` shows it; help says when it moves."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("pipeline",)


_SINK: Final = ("pipeline", "sink")
_TABLE: Final = ("pipeline", "table")

HEALTH: Final = Metric(
    "cdc_health", Kind.GAUGE, "1 while the process does its work, 0 while it does not", ("pipeline", "process")
)
TABLE_STATE: Final = Metric(
    "cdc_table_state", Kind.GAUGE, "1 for the state a table is in", ("pipeline", "sink", "table", "state")
)
SOURCE_LAG_SECONDS: Final = Metric(
    "cdc_source_lag_seconds", Kind.GAUGE, "age of the last transaction made durable, at the moment it became so"
)
SOURCE_LAG_BYTES: Final = Metric(
    "cdc_source_lag_bytes", Kind.GAUGE, "server's WAL end minus this point", ("pipeline", "point")
)
RECEIVED_BYTES: Final = Metric(
    "cdc_received_bytes_total", Kind.COUNTER, "bytes of replication messages taken from the socket"
)
SPOOLED_BYTES: Final = Metric(
    "cdc_spooled_bytes", Kind.GAUGE, "bytes on disk of streamed transactions whose end has not come"
)
CHANGES: Final = Metric("cdc_changes_total", Kind.COUNTER, "log rows made durable")
TRANSACTIONS: Final = Metric("cdc_transactions_total", Kind.COUNTER, "transactions made durable")
RECONNECTS: Final = Metric("cdc_reconnects_total", Kind.COUNTER, "replication connections opened after the first")
FEEDBACK_AGE: Final = Metric(
    "cdc_feedback_age_seconds", Kind.GAUGE, "time since the last status update to the server; above 60 it will hang up"
)
SLOT_RETAINED: Final = Metric("cdc_slot_retained_bytes", Kind.GAUGE, "WAL that the server keeps for the slot")
LOG_COMMITS: Final = Metric("cdc_log_commits_total", Kind.COUNTER, "Delta commits to the log")
LOG_BYTES: Final = Metric("cdc_log_bytes_total", Kind.COUNTER, "bytes of data files committed to the log")
LOG_APPEND_SECONDS: Final = Metric(
    "cdc_log_append_seconds", Kind.GAUGE, "duration of the last append, files and commit"
)
LOG_BLOCKED: Final = Metric(
    "cdc_log_blocked", Kind.GAUGE, "1 while the log's storage takes no more and reading from the source pauses"
)
SLOT_SAFE: Final = Metric(
    "cdc_slot_safe_bytes",
    Kind.GAUGE,
    "WAL that may still be written before the server gives the slot up; absent without a limit",
)
LOG_POSITION: Final = Metric("cdc_log_position", Kind.GAUGE, "the log's durable position, as a number")
SINK_LAG_SECONDS: Final = Metric(
    "cdc_sink_lag_seconds",
    Kind.GAUGE,
    "commit at the source to visible in the sink, for the last batch; grows while the sink is behind",
    _SINK,
)
SINK_LAG_BYTES: Final = Metric("cdc_sink_lag_bytes", Kind.GAUGE, "log's durable position minus the sink's", _SINK)
SINK_POSITION: Final = Metric("cdc_sink_position", Kind.GAUGE, "the sink's published position, as a number", _SINK)
APPLY_ROWS: Final = Metric("cdc_apply_rows_total", Kind.COUNTER, "folded rows merged into the sink", _SINK)
APPLY_SECONDS: Final = Metric("cdc_apply_seconds", Kind.GAUGE, "duration of the last batch from fold to publish", _SINK)
BATCHES: Final = Metric("cdc_apply_batches_total", Kind.COUNTER, "batches published", _SINK)
SNAPSHOT_ROWS: Final = Metric(
    "cdc_backfill_rows_total", Kind.COUNTER, "rows put in the log by copies, backfills and resyncs", _TABLE
)
BACKFILL_ESTIMATED: Final = Metric(
    "cdc_backfill_rows_estimated",
    Kind.GAUGE,
    "rows of a table that is being copied, as the planner thinks; absent when it is done, or if nobody has counted",
    _TABLE,
)
BACKFILL_SHARE: Final = Metric(
    "cdc_backfill_share",
    Kind.GAUGE,
    "0-1, how much of the copy of a table is in the log; absent when it is done",
    _TABLE,
)
BACKFILL_ETA: Final = Metric(
    "cdc_backfill_eta_seconds",
    Kind.GAUGE,
    "seconds until a copy is done at the pace so far; absent while it rests",
    _TABLE,
)
ERRORS: Final = Metric("cdc_errors_total", Kind.COUNTER, "errors met, by code", ("pipeline", "process", "code"))

EVERY: Final[Mapping[str, Metric]] = {m.name: m for m in list(globals().values()) if isinstance(m, Metric)}
"""Metric by name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure at one moment."""

    metric: Metric
    labels: tuple[str, ...]
    """In the order of metric.labels."""
    value: float


class Figures:
    """The current figures of one process; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = Lock()

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Put a gauge at value; labels in the order of metric.labels."""
        self._check(metric, labels)
        with self._lock:
            self._values[metric.name, labels] = value

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Move a counter (or a gauge) by value."""
        self._check(metric, labels)
        with self._lock:
            place = metric.name, labels
            self._values[place] = self._values.get(place, 0.0) + value

    def value(self, metric: Metric, *labels: str) -> float | None:
        """The figure as it stands; None before it was first set."""
        with self._lock:
            return self._values.get((metric.name, labels))

    def __iter__(self) -> Iterator[Sample]:
        with self._lock:
            values = sorted(self._values.items())
        return (Sample(EVERY[name], labels, value) for (name, labels), value in values)

    def to_json(self) -> list[list[object]]:
        """[[name, [label…], value]…], for the catalog."""
        return [[s.metric.name, list(s.labels), s.value] for s in self]

    @staticmethod
    def _check(metric: Metric, labels: tuple[str, ...]) -> None:
        if len(labels) != len(metric.labels):
            raise ValueError(f"wrong labels for {metric.name!r}: expected {metric.labels!r}, got {len(labels)} values")
