"""Every metric: name, kind, labels and when it moves. Nothing else in the code makes one up.

Processes keep their figures in a `Metrics` and hand snapshots to the catalog; the server turns them
into Prometheus text. Units are base units: seconds, bytes, rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from threading import Lock
from typing import Final

BUCKET: Final = "_bucket"
"""Ends the name of a histogram's series of counts, each with its upper bound as the last label."""
SUM: Final = "_sum"
"""Ends the name of the sum of its values."""
INFINITE: Final = "+Inf"
"""The bound of the bucket with all of them."""


class Kind(StrEnum):
    """How a metric moves."""

    #: Only up, from 0 at the start of its process.
    COUNTER = "counter"
    #: Up and down.
    GAUGE = "gauge"
    #: Counts of values by size, from 0 at the start of its process.
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as `/metrics` shows it; help says when it moves."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("pipeline",)
    bounds: tuple[float, ...] = ()
    """Of a histogram: upper bounds of its buckets, ascending, without the infinite one."""


_SINK: Final = ("pipeline", "sink")
_TABLE: Final = ("pipeline", "table")
_TARGET: Final = ("pipeline", "sink", "table")
_CONSUMER: Final = ("pipeline", "consumer")
_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: an append takes 10 ms on a local disk, a merge of a large table half a minute."""
_LATENCIES: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Seconds: a tenth on an idle machine; beyond half an hour a bucket more says nothing."""

BUILD_INFO: Final = Metric(
    "cdc_build_info", Kind.GAUGE, "1, with the versions that run as labels", ("pipeline", "version", "python")
)

