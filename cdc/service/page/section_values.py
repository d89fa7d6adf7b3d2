"""Computes the values that the templates of the page show, from the status of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import quote

from cdc.catalog import AWAITS_SPARK
from cdc.service import number_format
from cdc.service.log_status_records import ConsumerLine, LogStatus, SegmentLine
from cdc.service.page.chart_coordinates import LagCurve, lag_curve
from cdc.service.status import PipelineStatus, SinkStatus, SourceStatus
from cdc.service.table_status import DROPPED, TableStatus
from cdc.snapshot.backfill_status import BackfillStatus, CopyProgress, is_part, progress_text, tables_text
from cdc.table import split_topic

TONES: Final[Mapping[str, str]] = {
    "running": "good",
    "streaming": "good",
    "live": "good",
    "copied": "good",
    "done": "good",
    "starting": "busy",
    "snapshotting": "busy",
    "copying": "busy",
    "bootstrapping": "busy",
    "catching_up": "busy",
    "queued": "busy",
    "degraded": "warn",
    "needs_resync": "warn",
    "refused": "warn",
    "paused": "warn",
    "waiting": "warn",
    "silent": "warn",
    "off": "warn",
    "absent": "warn",
    "late": "bad",
    "failing": "bad",
    "stale": "bad",
    "down": "bad",
    "failed": "bad",
    "missing": "bad",
    "stopped": "bad",
}
"""State → CSS class that colours it; all other states have the class `plain`."""
TABLES_SHOWN: Final = 500
"""Maximum number of tables on the page; the API lists all tables."""
ENDED_BACKFILLS_SHOWN: Final = 5
"""Maximum number of ended backfills on the page; `cdc backfill ls` and the API list more."""
_ACTIONS: Final = {"paused": ("resume", "cancel")}
"""State of a pending backfill → actions that it accepts; in all other states it accepts _RUNNING_ACTIONS."""
_RUNNING_ACTIONS: Final = ("pause", "cancel")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number on the page, with its name and unit, and a note that explains it."""

    name: str
    value: str
    unit: str
    note: str
    part: str = ""
    """Part of the log that the number describes; the part determines the colour."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Rate, lag and backlog of the flow from Postgres into the log, or from the log into a sink."""

    rate: str
    curve: LagCurve
    lag: tuple[str, str]
    """Present lag as number and unit."""
    instead_of_lag: str | None
    """Text to show in place of the lag; None to show the lag."""
    backlog: tuple[str, str]
    """Bytes of WAL by which the log is behind Postgres, or the sink behind the log, as number and unit."""


@dataclass(frozen=True, slots=True)
class TableView:
    """One table as the page shows it: its status at the source and in every sink."""

    schema: str
    name: str
    source: TableStatus | None
    sinks: tuple[TableStatus | None, ...]


@dataclass(frozen=True, slots=True)
class BackfillView:
    """One backfill as the page shows it, with its command and the buttons that control it."""

    status: BackfillStatus
    subject: str
    """Text with the kind, the tables and the sink of the backfill."""
    command: str
    """The `cdc` command that starts the same backfill."""
    reason: str
    """Why the backfill failed or waits; empty without a reason."""
    actions: tuple[BackfillButton, ...]


@dataclass(frozen=True, slots=True)
class BackfillButton:
    """A button that sends an action to a backfill."""

    action: str
    path: str
    """URL path of the request that the button sends."""
    command: str
    """The `cdc` command that sends the same action."""
    question: str
    """Question that the page asks before it sends the request; empty to send it without a question."""


def totals(status: PipelineStatus, rates: Mapping[str, object]) -> list[Figure]:
    """Return the numbers at the top of the page."""
    lags = [sink.lag_seconds for sink in status.sinks if sink.lag_seconds is not None]
    lag = number_format.duration_and_unit(max(lags, default=None))
    in_sinks = [table for table in status.tables if table.sink and table.state != DROPPED]
    streaming = sum(table.state == "streaming" for table in in_sinks)
    tables = f"{streaming}/{len(in_sinks)}" if in_sinks else number_format.UNKNOWN
    retained = number_format.size_and_unit(status.source.slot_retained_bytes)
    note = "commit to visible" if answers(status.source) else "of what the log has: the source does not answer"
    return [
        Figure("Slowest sink", *lag, status.lag_reason or note),
        Figure("Changes", number_format.format_rate(_number(rates.get("source"))), "rows/s", "into the log"),
        Figure("Tables", tables, "", "streaming, over all sinks"),
        Figure("Slot retains", *retained, _slot_note(status.source)),
    ]


