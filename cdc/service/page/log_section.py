"""Log section of the page: sizes before and after compaction, range of positions, and consumers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from html import escape
from typing import Final

from cdc.service import number_format
from cdc.service.log_status import ConsumerLine, LogState, LogStatus, SegmentLine
from cdc.service.page.state_badge import badge

_WIDTH: Final = 1000
_LEAST: Final = 6
"""Minimum width of a part that is not empty."""
_PARTS: Final = (("changes", "single changes"), ("compacted", "compacted"), ("leaving", "removed files"))
_NO_LOG_TEXT: Final = {
    LogState.ABSENT: "There is no log yet: the reader creates it with the first copy.",
    LogState.UNREADABLE: "The log cannot be shown: see the problems above.",
}

_NO_FLOOR: Final = ("none", "every tombstone is kept")


def section(log: LogStatus | None) -> str:
    """The section; None before the first sample of the log."""
    if log is None:
        return '<p class="quiet">Reading the log …</p>'
    if log.state is not LogState.READ:
        return f'<p class="quiet">{escape(_NO_LOG_TEXT[log.state])}</p>'
    return f'<div class="card">{_bar(log)}{_sizes(log)}{_positions(log)}</div>{_consumers(log.consumers)}'


def _bar(log: LogStatus) -> str:
    sizes = (log.changes_bytes, log.compacted_bytes, log.leaving_bytes or 0)
    whole, left = sum(sizes), 0.0
    parts = []
    for (name, _), size in zip(_PARTS, sizes, strict=True):
        width = max(_LEAST, size / whole * _WIDTH) if size else 0.0
        parts.append(f'<rect class="{name}" x="{left:.1f}" width="{width:.1f}" height="10"/>')
        left += width
    named = zip(_PARTS, sizes, strict=True)
    label = ", ".join(f"{words} {number_format.format_size(size)}" for (_, words), size in named)
    return (
        f'<svg class="parts" viewBox="0 0 {max(left, 1.0):.1f} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="Bytes on the disk: {label}">{"".join(parts)}</svg>'
    )


def _sizes(log: LogStatus) -> str:
    changes = f"{_quantity(log.row_count, 'row')} in {_quantity(log.segment_count, 'segment')}"
    runs = sum(run.rows for run in log.runs)
    compacted = f"{_quantity(runs, 'row')} in {_quantity(len(log.runs), 'run')}" if log.runs else "nothing yet"
    leaving = "on disk for readers of older versions" if log.leaving_bytes else "none on disk"
    return "".join((
        '<dl class="weights">',
        _size_cell("Single changes", "changes", number_format.size_and_unit(log.changes_bytes), changes),
        _size_cell("Compacted", "compacted", number_format.size_and_unit(log.compacted_bytes), compacted),
        _size_cell("Removed files", "leaving", number_format.size_and_unit(log.leaving_bytes), leaving),
        _compaction(log),
        "</dl>",
    ))  # fmt: skip


def _compaction(log: LogStatus) -> str:
    made = log.compaction
    if made is None:
        return _size_cell("Last compaction", "", (number_format.UNKNOWN, ""), "none so far")
    number, unit = number_format.age_and_unit(_age(log, made.at))
    read = "" if made.changes is None else f"{_quantity(made.changes, 'change')} read, "
    took = "" if made.seconds is None else f", in {number_format.format_duration(made.seconds)}"
    return _size_cell(
        "Last compaction", "", (number, f"{unit} ago"), f"{read}{_quantity(made.rows, 'row')} written{took}"
    )


def _size_cell(name: str, part: str, value: tuple[str, str], note: str) -> str:
    swatch = f'<i class="{part}" aria-hidden="true"></i>' if part else ""
    unit = f" <small>{escape(value[1])}</small>" if value[1] else ""
    return f"<div><dt>{swatch}{escape(name)}</dt><dd>{escape(value[0])}{unit}</dd><p>{escape(note)}</p></div>"


def _positions(log: LogStatus) -> str:
    """The positions of the log in order, oldest on the left."""
    behind = number_format.format_lag(log.horizon_behind_bytes, log.horizon_behind_seconds)
    oldest, newest = log.oldest_segment, log.newest_segment
    marks = (
        ("Tombstones removed up to", *((log.floor, "a sink below must be rebuilt") if log.floor else _NO_FLOOR)),
        ("Single changes above", log.oldest or "the beginning", _segment(log, oldest)),
        ("Compacted up to", log.horizon or number_format.UNKNOWN, f"{behind} before the end" if log.horizon else ""),
        ("End", log.durable or number_format.UNKNOWN, _segment(log, newest)),
    )
    cells = "".join(_position_cell(*mark) for mark in marks)
    return f'<dl class="reach">{cells}</dl>'


def _position_cell(name: str, place: str, note: str) -> str:
    kind = "lsn" if "/" in place else "word"
    return f'<div><dt>{escape(name)}</dt><dd class="{kind}">{escape(place)}</dd><p>{escape(note)}</p></div>'


def _segment(log: LogStatus, line: SegmentLine | None) -> str:
    if line is None:
        return "no segment yet"
    since = "" if line.began_at is None else f", started {number_format.format_age(_age(log, line.began_at))} ago"
    return f"segment {line.segment}, {number_format.format_size(line.bytes)}{since}"


def _consumers(lines: Iterable[ConsumerLine]) -> str:
    rows = "".join(map(_consumer, lines))
    if not rows:
        return '<p class="quiet">No consumer is registered: changes are kept for log.retain.max.</p>'
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Consumers"><table><thead><tr>'
        '<th scope="col">Consumer</th><th scope="col">State</th><th scope="col">Position</th>'
        '<th scope="col">Behind</th><th scope="col">Holds back</th><th scope="col">Last heartbeat</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _consumer(line: ConsumerLine) -> str:
    holds = f"<b>{number_format.format_size(line.holds_bytes)}</b>" if line.holds_bytes else "nothing"
    filled = "" if line.pinned is None else '<p class="detail">filled from the compacted log</p>'
    reason = '<span class="reason">must be rebuilt</span>' if line.state == "late" else ""
    return (
        f'<tr><th scope="row">{escape(line.name)}</th><td>{badge(line.state)}{reason}</td>'
        f'<td><span class="lsn">{escape(line.position)}</span>{filled}</td><td>{escape(_lag(line))}</td>'
        f"<td>{holds}</td><td>{number_format.format_age(line.seen_seconds)} ago</td></tr>"
    )


def _lag(line: ConsumerLine) -> str:
    if not line.behind_segments:
        return "at the end"
    segments = f", {_quantity(line.behind_segments, 'segment')}" if line.behind_segments > 1 else ""
    return f"{number_format.format_lag(line.behind_bytes, line.behind_seconds)}{segments}"


def _age(log: LogStatus, time: str) -> float:
    return max(0.0, (datetime.fromisoformat(log.at) - datetime.fromisoformat(time)).total_seconds())


def _quantity(number: int, noun: str) -> str:
    return number_format.format_quantity(number, noun).replace(",", number_format.THIN_SPACE)