HEALTH: Final = Metric(
    "cdc_health", Kind.GAUGE, "1 while the process does its work, 0 while it does not", ("pipeline", "process")
)
COMPILING: Final = Metric(
    "cdc_reader_compiling",
    Kind.GAUGE,
    "1 while the reader compiles or loads its decoder, which takes up to 20 s the first time on a machine",
)
REPORT_AGE: Final = Metric(
    "cdc_report_age_seconds",
    Kind.GAUGE,
    "since a process last reported, at the moment of the scrape; processes report every second",
    ("pipeline", "process"),
)
TABLE_STATE: Final = Metric(
    "cdc_table_state", Kind.GAUGE, "1 for the state a table is in", ("pipeline", "sink", "table", "state")
)
SOURCE_LAG_SECONDS: Final = Metric(
    "cdc_source_lag_seconds",
    Kind.GAUGE,
    "age of the last transaction made durable, at the moment it became so; grows while the reader is silent or stalled",
)
SOURCE_LATENCY: Final = Metric(
    "cdc_source_latency_seconds",
    Kind.HISTOGRAM,
    "commit at the source to durable in the log, of the last transaction of each commit to the log",
    bounds=_LATENCIES,
)
SOURCE_UP: Final = Metric(
    "cdc_source_up", Kind.GAUGE, "1 while the source answers the server process; while it is 0 its figures are absent"
)
SOURCE_LAG_BYTES: Final = Metric(
    "cdc_source_lag_bytes",
    Kind.GAUGE,
    "server's WAL end minus this point; read from the source by the server process",
    ("pipeline", "point"),
)
WAL_RATE: Final = Metric(
    "cdc_source_wal_bytes_per_second", Kind.GAUGE, "WAL that the source writes, over the last minute"
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
    "cdc_feedback_age_seconds",
    Kind.GAUGE,
    "since the source last got a status update from the reader; above its wal_sender_timeout it hangs up",
)
SLOT_ACTIVE: Final = Metric(
    "cdc_slot_active", Kind.GAUGE, "1 while somebody streams from the slot, 0 while nobody does"
)
SLOT_WAL_STATUS: Final = Metric(
    "cdc_slot_wal_status",
    Kind.GAUGE,
    "1 for the wal_status of the slot: reserved, extended, unreserved (lost at the next checkpoint), lost",
    ("pipeline", "status"),
)
SLOT_RETAINED: Final = Metric(
    "cdc_slot_retained_bytes", Kind.GAUGE, "WAL that the server keeps for the slot; read at the source"
)
SLOT_UNCONFIRMED: Final = Metric(
    "cdc_slot_unconfirmed_seconds",
    Kind.GAUGE,
    "how long the source has had WAL that the reader has not confirmed; a healthy one confirms every heartbeat",
)
SLOT_SECONDS_LEFT: Final = Metric(
    "cdc_slot_seconds_left",
    Kind.GAUGE,
    "until the slot is lost if nothing is confirmed, at the present rate of WAL; absent without a limit",
)
LOG_COMMITS: Final = Metric("cdc_log_commits_total", Kind.COUNTER, "Delta commits to the log")
LOG_BYTES: Final = Metric("cdc_log_bytes_total", Kind.COUNTER, "bytes of data files committed to the log")
LOG_APPEND_SECONDS: Final = Metric(
    "cdc_log_append_seconds", Kind.GAUGE, "duration of the last append, files and commit"
)
LOG_APPEND_DURATION: Final = Metric(
    "cdc_log_append_duration_seconds",
    Kind.HISTOGRAM,
    "duration of each append, files and commit",
    bounds=_DURATIONS,
)
LOG_BLOCKED: Final = Metric(
    "cdc_log_blocked", Kind.GAUGE, "1 while the log's storage takes no more and reading from the source pauses"
)
SLOT_SAFE: Final = Metric(
    "cdc_slot_safe_bytes",
    Kind.GAUGE,
    "WAL that may still be written before the server gives the slot up; absent without a limit",
)
COMPACTED_ROWS: Final = Metric("cdc_compacted_rows_total", Kind.COUNTER, "log rows folded into the compacted log")
COMPACTED_BYTES: Final = Metric("cdc_compacted_bytes", Kind.GAUGE, "bytes of the compacted log, set by each compaction")
LOG_HORIZON: Final = Metric(
    "cdc_log_horizon", Kind.GAUGE, "position up to which the log is compacted, as a number; below it changes may go"
)
LOG_OLDEST: Final = Metric(
    "cdc_log_oldest", Kind.GAUGE, "position above which every change is still in the log by itself; 0 if all are"
)
COMPACTION_CHANGES: Final = Metric(
    "cdc_compaction_changes", Kind.GAUGE, "log rows that the last compaction of this apply process read"
)
COMPACTION_SECONDS: Final = Metric(
    "cdc_compaction_seconds", Kind.GAUGE, "duration of the last compaction of this apply process"
)
COMPACTED_AT: Final = Metric(
    "cdc_log_compacted_timestamp_seconds", Kind.GAUGE, "when the log was last compacted, by whomever; Unix time"
)
LOG_SEGMENTS: Final = Metric("cdc_log_segments", Kind.GAUGE, "segments of single changes that the log keeps")
LOG_HELD: Final = Metric(
    "cdc_log_held_bytes",
    Kind.GAUGE,
    "bytes on the disk: of single changes, of the compacted log, and of files that left both and wait for readers",
    ("pipeline", "part"),
)
HORIZON_LAG_BYTES: Final = Metric(
    "cdc_log_horizon_lag_bytes", Kind.GAUGE, "WAL from the position that the log is compacted up to, to its end"
)
HORIZON_LAG_SECONDS: Final = Metric(
    "cdc_log_horizon_lag_seconds", Kind.GAUGE, "the same in time, from change to change; stands while nothing happens"
)
CONSUMER_LAG_BYTES: Final = Metric(
    "cdc_consumer_lag_bytes", Kind.GAUGE, "WAL from where a reader of the log stands to the log's end", _CONSUMER
)
CONSUMER_LAG_SECONDS: Final = Metric(
    "cdc_consumer_lag_seconds", Kind.GAUGE, "the same in time, from change to change", _CONSUMER
)
CONSUMER_SILENT: Final = Metric(
    "cdc_consumer_silent_seconds", Kind.GAUGE, "since a reader of the log was last heard of", _CONSUMER
)
CONSUMER_HOLDS: Final = Metric(
    "cdc_consumer_holds_bytes",
    Kind.GAUGE,
    "compacted segments that stay because a reader has not passed them",
    _CONSUMER,
)
CONSUMER_LATE: Final = Metric(
    "cdc_consumer_late",
    Kind.GAUGE,
    "1 while the log does not lead on from where a reader stands: its target is to be built anew",
    _CONSUMER,
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
APPLY_DURATION: Final = Metric(
    "cdc_apply_duration_seconds",
    Kind.HISTOGRAM,
    "duration of each batch from fold to publish",
    _SINK,
    _DURATIONS,
)
SINK_LATENCY: Final = Metric(
    "cdc_sink_latency_seconds",
    Kind.HISTOGRAM,
    "commit at the source to visible in the sink, of the median row of each batch",
    _SINK,
    _LATENCIES,
)
CADENCE: Final = Metric(
    "cdc_sink_cadence_seconds",
    Kind.GAUGE,
    "least time between the beginnings of two batches, for the table that is written again too fast; 0 once none is",
    _TARGET,
)
REWRITTEN_BYTES: Final = Metric(
    "cdc_sink_rewritten_bytes_total", Kind.COUNTER, "bytes of the target's files that batches wrote again", _SINK
)
FOREIGN_COMMITS: Final = Metric(
    "cdc_sink_foreign_commits_total",
    Kind.COUNTER,
    "commits of other clients that changed rows of a target, which 'cdc verify' then finds; 0 where nobody else writes",
    _TARGET,
)
BATCHES: Final = Metric("cdc_apply_batches_total", Kind.COUNTER, "batches published", _SINK)
DLQ_RECORDS: Final = Metric(
    "cdc_dlq_records", Kind.GAUGE, "keys that the sink has parked because its target cannot take their rows", _SINK
)
VERIFY_SUCCESS: Final = Metric(
    "cdc_verify_last_success_timestamp_seconds",
    Kind.GAUGE,
    "when a comparison of every row of a table with the source last found nothing; absent until one did",
    _TARGET,
)
VERIFY_MISMATCHED: Final = Metric(
    "cdc_verify_mismatched_rows", Kind.GAUGE, "rows that differed when they were last compared with the source", _TARGET
)
VERIFIED_THROUGH: Final = Metric(
    "cdc_verified_through_timestamp_seconds",
    Kind.GAUGE,
    "every row was compared with the source as it was then, or later; absent until all were",
    _TARGET,
)
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


READ_AT_SOURCE: Final = frozenset(
    metric.name
    for metric in (
        SOURCE_UP,
        SOURCE_LAG_BYTES,
        WAL_RATE,
        FEEDBACK_AGE,
        SLOT_ACTIVE,
        SLOT_WAL_STATUS,
        SLOT_RETAINED,
        SLOT_SAFE,
        SLOT_UNCONFIRMED,
        SLOT_SECONDS_LEFT,
    )
)
"""Metrics that only the server process gives out, as it reads them itself: what others reported of them is old."""


MOMENTARY: Final = frozenset(metric.name for metric in (COMPILING, SPOOLED_BYTES, LOG_BLOCKED, CADENCE))
"""What a process does at the moment: of one that has ended or is silent nobody knows it."""


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One figure at one moment."""

    metric: Metric
    labels: tuple[str, ...]
    """In the order of metric.labels."""
    value: float


class Observed:
    """The values of one histogram under one set of labels, by size."""

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.bounds
        self._counts = [0] * (len(metric.bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count it in the bucket whose upper bound is the least that is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def series(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """(suffix of the name, upper bound or nothing, value); buckets hold all values up to their bound."""
        bounds = (*(str(bound) for bound in self._bounds), INFINITE)
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield BUCKET, (bound,), float(count)
        yield SUM, (), self._sum


class Metrics:
    """The current figures of one process; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], Observed] = {}
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

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        self._check(metric, labels)
        with self._lock:
            self._observed.setdefault((metric.name, labels), Observed(metric)).add(value)

    def value(self, metric: Metric, *labels: str) -> float | None:
        """The figure as it stands; None before it was first set."""
        with self._lock:
            return self._values.get((metric.name, labels))

    def __iter__(self) -> Iterator[MetricSample]:
        with self._lock:
            values = sorted(self._values.items())
        return (MetricSample(EVERY[name], labels, value) for (name, labels), value in values)

    def to_json(self) -> list[list[object]]:
        """[[name, [label…], value]…], for the catalog; of a histogram the series that Prometheus has of it."""
        with self._lock:
            observed = [
                [f"{name}{suffix}", [*labels, *bound], value]
                for (name, labels), histogram in sorted(self._observed.items())
                for suffix, bound, value in histogram.series()
            ]
        return [*([s.metric.name, list(s.labels), s.value] for s in self), *observed]

    @staticmethod
    def _check(metric: Metric, labels: tuple[str, ...]) -> None:
        if len(labels) != len(metric.labels):
            raise ValueError(f"wrong labels for {metric.name!r}: expected {metric.labels!r}, got {len(labels)} values")


@dataclass(frozen=True, slots=True)
class CommitFigures:
    """By one commit to the log."""

    changes: int
    transactions: int
    nbytes: int
    seconds: float
    """That it took."""
    lag: float | None
    """Seconds since the last transaction in it was committed at the source; None if nobody knows."""


def note_commit(figures: Metrics, pipeline: str, position: int, added: CommitFigures) -> None:
    """What a commit that ends there changes in the figures."""
    figures.add(CHANGES, added.changes, pipeline)
    figures.add(TRANSACTIONS, added.transactions, pipeline)
    figures.add(LOG_COMMITS, 1, pipeline)
    figures.add(LOG_BYTES, added.nbytes, pipeline)
    figures.set(LOG_APPEND_SECONDS, added.seconds, pipeline)
    figures.observe(LOG_APPEND_DURATION, added.seconds, pipeline)
    figures.set(LOG_POSITION, position, pipeline)
    if added.lag is not None:
        figures.set(SOURCE_LAG_SECONDS, added.lag, pipeline)
        figures.observe(SOURCE_LATENCY, added.lag, pipeline)