def answers(source: SourceStatus) -> bool:
    """Return False if the source did not answer the last query of the server process."""
    return source.observed is None or source.observed.up


def source_edge(source: SourceStatus, rates: Mapping[str, object], lags: Mapping[str, object]) -> Edge:
    """Return rate, lag and backlog of the flow from Postgres into the log."""
    return Edge(
        rate=number_format.format_rate(_number(rates.get("source"))),
        curve=_curve(lags.get("source"), "lag Postgres to log"),
        lag=number_format.duration_and_unit(source.lag_seconds),
        instead_of_lag=source.activity or _stall(source.stalled_seconds),
        backlog=number_format.size_and_unit(source.lag_bytes),
    )


def sink_edge(sink: SinkStatus, rates: Mapping[str, object], lags: Mapping[str, object]) -> Edge:
    """Return rate, lag and backlog of the flow from the log into a sink."""
    waits_for_spark = sink.stalled_seconds is not None and (sink.reason or "").startswith(AWAITS_SPARK)
    return Edge(
        rate=number_format.format_rate(_number(rates.get(f"sink:{sink.name}"))),
        curve=_curve(lags.get(f"sink:{sink.name}"), f"lag log to {sink.name}"),
        lag=number_format.duration_and_unit(sink.lag_seconds),
        instead_of_lag=AWAITS_SPARK if waits_for_spark else _stall(sink.stalled_seconds),
        backlog=number_format.size_and_unit(sink.lag_bytes),
    )


def table_rows(tables: Iterable[TableStatus], sinks: Sequence[str]) -> list[TableView]:
    """Return every table as the page shows it; tables that need attention come first."""
    by_topic: dict[str, dict[str, TableStatus]] = {}
    for table in tables:
        by_topic.setdefault(table.topic, {})[table.sink] = table
    order = sorted(by_topic, key=lambda topic: (not _needs_attention(by_topic[topic].values()), topic))
    return [_table_row(topic, by_topic[topic], sinks) for topic in order]


def backfill_rows(status: PipelineStatus, definition: str, *, may_change: bool) -> list[BackfillView]:
    """Return the pending backfills of a pipeline, followed by the backfills that ended last.

    `definition` is the path of the definition file for the commands that the page shows.
    """
    pending = [backfill for backfill in status.backfills if backfill.pending]
    ended = [backfill for backfill in status.backfills if not backfill.pending][:ENDED_BACKFILLS_SHOWN]
    return [_backfill_row(status.name, backfill, definition, may_change=may_change) for backfill in (*pending, *ended)]


def copy_words(progress: CopyProgress) -> str:
    """Return the progress of a copy in words, such as rows, rate and time left; empty before the first rows."""
    return progress_text(progress).replace(",", number_format.THIN_SPACE)


def log_sizes(log: LogStatus) -> list[Figure]:
    """Return the size of each part of the log, and the time of the last compaction."""
    changes = f"{_quantity(log.row_count, 'row')} in {_quantity(log.segment_count, 'segment')}"
    rows = sum(run.rows for run in log.runs)
    compacted = f"{_quantity(rows, 'row')} in {_quantity(len(log.runs), 'run')}" if log.runs else "nothing yet"
    removed = "on disk for readers of older versions" if log.leaving_bytes else "none on disk"
    return [
        Figure("Single changes", *number_format.size_and_unit(log.changes_bytes), changes, "changes"),
        Figure("Compacted", *number_format.size_and_unit(log.compacted_bytes), compacted, "compacted"),
        Figure("Removed files", *number_format.size_and_unit(log.leaving_bytes), removed, "leaving"),
        _last_compaction(log),
    ]


def log_positions(log: LogStatus) -> list[Figure]:
    """Return the floor, the oldest position, the horizon and the end of the log, in this order."""
    behind = number_format.format_lag(log.horizon_behind_bytes, log.horizon_behind_seconds)
    floor_note = (
        "a sink below this position and the next one must be rebuilt" if log.floor else "every tombstone is kept"
    )
    horizon_note = f"{behind} before the end" if log.horizon else ""
    end_note = _segment(log, log.newest_segment)
    if log.switch_point:
        end_note = f"{end_note}, timeline {log.timeline} since {log.switch_point}"
    return [
        Figure("Tombstones removed up to", log.floor or "none", "", floor_note),
        Figure("Single changes after", log.oldest or "the beginning", "", _segment(log, log.oldest_segment)),
        Figure("Compacted up to", log.horizon or number_format.UNKNOWN, "", horizon_note),
        Figure("End", log.durable or number_format.UNKNOWN, "", end_note),
    ]


