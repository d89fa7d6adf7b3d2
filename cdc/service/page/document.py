"""The page: one pipeline's status as HTML, as a whole document first and in sections afterwards.

Every value passes `escape` here, so nothing from the catalog reaches the browser as markup. Only the server renders
sections; the script replaces those whose text changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Final
from urllib.parse import quote

from cdc.catalog import AWAITS_SPARK
from cdc.errors import COMMAND
from cdc.service import number_format
from cdc.service.page import backfills, log_section
from cdc.service.page.sparkline import sparkline
from cdc.service.page.state_badge import TONES, badge
from cdc.service.status import PipelineStatus, ProcessStatus, SinkStatus, SourceStatus
from cdc.service.table_status import TableStatus
from cdc.table import split_topic

SECTIONS: Final = ("headline", "problems", "totals", "flow", "log", "tables", "backfills", "processes")
"""Ids of the sections that `render` returns."""
TABLES_SHOWN: Final = 500
"""Number of tables on the page; the API lists all."""


@dataclass(frozen=True, slots=True)
class PageContext:
    """What the page shows in addition to the status, constant while the server runs."""

    source: str
    """Host and database of Postgres, never a password."""
    log: str
    """Root of the log."""
    sink_types: Mapping[str, str]
    """Sink → its type."""
    definition: str
    """Definition file, as commands name it."""
    may_change: bool
    """Whether the service accepts requests that change something."""


def page(status: PipelineStatus, context: PageContext, history: Mapping[str, Mapping[str, object]]) -> str:
    """The whole document."""
    sections = render(status, context, history)
    return _fill_template({**sections, "title": escape(status.name), "state": escape(status.state), "lock": ""})


def locked_page() -> str:
    """The document without any data: its script asks for the token and then loads the sections."""
    return _fill_template({**dict.fromkeys(SECTIONS, ""), "title": "cdc", "state": "locked", "lock": "data-locked"})


def docs_page() -> str:
    """The document that shows the API's description, which its script loads, with the token if there is one."""
    return _read_static("docs.html")


def _fill_template(parts: Mapping[str, str]) -> str:
    return Template(_read_static("page.html")).substitute(parts)


