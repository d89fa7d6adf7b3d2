"""Definitions of all Prometheus metrics, and the `Metrics` object in which a process collects their values.

Each process writes the values of its `Metrics` to the catalog; the server process renders the values of all processes
as Prometheus text. Units are base units: seconds, bytes, rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from threading import Lock
from typing import Any, Final

BUCKET: Final = "_bucket"
"""Suffix of the names of a histogram's bucket series; the last label of such a series is the bucket's upper bound."""
SUM: Final = "_sum"
"""Suffix of the name of the series with the sum of a histogram's values."""
INFINITE: Final = "+Inf"
"""Upper bound, as text, of the last bucket of a histogram, which counts all values."""


class Kind(StrEnum):
    """Prometheus metric types."""

    #: Only increases, from 0 at the start of its process.
    COUNTER = "counter"
    #: Increases and decreases.
    GAUGE = "gauge"
    #: Counts observed values by size, from 0 at the start of its process.
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with the help text that `/metrics` shows."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("pipeline",)
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without the bound infinity; empty for other metrics."""


_SINK: Final = ("pipeline", "sink")
_TABLE: Final = ("pipeline", "table")
_TARGET: Final = ("pipeline", "sink", "table")
_CONSUMER: Final = ("pipeline", "consumer")
_VIEW: Final = ("pipeline", "view")
_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket bounds in seconds for durations: an append takes 10 ms, a merge of a large table half a minute."""
_LATENCIES: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Bucket bounds in seconds for latencies, from less than the latency of an idle machine to half an hour."""

BUILD_INFO: Final = Metric(
    "cdc_build_info",
    Kind.GAUGE,
    "always 1; the labels contain the version of cdc and the version of Python",
    ("pipeline", "version", "python"),
)

HEALTH: Final = Metric(
    "cdc_health", Kind.GAUGE, "1 while the process works, 0 while it reports an error", ("pipeline", "process")
)
COMPILING: Final = Metric(
    "cdc_reader_compiling",
    Kind.GAUGE,
    "1 while the reader compiles or loads its decoder, which takes at most 20 s the first time on a machine",
)
REPORT_AGE: Final = Metric(
    "cdc_report_age_seconds",
    Kind.GAUGE,
    "age in seconds of the last status report of the process, at scrape time; processes report every second",
    ("pipeline", "process"),
)
TABLE_STATE: Final = Metric(
    "cdc_table_state",
    Kind.GAUGE,
    "always 1; the label 'state' contains the current state of the table",
    ("pipeline", "sink", "table", "state"),
)
SOURCE_LAG_SECONDS: Final = Metric(
    "cdc_source_lag_seconds",
    Kind.GAUGE,
    "time from commit at the source to durable in the log, for the last transaction; grows while the reader is silent "
    "or has no stream",
)
SOURCE_LATENCY: Final = Metric(
    "cdc_source_latency_seconds",
    Kind.HISTOGRAM,
    "time from commit at the source to durable in the log, for the last transaction of each log commit",
    bounds=_LATENCIES,
)
SOURCE_UP: Final = Metric(
    "cdc_source_up",
    Kind.GAUGE,
    "1 while the source answers the server process; while this is 0, all metrics that are read there are absent",
)
SOURCE_LAG_BYTES: Final = Metric(
    "cdc_source_lag_bytes",
    Kind.GAUGE,
    "bytes of WAL from the durable or the confirmed position (label 'point') to the end of the source's WAL",
    ("pipeline", "point"),
)
WAL_RATE: Final = Metric(
    "cdc_source_wal_bytes_per_second", Kind.GAUGE, "WAL bytes per second that the source wrote during the last minute"
)
RECEIVED_BYTES: Final = Metric("cdc_received_bytes_total", Kind.COUNTER, "bytes of replication messages received")
SPOOLED_BYTES: Final = Metric(
    "cdc_spooled_bytes", Kind.GAUGE, "bytes on disk of streamed transactions that have not committed or aborted yet"
)
CHANGES: Final = Metric("cdc_changes_total", Kind.COUNTER, "log rows made durable")
TRANSACTIONS: Final = Metric("cdc_transactions_total", Kind.COUNTER, "transactions made durable")
RECONNECTS: Final = Metric("cdc_reconnects_total", Kind.COUNTER, "number of retries of the reader after an error")
SOURCE_TIMELINE: Final = Metric(
    "cdc_source_timeline", Kind.GAUGE, "timeline of the source that the reader streams from; a promotion increases it"
)
LOST_TRANSACTIONS: Final = Metric(
    "cdc_lost_transactions_total",
    Kind.COUNTER,
    "number of transactions of the log that a promoted server did not have; their rows or tables are read again",
)
FEEDBACK_AGE: Final = Metric(
    "cdc_feedback_age_seconds",
    Kind.GAUGE,
    "seconds since the source last received a status update; at wal_sender_timeout the source disconnects the reader",
)
SLOT_ACTIVE: Final = Metric("cdc_slot_active", Kind.GAUGE, "1 while a process streams from the slot, otherwise 0")
SLOT_WAL_STATUS: Final = Metric(
    "cdc_slot_wal_status",
    Kind.GAUGE,
    "always 1; the label 'status' contains the slot's wal_status: reserved, extended, unreserved (lost at the next "
    "checkpoint) or lost",
    ("pipeline", "status"),
)
SLOT_RETAINED: Final = Metric(
    "cdc_slot_retained_bytes", Kind.GAUGE, "bytes of WAL that the server retains for the slot; read at the source"
)
SLOT_UNCONFIRMED: Final = Metric(
    "cdc_slot_unconfirmed_seconds",
    Kind.GAUGE,
    "age in seconds of the oldest WAL that the reader has not confirmed; a healthy reader confirms at every heartbeat",
)
SLOT_SECONDS_LEFT: Final = Metric(
    "cdc_slot_seconds_left",
    Kind.GAUGE,
    "seconds until the slot is lost at the current WAL rate if nothing is confirmed; absent without "
    "max_slot_wal_keep_size",
)
LOG_COMMITS: Final = Metric("cdc_log_commits_total", Kind.COUNTER, "Delta commits to the log")
LOG_BYTES: Final = Metric("cdc_log_bytes_total", Kind.COUNTER, "bytes of data files committed to the log")
LOG_APPEND_SECONDS: Final = Metric(
    "cdc_log_append_seconds", Kind.GAUGE, "duration of the last append to the log: writing files and commit"
)
LOG_APPEND_DURATION: Final = Metric(
    "cdc_log_append_duration_seconds",
    Kind.HISTOGRAM,
    "duration of each append to the log: writing files and commit",
    bounds=_DURATIONS,
)
LOG_BLOCKED: Final = Metric(
    "cdc_log_blocked", Kind.GAUGE, "1 while the log's storage accepts no writes and reading from the source pauses"
)
SLOT_SAFE: Final = Metric(
    "cdc_slot_safe_bytes",
    Kind.GAUGE,
    "bytes of WAL that the source can write before it invalidates the slot; absent without max_slot_wal_keep_size",
)
COMPACTED_ROWS: Final = Metric("cdc_compacted_rows_total", Kind.COUNTER, "log rows folded into the compacted log")
COMPACTED_BYTES: Final = Metric("cdc_compacted_bytes", Kind.GAUGE, "size in bytes of the compacted log")
LOG_HORIZON: Final = Metric(
    "cdc_log_horizon",
    Kind.GAUGE,
    "position up to which the log is compacted, as a number; retention removes only changes up to this position",
)
LOG_OLDEST: Final = Metric(
    "cdc_log_oldest",
    Kind.GAUGE,
    "position above which the log still contains every single change, as a number; 0 if nothing was trimmed",
)
COMPACTION_CHANGES: Final = Metric(
    "cdc_compaction_changes", Kind.GAUGE, "log rows that the last compaction of this apply process read"
)
COMPACTION_SECONDS: Final = Metric(
    "cdc_compaction_seconds", Kind.GAUGE, "duration of the last compaction of this apply process"
)
COMPACTED_AT: Final = Metric(
    "cdc_log_compacted_timestamp_seconds", Kind.GAUGE, "Unix time of the last compaction of the log"
)
LOG_SEGMENTS: Final = Metric("cdc_log_segments", Kind.GAUGE, "number of segments of single changes in the log")
LOG_HELD: Final = Metric(
    "cdc_log_held_bytes",
    Kind.GAUGE,
    "bytes on disk of one part of the log: changes, compacted, or leaving (removed files that readers may still use)",
    ("pipeline", "part"),
)
HORIZON_LAG_BYTES: Final = Metric(
    "cdc_log_horizon_lag_bytes", Kind.GAUGE, "bytes of WAL between the compaction horizon and the end of the log"
)
HORIZON_LAG_SECONDS: Final = Metric(
    "cdc_log_horizon_lag_seconds",
    Kind.GAUGE,
    "seconds between the compaction horizon and the last change in the log; constant while nothing changes",
)
CONSUMER_LAG_BYTES: Final = Metric(
    "cdc_consumer_lag_bytes",
    Kind.GAUGE,
    "bytes of WAL between the position of a consumer of the log and the end of the log",
    _CONSUMER,
)
CONSUMER_LAG_SECONDS: Final = Metric(
    "cdc_consumer_lag_seconds",
    Kind.GAUGE,
    "seconds between the position of a consumer of the log and the last change in the log",
    _CONSUMER,
)
CONSUMER_SILENT: Final = Metric(
    "cdc_consumer_silent_seconds", Kind.GAUGE, "seconds since a consumer of the log last reported", _CONSUMER
)
CONSUMER_HOLDS: Final = Metric(
    "cdc_consumer_holds_bytes",
    Kind.GAUGE,
    "bytes of compacted segments that are retained because a consumer has not read them yet",
    _CONSUMER,
)
CONSUMER_LATE: Final = Metric(
    "cdc_consumer_late",
    Kind.GAUGE,
    "1 while the log no longer contains the changes after a consumer's position, so its target must be rebuilt",
    _CONSUMER,
)
LOG_POSITION: Final = Metric("cdc_log_position", Kind.GAUGE, "the log's durable position, as a number")
SINK_LAG_SECONDS: Final = Metric(
    "cdc_sink_lag_seconds",
    Kind.GAUGE,
    "time from commit at the source to visible in the sink for the last batch; grows while the sink is behind",
    _SINK,
)
SINK_LAG_BYTES: Final = Metric(
    "cdc_sink_lag_bytes", Kind.GAUGE, "bytes of WAL between the sink's position and the log's durable position", _SINK
)
SINK_POSITION: Final = Metric("cdc_sink_position", Kind.GAUGE, "the sink's published position, as a number", _SINK)
APPLY_ROWS: Final = Metric("cdc_apply_rows_total", Kind.COUNTER, "rows merged into the sink after the fold", _SINK)
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
    "time from commit at the source to visible in the sink, for the median row of each batch",
    _SINK,
    _LATENCIES,
)
CADENCE: Final = Metric(
    "cdc_sink_cadence_seconds",
    Kind.GAUGE,
    "minimum time between the starts of two batches while each batch rewrites too many bytes of the table; otherwise 0",
    _TARGET,
)
REWRITTEN_BYTES: Final = Metric(
    "cdc_sink_rewritten_bytes_total", Kind.COUNTER, "bytes of existing target files that batches rewrote", _SINK
)
FOREIGN_COMMITS: Final = Metric(
    "cdc_sink_foreign_commits_total",
    Kind.COUNTER,
    "commits of other clients that changed rows of a target; 'cdc verify' finds these rows",
    _TARGET,
)
NULLED_VALUES: Final = Metric(
    "cdc_sink_nulled_values_total",
    Kind.COUNTER,
    "values that the type of their target column cannot represent, written as NULL because of 'unrepresentable: null'",
    _TARGET,
)
SPARK_STARTED: Final = Metric(
    "cdc_spark_started", Kind.GAUGE, "1 after the apply process has started Spark, 0 while nothing has needed Spark"
)
ENGINE_BATCHES: Final = Metric(
    "cdc_sink_engine_batches_total",
    Kind.COUNTER,
    "batches published, by what applied them: the apply process (here), or a micro-batch of Spark (spark)",
    (*_SINK, "engine"),
)
ENGINE_ROWS: Final = Metric(
    "cdc_sink_engine_rows_total",
    Kind.COUNTER,
    "rows merged into the sink after the fold, by what applied them: here or spark",
    (*_SINK, "engine"),
)
ENGINE_SECONDS: Final = Metric(
    "cdc_sink_engine_seconds_total",
    Kind.COUNTER,
    "duration of the batches from fold to publish, by what applied them: here or spark",
    (*_SINK, "engine"),
)
SINK_IN_SPARK: Final = Metric(
    "cdc_sink_in_spark", Kind.GAUGE, "1 if Spark applied the sink's last batch, 0 if the apply process did", _SINK
)
BATCHES: Final = Metric("cdc_apply_batches_total", Kind.COUNTER, "batches published", _SINK)
DLQ_RECORDS: Final = Metric(
    "cdc_dlq_records", Kind.GAUGE, "number of keys in the dead-letter queue: the target refused their rows", _SINK
)
DELIVERY_EVENTS: Final = Metric(
    "cdc_delivery_events_total", Kind.COUNTER, "number of events that the destination has acknowledged", _SINK
)
DELIVERY_DROPPED: Final = Metric(
    "cdc_delivery_dropped_changes", Kind.GAUGE, "number of changes that the overload policy has left out", _SINK
)
VIEW_INPUT_ROWS: Final = Metric(
    "cdc_view_input_rows_total",
    Kind.COUNTER,
    "changed rows of tables from which a view was computed incrementally",
    _VIEW,
)
VIEW_AFFECTED_KEYS: Final = Metric(
    "cdc_view_affected_keys_total",
    Kind.COUNTER,
    "keys of a view whose rows were computed because changed rows of its tables could have changed them",
    _VIEW,
)
VIEW_CHANGES: Final = Metric("cdc_view_changes_total", Kind.COUNTER, "changes of a view's rows that were logged", _VIEW)
VIEW_COMPUTATIONS: Final = Metric(
    "cdc_view_computations_total",
    Kind.COUNTER,
    "number of times that a view was computed; the label 'mode' is incremental or whole",
    (*_VIEW, "mode"),
)
VIEW_SECONDS: Final = Metric(
    "cdc_view_seconds_total", Kind.COUNTER, "seconds that computing a view took, by mode", (*_VIEW, "mode")
)
VIEW_KEYS_LEFT: Final = Metric(
    "cdc_view_keys_left",
    Kind.GAUGE,
    "affected keys that the running computation of a view has not done yet; it does many keys in slices; absent while "
    "the whole view is computed",
    _VIEW,
)
VIEW_SECONDS_LEFT: Final = Metric(
    "cdc_view_seconds_left",
    Kind.GAUGE,
    "estimated seconds until the running computation of a view is complete; absent while the whole view is computed",
    _VIEW,
)
VERIFY_STATE: Final = Metric(
    "cdc_verify_state",
    Kind.GAUGE,
    "always 1; the label 'state' contains the state of the continuous verification: waiting, running, paused, failing, "
    "absent or off",
    ("pipeline", "state"),
)
VERIFY_SUCCESS: Final = Metric(
    "cdc_verify_last_success_timestamp_seconds",
    Kind.GAUGE,
    "Unix time at which a full comparison of a table with the source last found no mismatch; absent until then",
    _TARGET,
)
VERIFY_MISMATCHED: Final = Metric(
    "cdc_verify_mismatched_rows",
    Kind.GAUGE,
    "number of rows that differed when they were last compared with the source",
    _TARGET,
)
VERIFIED_THROUGH: Final = Metric(
    "cdc_verified_through_timestamp_seconds",
    Kind.GAUGE,
    "Unix time of the earliest comparison in the last complete pass: each row was compared with the source at this "
    "time or later; absent until a pass is complete",
    _TARGET,
)
SNAPSHOT_ROWS: Final = Metric(
    "cdc_backfill_rows_total",
    Kind.COUNTER,
    "rows that initial snapshots, backfills and resyncs wrote to the log",
    _TABLE,
)
BACKFILL_ESTIMATED: Final = Metric(
    "cdc_backfill_rows_estimated",
    Kind.GAUGE,
    "planner's estimate of the rows of a table that is being copied; absent after the copy and if no estimate exists",
    _TABLE,
)
BACKFILL_SHARE: Final = Metric(
    "cdc_backfill_share",
    Kind.GAUGE,
    "fraction (0 to 1) of a table's copy that is in the log; absent after the copy",
    _TABLE,
)
BACKFILL_ETA: Final = Metric(
    "cdc_backfill_eta_seconds",
    Kind.GAUGE,
    "estimated seconds until the copy of a table is complete; absent while the copy is paused",
    _TABLE,
)
ERRORS: Final = Metric(
    "cdc_errors_total", Kind.COUNTER, "number of errors by error code", ("pipeline", "process", "code")
)

METRICS_BY_NAME: Final[Mapping[str, Metric]] = {m.name: m for m in list(globals().values()) if isinstance(m, Metric)}
"""Every metric by its name."""


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
"""Metrics that the server process reads at the source; their values in reports of other processes are ignored."""


MOMENTARY: Final = frozenset(metric.name for metric in (COMPILING, SPOOLED_BYTES, LOG_BLOCKED, CADENCE, SPARK_STARTED))
"""Metrics of the current activity of a process; not exported once the process has ended or no longer reports."""


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric with its label values."""

    metric: Metric
    labels: tuple[str, ...]
    """Values of the labels, in the order of `metric.labels`."""
    value: float


