"""Pipeline status: state, lags and problems, computed from the catalog's rows and the time.

Processes report at least every three seconds. If the last report of a process is older than REPORT_MAX_AGE and does not
say that the process ended, the state of the process is `stale`. The lags of a stale, stopped or failed process grow
with the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from cdc.catalog import REFUSED, REPORT_MAX_AGE
from cdc.errors import RESYNC, LogUnwritable, SchemaNotApplicable, complete_remedy
from cdc.metrics import (
    APPLY_ROWS,
    CHANGES,
    COMPACTION_CHANGES,
    COMPACTION_SECONDS,
    COMPILING,
    DELIVERY_EVENTS,
    LOG_HORIZON,
    LOG_POSITION,
    SINK_IN_SPARK,
    SINK_LAG_BYTES,
    SOURCE_LAG_SECONDS,
    SPARK_STARTED,
    Metric,
)
from cdc.position import Position
from cdc.service.log_status_records import LogState, LogStatus, wal_between
from cdc.service.machine_load import MachineLoad
from cdc.service.position_history import PositionHistory
from cdc.service.problem import REMEDIES, Problem, problem_from_reason
from cdc.service.slot_risk import SourceObservation
from cdc.service.table_status import DROPPED, TableStatus, table_statuses
from cdc.service.verification_status import (
    VerificationStatus,
    VerifiedStatus,
    mismatch_problems,
    verification_problems,
    verification_status,
    verified_statuses,
)
from cdc.snapshot.backfill_status import BackfillStatus, list_backfills
from cdc.snapshot.executor_copy_status import ExecutorCopy, executor_copy

if TYPE_CHECKING:
    from cdc.catalog import Catalog
    from cdc.service.defined_pipeline import DefinedPipeline

RUNNING: Final = "running"
"""Pipeline state in which reader and apply report, and there are no problems."""
DEGRADED: Final = "degraded"
"""Pipeline state in which reader and apply report, and there are problems."""
DOWN: Final = "down"
"""Pipeline state in which reader or apply failed, has stopped, or does not report, or in which the source does not
answer."""
REQUIRED_PROCESSES: Final = ("reader", "apply")
"""Processes without which the pipeline does not run; the server process itself does not count."""
NOT_REPORTING: Final = frozenset({"stale", "stopped", "failed"})
"""States of processes that no longer report progress."""
COMPILING_ACTIVITY: Final = "compiles its decoder, once per machine"
FAILED_STATES: Final = frozenset({"failed", "stale", "stopped", "needs_resync", REFUSED})


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The current status of one process of the pipeline."""

    process: str
    pid: int | None
    state: str
    """The last reported state; `stale` if the report is too old, `missing` if there is none. `copied` is the
    state of a reader that ran only for the copies and has ended."""
    age_seconds: float | None
    """Seconds since the last report of the process."""
    error: Mapping[str, Any] | None
    has_spark: bool | None = None
    """Whether the apply process has started Spark; false while nothing has needed Spark, null for other processes."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """Progress of the reader, which copies the changes of the source to the log."""

    position: str | None
    lag_seconds: float | None
    lag_bytes: float | None
    rows: float
    """Number of rows that readers have written to the log since the catalog was created."""
    slot_retained_bytes: float | None
    observed: SourceObservation | None = None
    """What the server process observed at the source; null before its first query."""
    slot_seconds_left: float | None = None
    """Seconds until the slot is lost at the present WAL rate; null if retained WAL is unlimited or the rate unknown."""
    slot_forecast: str | None = None
    """Sentence about the WAL that is retained for the slot, and the WAL left until the slot is lost."""
    activity: str | None = None
    """Text to show while the reader compiles its decoder; null at other times."""
    stalled_seconds: float | None = None
    """Seconds for which the reader has left WAL unconfirmed; null if the reader is not stalled."""


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """Progress of one sink, which apply fills from the log, or of one delivery, which `deliver` sends from the log."""

    name: str
    state: str
    reason: str | None
    """Why the sink does not continue, or why it is slow."""
    position: str | None
    committed_at: str | None
    """Commit time of the last transaction in the sink, ISO 8601 UTC."""
    lag_seconds: float | None
    lag_bytes: float | None
    rows: float
    """Number of folded rows that apply has merged into the sink, or of events that the delivery has sent, since the
    catalog was created."""
    stalled_seconds: float | None = None
    """Seconds for which the log has had changes that the sink has not published; null if the sink is not stalled."""
    process: str = "apply"
    """Process that moves it: `apply` for a sink, `deliver` for a delivery."""
    engine: str | None = None
    """What applied the last batch: `here` (the apply process) or `spark`; null for a delivery, and before a batch."""


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """The status of one pipeline at one time."""

    name: str
    state: str
    """running | degraded (reader and apply report, but there are problems) | down (reader or apply does not run, or the
    source answers neither the reader nor the server process)."""
    at: str
    processes: tuple[ProcessStatus, ...]
    source: SourceStatus
    sinks: tuple[SinkStatus, ...]
    tables: tuple[TableStatus, ...]
    problems: tuple[Problem, ...] = field(default=())
    backfills: tuple[BackfillStatus, ...] = field(default=())
    """Pending and recently ended backfills, newest first."""
    executor_copy: ExecutorCopy | None = None
    """What executors read for the reader; null unless a 'cdc spark submit copy' runs."""
    log: LogStatus | None = None
    """The last status of the log; null before the first sample."""
    verified: tuple[VerifiedStatus, ...] = field(default=())
    """One verification result per table and sink; a table that was never compared with the source has none."""
    verification: VerificationStatus | None = None
    """What the continuous verification does."""
    load: MachineLoad | None = None
    """Processor time that the pipeline's processes use; null if it is unknown."""

    @property
    def lag_reason(self) -> str | None:
        """Return a text if this machine's load explains the lag of the slowest sink; otherwise None."""
        lags = [sink.lag_seconds for sink in self.sinks if sink.lag_seconds is not None]
        return None if self.load is None else self.load.reason(max(lags, default=None))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the API, the page and `cdc status --json`."""
        return asdict(self)


def pipeline_status(
    catalog: Catalog, name: str, now: datetime, log: LogStatus | None = None, *, defined: DefinedPipeline | None = None
) -> PipelineStatus:
    """Return the status of one pipeline. Raises CatalogUnavailable.

    `log` is the last status of the pipeline's log. `defined` is the definition of the pipeline: the status has nothing
    of what was removed from it. Without it, the status has everything that was ever reported.
    """
    reports = {report.process: report for report in catalog.processes.ls(name)}
    known = tuple(
        _process(p, reports.get(p), now) for p in [*REQUIRED_PROCESSES, *sorted(set(reports) - set(REQUIRED_PROCESSES))]
    )
    processes = tuple(one for one in known if defined is None or defined.has_process(one.process))
    silence = {p.process: p.age_seconds if p.state in NOT_REPORTING and p.age_seconds else 0.0 for p in known}
    reported = {process: ReportedMetrics(report.figures) for process, report in reports.items()}
    source = _source(reported.get("reader", ReportedMetrics(())), silence["reader"])
    durable = reported.get("reader", ReportedMetrics(())).get(LOG_POSITION)
    applied, delivered = (reported.get(process, ReportedMetrics(())) for process in ("apply", "deliver"))
    sinks = tuple(
        _sink(progress, applied, durable, silence["apply"])
        if (sent := delivered.get(DELIVERY_EVENTS, progress.sink)) is None
        else replace(_sink(progress, delivered, durable, silence["deliver"]), rows=sent, process="deliver")
        for progress in catalog.sinks.ls(name)
        if defined is None or progress.sink in defined.sinks
    )
    backfills = tuple(list_backfills(catalog, name))
    tables = table_statuses(
        [one for one in catalog.tables.ls(name) if defined is None or defined.has_table(one.sink, one.topic)], backfills
    )
    log = None if log is None else _log(log, source, applied)
    log_problems = () if log is None else log.problems
    dropped = {(table.sink, table.topic) for table in tables if table.state == DROPPED}
    verified = tuple(
        one
        for one in verified_statuses(catalog.verified.ls(name))
        if (one.sink, one.topic) not in dropped and (defined is None or defined.has_table(one.sink, one.topic))
    )
    has_server = any(p.process == "server" and p.state not in NOT_REPORTING for p in processes)
    verification = verification_status(catalog.verification.get(name), verified, has_server=has_server)
    of_tables = (*_table_problems(tables), *mismatch_problems(verified), *verification_problems(verification))
    of_log = _with_process_problems(log_problems, tuple(_process_problems(processes)))
    found = (*of_log, *_sink_problems(sinks), *of_tables)
    file = None if defined is None else defined.file
    problems = tuple(replace(problem, remedy=complete_remedy(problem.remedy, file=file)) for problem in found)
    return PipelineStatus(
        name=name,
        state=_pipeline_state(processes, problems),
        at=now.isoformat(),
        processes=processes,
        source=source,
        sinks=sinks,
        tables=tables,
        problems=problems,
        backfills=backfills,
        executor_copy=executor_copy(catalog, name),
        log=log,
        verified=verified,
        verification=verification,
    )


class ReportedMetrics:
    """The metrics that one process reported as `[[name, [label…], value]…]`."""

    def __init__(self, reported: Iterable[Any]) -> None:
        # not converted: a float cannot represent a position with its epoch exactly
        self._values: dict[tuple[str, tuple[str, ...]], float] = {
            (name, tuple(labels)): value for name, labels, value in reported
        }

    def get(self, metric: Metric, *labels: str) -> float | None:
        """Return the value of a metric; None if it was not reported. The labels do not include the pipeline's name."""
        for (name, found), value in self._values.items():
            if name == metric.name and found[1:] == labels:
                return value
        return None


