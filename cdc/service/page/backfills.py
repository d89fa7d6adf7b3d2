"""Backfill section of the page: what is copied again, its progress, and buttons to control it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final
from urllib.parse import quote

from cdc.service import number_format
from cdc.service.page.state_badge import badge
from cdc.snapshot.backfill_progress import BackfillStatus, CopyProgress, is_part, progress_text, tables_text

ENDED_SHOWN: Final = 5
"""Number of ended backfills on the page; the command and the API list more."""
_ACTIONS: Final = {"paused": ("resume", "cancel")}
"""Actions by state; every other pending state has _RUNNING_ACTIONS."""
_RUNNING_ACTIONS: Final = ("pause", "cancel")


def table(pipeline: str, backfills: Sequence[BackfillStatus], definition: str, *, may_change: bool) -> str:
    """The section; backfills are newest first, definition is the file that commands name."""
    shown = [b for b in backfills if b.pending] + [b for b in backfills if not b.pending][:ENDED_SHOWN]
    if not shown:
        return '<p class="quiet">No table has been copied again. <code>cdc backfill TABLE</code> starts a backfill.</p>'
    acts = '<th scope="col">Actions</th>' if may_change else ""
    rows = "".join(_row(pipeline, backfill, definition, may_change=may_change) for backfill in shown)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Backfills"><table><thead><tr>'
        '<th scope="col">Number</th><th scope="col">What</th><th scope="col">State</th>'
        f'<th scope="col">Progress</th>{acts}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def bar(progress: CopyProgress) -> str:
    """Progress as a bar and in words."""
    words = progress_text(progress).replace(",", number_format.THIN_SPACE)
    if not words:
        return ""
    line = ""
    if progress.share is not None and progress.state not in {"done", "cancelled"}:
        percent = f"{progress.share:.0%}"
        line = f'<progress max="1" value="{progress.share:.4f}" aria-label="{percent} copied">{percent}</progress>'
    return f'{line}<p class="detail">{escape(words)}</p>'


def _row(pipeline: str, backfill: BackfillStatus, definition: str, *, may_change: bool) -> str:
    command = escape(backfill.command.removesuffix("FILE") + definition)
    error = backfill.error
    why = backfill.reason or "" if error is None else f"{error['code']} {error['message']}"
    reason = f'<span class="reason">{escape(why)}</span>' if why else ""
    acts = f'<td class="acts">{_buttons(pipeline, backfill, definition)}</td>' if may_change else ""
    return (
        f'<tr><th scope="row">{backfill.id}</th><td><p>{escape(_what(backfill))}</p>'
        f'<p class="command"><code>{command}</code>'
        f'<button type="button" data-copy="{command}" aria-label="Copy the command {command}">Copy</button></p></td>'
        f"<td>{badge(backfill.state)}{reason}</td><td>{bar(backfill)}</td>{acts}</tr>"
    )


def _what(backfill: BackfillStatus) -> str:
    request = backfill.request
    part = ", some rows" if is_part(request) else ""
    sink = "" if request.sink is None else f", for {request.sink} alone"
    return f"{backfill.kind} of {tables_text(request)}{part}{sink}"


def _buttons(pipeline: str, backfill: BackfillStatus, definition: str) -> str:
    if not backfill.pending:
        return ""
    return "".join(
        _button(pipeline, backfill, verb, definition) for verb in _ACTIONS.get(backfill.state, _RUNNING_ACTIONS)
    )


def _button(pipeline: str, backfill: BackfillStatus, verb: str, definition: str) -> str:
    path = f"/api/v1/pipelines/{quote(pipeline, safe='')}/backfills/{backfill.id}/{verb}"
    command = escape(f"cdc backfill {verb} {backfill.id} -c {definition}")
    sure = (
        f' data-sure="Cancel {backfill.kind} {backfill.id}? Rows that it already sent stay."'
        if verb == "cancel"
        else ""
    )
    return (
        f'<button type="button" data-verb="{path}" title="{command}"{sure} '
        f'aria-label="{verb} {backfill.kind} {backfill.id}">{verb.title()}</button>'
    )