class HistogramValues:
    """Bucket counts and sum of one histogram for one set of labels."""

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.bounds
        self._counts = [0] * (len(metric.bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Add the value to the sum, and count it in the first bucket whose upper bound is at least the value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def series(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield each Prometheus series of the histogram as (suffix of its name, its additional labels, its value).

        The counts of buckets are cumulative. The additional label of a bucket is its upper bound; the sum has none.
        """
        bounds = (*(str(bound) for bound in self._bounds), INFINITE)
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield BUCKET, (bound,), float(count)
        yield SUM, (), self._sum


class Metrics:
    """The current metrics of one process; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], HistogramValues] = {}
        self._lock = Lock()

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge to a value; `labels` are in the order of `metric.labels`."""
        self._check(metric, labels)
        with self._lock:
            self._values[metric.name, labels] = value

    def remove(self, metric: Metric, *labels: str) -> None:
        """Remove a gauge whose value is not known any more."""
        self._check(metric, labels)
        with self._lock:
            self._values.pop((metric.name, labels), None)

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Increase a counter by a value, or change a gauge by a value, which may be negative."""
        self._check(metric, labels)
        with self._lock:
            place = metric.name, labels
            self._values[place] = self._values.get(place, 0.0) + value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self._check(metric, labels)
        with self._lock:
            self._observed.setdefault((metric.name, labels), HistogramValues(metric)).add(value)

    def continue_from(self, reported: Iterable[Any]) -> None:
        """Add the counters of an earlier process, as it reported them with `to_json`.

        SNAPSHOT_ROWS is left out, because the reader adds the rows that the catalog has of each table.
        """
        with self._lock:
            for name, labels, value in reported:
                metric, place = METRICS_BY_NAME.get(name), (name, tuple(labels))
                if metric is not None and metric.kind is Kind.COUNTER and metric is not SNAPSHOT_ROWS:
                    self._values[place] = self._values.get(place, 0.0) + value

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return the current value of a metric with these labels; None if it was never set."""
        with self._lock:
            return self._values.get((metric.name, labels))

    def __iter__(self) -> Iterator[MetricSample]:
        with self._lock:
            values = sorted(self._values.items())
        return (MetricSample(METRICS_BY_NAME[name], labels, value) for (name, labels), value in values)

    def to_json(self) -> list[list[object]]:
        """Return `[[name, [label…], value]…]` for the catalog; a histogram becomes its Prometheus series."""
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
class CommitMetrics:
    """Measurements of one commit to the log: rows, transactions, bytes, duration and lag."""

    changes: int
    transactions: int
    nbytes: int
    seconds: float
    """Duration of the commit in seconds."""
    lag: float | None
    """Seconds from the commit of the last transaction at the source to its commit in the log; None if unknown."""


def record_commit(metrics: Metrics, pipeline: str, position: int, added: CommitMetrics) -> None:
    """Update the reader's metrics after a commit to the log; `position` is the last position of the commit."""
    metrics.add(CHANGES, added.changes, pipeline)
    metrics.add(TRANSACTIONS, added.transactions, pipeline)
    metrics.add(LOG_COMMITS, 1, pipeline)
    metrics.add(LOG_BYTES, added.nbytes, pipeline)
    metrics.set(LOG_APPEND_SECONDS, added.seconds, pipeline)
    metrics.observe(LOG_APPEND_DURATION, added.seconds, pipeline)
    metrics.set(LOG_POSITION, position, pipeline)
    if added.lag is not None:
        metrics.set(SOURCE_LAG_SECONDS, added.lag, pipeline)
        metrics.observe(SOURCE_LATENCY, added.lag, pipeline)