def _process(process: str, report: Any, now: datetime) -> ProcessStatus:
    if report is None:
        return ProcessStatus(process, None, "missing", None, None)
    age = report.age(now)
    ended = report.state in {"stopped", "failed", "copied"}
    state = report.state if age <= REPORT_MAX_AGE or ended else "stale"
    spark = ReportedMetrics(report.figures).get(SPARK_STARTED)
    return ProcessStatus(process, report.pid, state, age, report.error, None if spark is None else spark > 0)


def _source(reported: ReportedMetrics, silence: float) -> SourceStatus:
    position = reported.get(LOG_POSITION)
    return SourceStatus(
        position=None if position is None else str(Position(int(position))),
        lag_seconds=_extrapolated_lag(reported.get(SOURCE_LAG_SECONDS), silence),
        lag_bytes=None,
        rows=reported.get(CHANGES) or 0.0,
        slot_retained_bytes=None,
        activity=COMPILING_ACTIVITY if reported.get(COMPILING) and not silence else None,
    )


def with_source(
    status: PipelineStatus, observed: SourceObservation | None, heartbeat: float, *, file: str | None = None
) -> PipelineStatus:
    """Return the status with the server's own observation of the source, which is correct even if the reader hangs.

    `heartbeat` is the number of seconds between two heartbeats, or 0 without heartbeats. On an idle source a healthy
    reader confirms WAL once per heartbeat. The reader counts as stalled if WAL stays unconfirmed for more than two
    heartbeats. Without heartbeats this function reports no stall.
    """
    if observed is None:
        return status
    lag, unconfirmed = status.source.lag_seconds, observed.unconfirmed_seconds or 0.0
    stalled = unconfirmed if heartbeat and unconfirmed > 2 * heartbeat + REPORT_MAX_AGE else None
    if lag is not None and stalled is not None:
        lag = max(lag, stalled)
    durable = None if status.source.position is None else Position.parse(status.source.position)
    source = replace(
        status.source,
        lag_seconds=lag,
        lag_bytes=None if durable is None or observed.wal_end is None else max(0, observed.wal_end - durable.lsn),
        slot_retained_bytes=observed.retained_bytes,
        stalled_seconds=stalled,
        observed=observed,
        slot_seconds_left=observed.seconds_left,
        slot_forecast=observed.forecast,
    )
    found = (replace(problem, remedy=complete_remedy(problem.remedy, file=file)) for problem in observed.problems())
    problems = (*found, *status.problems)
    waiting = any(p.process == "reader" and p.state == "waiting" for p in status.processes)
    state = DOWN if waiting and not observed.up else _pipeline_state(status.processes, problems)
    return replace(status, source=source, problems=problems, state=state)