def _read_static(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def render(status: PipelineStatus, context: PageContext, history: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Section id → its inner HTML; history is RateHistory.to_json()."""
    rates, lags = history["rates"], history["lags"]
    return {
        "headline": _headline(status),
        "problems": "".join(_problem(p.subject, p.code, p.message, p.remedy) for p in status.problems),
        "totals": _totals(status, rates),
        "flow": _flow(status, context, rates, lags),
        "log": log_section.section(status.log),
        "tables": _tables(status),
        "backfills": backfills.table(status.name, status.backfills, context.definition, may_change=context.may_change),
        "processes": "".join(_process(p) for p in status.processes),
    }


def _headline(status: PipelineStatus) -> str:
    return f"<h1>{escape(status.name)}</h1>{badge(status.state)}"


def _problem(subject: str, code: str | None, message: str, remedy: str) -> str:
    known = f'<a class="code" href="/api/v1/errors/{quote(code)}">{escape(code)}</a>' if code else ""
    return (
        f'<li class="problem"><p class="what"><strong>{escape(subject)}</strong>{known}'
        f"<span>{escape(message)}</span></p>"
        f'<p class="fix"><span aria-hidden="true">→</span><span>{escape(remedy)}</span>'
        f"{_copy(remedy)}</p></li>"
    )


def _copy(remedy: str) -> str:
    """A copy button for the command in the remedy, if there is one."""
    command = COMMAND.search(remedy)
    if command is None:
        return ""
    text = escape(command[1])
    return f'<button type="button" data-copy="{text}" aria-label="Copy the command {text}">Copy</button>'


def _totals(status: PipelineStatus, rates: Mapping[str, object]) -> str:
    lags = [sink.lag_seconds for sink in status.sinks if sink.lag_seconds is not None]
    streaming = sum(1 for t in status.tables if t.sink and t.state == "streaming")
    placed = sum(1 for t in status.tables if t.sink)
    return "".join(
        (
            _total(
                "Slowest sink",
                *number_format.duration_and_unit(max(lags, default=None)),
                status.lag_reason or "commit to visible",
            ),
            _total("Changes", number_format.format_rate(_number(rates.get("source"))), "rows/s", "into the log"),
            _total(
                "Tables", f"{streaming}/{placed}" if placed else number_format.UNKNOWN, "", "streaming, over all sinks"
            ),
            _total(
                "Slot retains",
                *number_format.size_and_unit(status.source.slot_retained_bytes),
                _slot_note(status.source),
            ),
        )
    )


def _slot_note(source: SourceStatus) -> str:
    """What is left until the slot is lost, or why that is unknown."""
    observed = source.observed
    if observed is not None and not observed.up:
        return "the source does not answer"
    if observed is None or observed.safe_bytes is None:
        return "WAL retained by Postgres"
    left = f"{number_format.format_size(observed.safe_bytes)} left"
    if observed.seconds_left is None:
        return left
    return f"{left}, {number_format.format_duration(observed.seconds_left)} at the present rate"


def _total(name: str, value: str, unit: str, note: str) -> str:
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd><p>{escape(note)}</p></div>"


def _flow(status: PipelineStatus, context: PageContext, rates: Mapping[str, object], lags: Mapping[str, object]) -> str:
    source = status.source
    first = _edge("source", "Postgres to log", (rates, lags), _source_lag(source), source.lag_bytes)
    branches = "".join(_branch(sink, context, rates, lags) for sink in status.sinks)
    empty = '<li class="branch"><p class="quiet">No sink has published yet.</p></li>'
    return (
        f'<div class="node"><h3>Postgres</h3><p class="where">{escape(context.source)}</p></div>{first}'
        f'<div class="node"><h3>Log</h3><p class="where">{escape(context.log)}</p>'
        f'<p class="lsn">{escape(source.position or number_format.UNKNOWN)}</p></div>'
        f'<ul class="branches">{branches or empty}</ul>'
    )


def _branch(sink: SinkStatus, context: PageContext, rates: Mapping[str, object], lags: Mapping[str, object]) -> str:
    kind = context.sink_types.get(sink.name, "sink")
    edge = _edge(f"sink:{sink.name}", f"log to {sink.name}", (rates, lags), _sink_lag(sink), sink.lag_bytes)
    slowed = f'<p class="quiet">{escape(sink.reason)}</p>' if sink.reason and sink.state != "failed" else ""
    return (
        f'<li class="branch">{edge}<div class="node"><h3>{escape(sink.name)} <small>{escape(kind)}</small></h3>'
        f'{badge(sink.state)}<p class="lsn">{escape(sink.position or number_format.UNKNOWN)}</p>{slowed}</div></li>'
    )


def _edge(
    edge: str,
    label: str,
    history: tuple[Mapping[str, object], Mapping[str, object]],
    lag: str,
    lag_bytes: float | None,
) -> str:
    rates, lags = history
    curve = lags.get(edge, [])
    rate = number_format.format_rate(_number(rates.get(edge)))
    behind = number_format.size_and_unit(lag_bytes)
    svg = sparkline(curve if isinstance(curve, list) else [], escape(f"lag {label}"))
    return (
        f'<div class="edge"><p class="rate"><b>{escape(rate)}</b> rows/s</p><div class="wire">{svg}</div>'
        f'<p class="lag"><span>{lag}</span>'
        f"<span><b>{escape(behind[0])}</b> {behind[1]}</span></p></div>"
    )


def _source_lag(source: SourceStatus) -> str:
    return escape(source.activity) if source.activity else _lag(source.lag_seconds, source.stalled_seconds)


def _sink_lag(sink: SinkStatus) -> str:
    waits = sink.stalled_seconds is not None and sink.reason == AWAITS_SPARK
    return AWAITS_SPARK if waits else _lag(sink.lag_seconds, sink.stalled_seconds)


def _lag(seconds: float | None, stalled: float | None) -> str:
    """The lag, or how long there has been none: a lag from before a stall is not the present one."""
    if stalled is not None:
        return f"no new value for {escape(number_format.format_age(stalled))}"
    number, unit = number_format.duration_and_unit(seconds)
    return f"<b>{escape(number)}</b> {unit} lag"


def _tables(status: PipelineStatus) -> str:
    by_topic: dict[str, dict[str, TableStatus]] = {}
    for table in status.tables:
        by_topic.setdefault(table.topic, {})[table.sink] = table
    sinks = sorted({t.sink for t in status.tables if t.sink})
    if not by_topic:
        return '<p class="quiet">No table is captured yet.</p>'
    order = sorted(by_topic, key=lambda topic: (not _needs_attention(by_topic[topic].values()), topic))
    head = "".join(f'<th scope="col">{escape(sink)}</th>' for sink in sinks)
    rows = "".join(_table_row(topic, by_topic[topic], sinks) for topic in order[:TABLES_SHOWN])
    hidden = len(order) - TABLES_SHOWN
    more = (
        f'<p class="quiet">{hidden} more: see /api/v1/pipelines/{escape(status.name)}/tables</p>' if hidden > 0 else ""
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Tables"><table><thead><tr>'
        '<th scope="col">Table</th><th scope="col">Source</th><th scope="col" class="num">Rows copied</th>'
        f"{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _needs_attention(tables: Iterable[TableStatus]) -> bool:
    return any(TONES.get(t.state) in {"bad", "warn"} for t in tables)


def _table_row(topic: str, by_sink: Mapping[str, TableStatus], sinks: Iterable[str]) -> str:
    schema, name = split_topic(topic)
    source = by_sink.get("")
    state = badge(source.state) if source else number_format.UNKNOWN
    rows = number_format.format_count(source.rows if source else None)
    copying = backfills.bar(source.progress) if source and source.progress else ""
    cells = "".join(f"<td>{_cell(by_sink.get(sink))}</td>" for sink in sinks)
    prefix = f'<span class="schema">{escape(schema)}.</span>' if schema else ""
    return (
        f'<tr><th scope="row">{prefix}{escape(name)}</th><td>{state}{copying}</td>'
        f'<td class="num">{rows}</td>{cells}</tr>'
    )


def _cell(table: TableStatus | None) -> str:
    if table is None:
        return f'<span class="quiet">{number_format.UNKNOWN}</span>'
    version = f'<span class="version">v{table.version}</span>' if table.version is not None else ""
    rows = f"<span>{number_format.format_count(table.rows)} merged</span>" if table.rows else ""
    reason = f'<span class="reason">{escape(table.reason)}</span>' if table.reason else ""
    position = f'<span class="lsn">{escape(table.position or number_format.UNKNOWN)}</span>'
    return f'{badge(table.state)}<p class="detail">{position}{version}{rows}</p>{reason}'


def _process(process: ProcessStatus) -> str:
    age = (
        number_format.UNKNOWN
        if process.age_seconds is None
        else f"{' '.join(number_format.duration_and_unit(process.age_seconds))} ago"
    )
    pid = "" if process.pid is None else f"pid {process.pid}"
    return (
        f"<li><strong>{escape(process.process)}</strong>{badge(process.state)}"
        f'<span class="quiet">{escape(pid)}</span><span class="quiet">{escape(age)}</span></li>'
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