def consumer_lag(line: ConsumerLine) -> str:
    """Return a text about how far a consumer is behind the end of the log, in bytes, time and segments."""
    if not line.behind_segments:
        return "at the end"
    segments = f", {_quantity(line.behind_segments, 'segment')}" if line.behind_segments > 1 else ""
    return f"{number_format.format_lag(line.behind_bytes, line.behind_seconds)}{segments}"


def process_age(seconds: float | None) -> str:
    """Return how long ago a process last reported, such as `12 s ago`."""
    return number_format.UNKNOWN if seconds is None else f"{number_format.format_duration(seconds)} ago"


def _slot_note(source: SourceStatus) -> str:
    """Return a text about the WAL and the time left until the slot is lost, as far as these are known."""
    observed = source.observed
    if observed is not None and not observed.up:
        return "the source does not answer"
    if observed is None or observed.safe_bytes is None:
        return "WAL retained by Postgres"
    left = f"lost after {number_format.format_size(observed.safe_bytes)} more"
    if observed.seconds_left is None:
        return left
    return f"{left}, in {number_format.format_duration(observed.seconds_left)} at the present rate"


def _curve(lags: object, label: str) -> LagCurve:
    return lag_curve(lags if isinstance(lags, list) else [], label)


def _stall(seconds: float | None) -> str | None:
    """Return the text to show in place of an outdated lag; None if the reader or sink is not stalled."""
    return None if seconds is None else f"no new value for {number_format.format_age(seconds)}"


def _needs_attention(tables: Iterable[TableStatus]) -> bool:
    return any(TONES.get(table.state) in {"bad", "warn"} for table in tables)


def _table_row(topic: str, by_sink: Mapping[str, TableStatus], sinks: Sequence[str]) -> TableView:
    schema, name = split_topic(topic)
    return TableView(schema, name, by_sink.get(""), tuple(by_sink.get(sink) for sink in sinks))


def _backfill_row(pipeline: str, backfill: BackfillStatus, definition: str, *, may_change: bool) -> BackfillView:
    request, error = backfill.request, backfill.error
    part = ", some rows" if is_part(request) else ""
    sink = "" if request.sink is None else f", for {request.sink} alone"
    actions = _ACTIONS.get(backfill.state, _RUNNING_ACTIONS) if backfill.pending and may_change else ()
    return BackfillView(
        status=backfill,
        subject=f"{backfill.kind} of {tables_text(request)}{part}{sink}",
        command=backfill.command.removesuffix("FILE") + definition,
        reason=backfill.reason or "" if error is None else f"{error['code']} {error['message']}",
        actions=tuple(_button(pipeline, backfill, action, definition) for action in actions),
    )


def _button(pipeline: str, backfill: BackfillStatus, action: str, definition: str) -> BackfillButton:
    question = f"Cancel {backfill.kind} {backfill.id}? Rows that it already sent stay."
    return BackfillButton(
        action=action,
        path=f"/api/v1/pipelines/{quote(pipeline, safe='')}/backfills/{backfill.id}/{action}",
        command=f"cdc backfill {action} {backfill.id} -c {definition}",
        question=question if action == "cancel" else "",
    )


def _last_compaction(log: LogStatus) -> Figure:
    compaction = log.compaction
    if compaction is None:
        return Figure("Last compaction", number_format.UNKNOWN, "", "none so far")
    number, unit = number_format.age_and_unit(_age(log, compaction.at))
    changes = "" if compaction.changes is None else f"{_quantity(compaction.changes, 'change')} read, "
    duration = "" if compaction.seconds is None else f", in {number_format.format_duration(compaction.seconds)}"
    note = f"{changes}{_quantity(compaction.rows, 'row')} written{duration}"
    return Figure("Last compaction", number, f"{unit} ago", note)


def _segment(log: LogStatus, line: SegmentLine | None) -> str:
    if line is None:
        return "no segment yet"
    since = "" if line.began_at is None else f", started {number_format.format_age(_age(log, line.began_at))} ago"
    return f"segment {line.segment}, {number_format.format_size(line.bytes)}{since}"


def _age(log: LogStatus, time: str) -> float:
    return max(0.0, (datetime.fromisoformat(log.at) - datetime.fromisoformat(time)).total_seconds())


def _quantity(number: int, noun: str) -> str:
    return number_format.format_quantity(number, noun).replace(",", number_format.THIN_SPACE)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