def with_delays(status: PipelineStatus, durable: PositionHistory, now: float) -> PipelineStatus:
    """Return the status with lags that grow while a sink makes no progress.

    From `durable`, the function computes for how long the log has contained changes that a sink does not show. If this
    time exceeds REPORT_MAX_AGE, the sink's lag becomes at least this time. The reported lag is not enough: an apply
    process that hangs but still reports repeats the lag of its last batch.
    """
    sinks = tuple(_delayed(sink, durable, now) for sink in status.sinks)
    return replace(status, sinks=sinks)


def _delayed(sink: SinkStatus, durable: PositionHistory, now: float) -> SinkStatus:
    if sink.position is None or sink.lag_seconds is None:
        return sink
    behind = durable.seconds_behind(int(Position.parse(sink.position)), now)
    # a shorter lag is reported more exactly, because positions are sampled only every few seconds
    if behind <= REPORT_MAX_AGE:
        return sink
    return replace(sink, lag_seconds=max(sink.lag_seconds, behind), stalled_seconds=behind)


def _log(log: LogStatus, source: SourceStatus, applied: ReportedMetrics) -> LogStatus:
    """Return the log's status with duration and changes of the last compaction, if apply reported them.

    Before the first copy there is no log; the status then has no problem about the missing log.
    """
    if log.state is LogState.ABSENT and source.position is None:
        return replace(log, problems=())
    last = log.compaction
    if last is None or log.horizon is None or applied.get(LOG_HORIZON) != Position.parse(log.horizon):
        return log
    changes, seconds = applied.get(COMPACTION_CHANGES), applied.get(COMPACTION_SECONDS)
    compaction = replace(last, changes=None if changes is None else int(changes), seconds=seconds)
    return replace(log, compaction=compaction)


def _sink(progress: Any, reported: ReportedMetrics, durable: float | None, silence: float) -> SinkStatus:
    behind = None if durable is None else wal_between(Position(progress.position), Position(int(durable)))
    return SinkStatus(
        name=progress.sink,
        state="stale" if silence and progress.state != "failed" else progress.state,
        reason=progress.reason,
        position=str(Position(progress.position)),
        committed_at=None if progress.committed_at is None else progress.committed_at.isoformat(),
        lag_seconds=_extrapolated_lag(progress.lag_seconds, silence),
        lag_bytes=reported.get(SINK_LAG_BYTES, progress.sink) if durable is None else behind,
        rows=reported.get(APPLY_ROWS, progress.sink) or 0.0,
        engine=_engine(reported.get(SINK_IN_SPARK, progress.sink)),
    )


def _engine(in_spark: float | None) -> str | None:
    if in_spark is None:
        return None
    return "spark" if in_spark else "here"


def _extrapolated_lag(lag: float | None, silence: float) -> float | None:
    return None if lag is None else lag + silence


def _pipeline_state(processes: Iterable[ProcessStatus], problems: Iterable[Problem]) -> str:
    broken = {"stale", "missing", "failed", "stopped"}
    if any(p.process in REQUIRED_PROCESSES and p.state in broken for p in processes):
        return DOWN
    return DEGRADED if tuple(problems) else RUNNING


def _process_problems(processes: Iterable[ProcessStatus]) -> Iterable[Problem]:
    for p in processes:
        if p.error:
            code = str(p.error.get("code", "")) or None
            remedy = p.error.get("suggestion") or REMEDIES.get(code or "") or "read the log of the process"
            yield Problem(p.process, code, str(p.error.get("message", p.state)), str(remedy))
        elif p.state == "stale":
            message = (
                f"the process has not reported for {p.age_seconds:.0f} s"
                if p.age_seconds is not None
                else "the process has not reported"
            )
            yield Problem(p.process, None, message, "start the process with 'cdc run', or read in its log why it hangs")
        elif p.state in {"missing", "stopped", "failed"}:
            yield Problem(p.process, None, f"the process does not run ({p.state})", "start the process with 'cdc run'")


def _with_process_problems(of_log: tuple[Problem, ...], of_processes: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Return both; those of the log first if its disk is full, because a process then cannot report its error."""
    if all(problem.code != LogUnwritable.code for problem in of_log):
        return (*of_processes, *of_log)
    silent = (replace(one, remedy=LogUnwritable.remedy) if one.code is None else one for one in of_processes)
    return (*of_log, *silent)


def _sink_problems(sinks: Iterable[SinkStatus]) -> Iterable[Problem]:
    for s in sinks:
        if s.state == "failed":
            yield problem_from_reason(
                f"{'delivery' if s.process == 'deliver' else 'sink'} {s.name}",
                s.reason or s.state,
                f"read the log of the process {s.process!r}, which tries again",
            )


def _table_problems(tables: Iterable[TableStatus]) -> Iterable[Problem]:
    for t in tables:
        if t.state in FAILED_STATES:
            subject = f"table {t.topic} in {t.sink}" if t.sink else f"table {t.topic}"
            otherwise = SchemaNotApplicable.remedy if t.sink else RESYNC
            problem = problem_from_reason(subject, t.reason or t.state, otherwise)
            yield replace(problem, remedy=complete_remedy(problem.remedy, sink=t.sink or None, topic=t.topic))
