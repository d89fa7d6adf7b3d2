"""Status of backfills, computed from the commands in the catalog, as values and as text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from cdc.catalog import Catalog, Command, CommandState
from cdc.errors import UnknownName
from cdc.snapshot.backfill_documents import (
    BACKFILL,
    BackfillRequest,
    BackfillState,
    TableBackfillState,
    csv_line,
    key_range_text,
)
from cdc.table import matches, matches_name

ENDED_SHOWN: Final = 20
"""Default maximum number of ended backfills in a listing, which shows the newest ones."""
_STOPPED: Final = frozenset({"paused", "cancelled", "failed"})
"""States of a backfill for which no remaining time is estimated."""
_SHARE_FOR_ESTIMATE: Final = 0.05
"""Minimum completed share of a table before its total row count is estimated from the rows copied so far."""
KEYS_SHOWN: Final = 20
"""Maximum number of keys of a key list that a status shows."""
_TABLES_SHOWN: Final = 4
"""Maximum number of tables that `tables_text` names."""
_MINUTE: Final = 60
_HOUR: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgress:
    """Progress of a backfill or of one of its tables."""

    state: str
    """State: `queued`, `snapshotting`, `paused`, `done`, `cancelled` or `failed`."""
    rows: int
    """Number of rows written to the log so far."""
    estimate: int | None
    """Estimated total number of rows; None if unknown, for example at the start of a partial backfill."""
    share: float | None
    """Completed share from 0 to 1; None if unknown."""
    rows_per_second: float | None
    seconds_left: float | None
    """Estimated seconds left at the average rate so far; None if unknown, or if the backfill is paused or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillStatus(CopyProgress):
    """Status of one backfill or resync, pending or ended."""

    id: int
    kind: str
    """`backfill`, `resync`, or `copy`; a `copy` is the first copy of tables, which the reader itself requests."""
    request: BackfillRequest
    tables: dict[str, CopyProgress]
    """Progress of each table, by topic; empty until the backfill has begun."""
    reason: str | None
    """Why the backfill waits; None if it does not wait, or if a command paused it."""
    error: dict[str, str] | None
    """Code, message and suggestion of the error of a failed backfill; None without an error."""
    posted_at: str
    """Time of the request as ISO 8601 text."""
    finished_at: str | None
    command: str
    """Shell command that repeats the request; LIST in it means a file with one key per line."""
    keys: int | None = None
    """Number of keys in the key list, or None without a list; `request` contains at most the first KEYS_SHOWN keys."""

    @property
    def pending(self) -> bool:
        """True if the backfill has not ended."""
        return self.finished_at is None

    def covers(self, topic: str) -> bool:
        """Return True if the backfill copies rows of this table."""
        return topic in self.tables or covers(self.request, topic)


def backfill_status(command: Command) -> BackfillStatus:
    """Return the status of a backfill, computed from its command of kind BACKFILL in the catalog."""
    request, work = BackfillRequest.from_json(command.payload), BackfillState.from_json(command.result)
    state = work.state
    if command.state is CommandState.DONE:
        state = "done"
    elif command.state is CommandState.FAILED and state not in _STOPPED:
        state = "failed"
    part = is_part(request)
    resting = state in _STOPPED
    whole = _total_progress(state, list(work.tables.values()), part=part)
    return BackfillStatus(
        id=command.id,
        kind=_kind(request),
        request=request if request.keys is None else replace(request, keys=request.keys[:KEYS_SHOWN]),
        tables={topic: _table_progress(table, part=part, resting=resting) for topic, table in work.tables.items()},
        reason=work.reason if command.state is CommandState.PENDING else None,
        error=(command.result or {}).get("error"),
        posted_at=command.posted_at.isoformat(),
        finished_at=None if command.finished_at is None else command.finished_at.isoformat(),
        command=command_of(request),
        keys=None if request.keys is None else len(request.keys),
        **{name: getattr(whole, name) for name in CopyProgress.__dataclass_fields__},
    )


def find_backfill(catalog: Catalog, pipeline: str, job: int) -> BackfillStatus:
    """Return the status of the backfill with this id. Raises UnknownName if the pipeline has no such backfill."""
    command = catalog.commands.get(job)
    if command is None or command.kind != BACKFILL or command.pipeline != pipeline:
        newest = catalog.commands.ls(pipeline, BACKFILL, limit=10)
        listed = ", ".join(str(command.id) for command in newest) or "none"
        raise UnknownName(
            f"pipeline {pipeline!r} has no backfill with the number {job}",
            remedy=f"choose one of the newest backfills: {listed}",
        )
    return backfill_status(command)


def list_backfills(catalog: Catalog, pipeline: str, ended: int = ENDED_SHOWN) -> list[BackfillStatus]:
    """Return the status of all pending backfills and of some ended backfills, newest first.

    `ended` is the maximum number of ended backfills.
    """
    commands = {command.id: command for command in catalog.commands.pending(pipeline, BACKFILL)}
    newest = catalog.commands.ls(pipeline, BACKFILL, limit=ended + len(commands))
    over = [command for command in newest if command.state is not CommandState.PENDING][:ended]
    commands |= {command.id: command for command in over}
    return [backfill_status(commands[number]) for number in sorted(commands, reverse=True)]


def covers(request: BackfillRequest, topic: str) -> bool:
    """Return True if a glob of the request matches the topic, or matches the table name without its schema."""
    return matches(topic, request.tables) or matches_name(topic, request.tables)


def is_part(request: BackfillRequest) -> bool:
    """Return True if the request selects only a part of the rows of a table: by condition, key range or key list."""
    return any(value is not None for value in (request.where, request.first, request.last, request.keys))


def command_of(request: BackfillRequest) -> str:
    """Return the shell command that repeats a request; FILE in it means the path of the definition."""
    words = ["cdc", *(("tables", "resync") if request.resync else ("backfill",)), *request.tables]
    if request.where is not None:
        words += ["--where", request.where]
    if request.first is not None or request.last is not None:
        words += ["--keys", key_range_text(request.first, request.last)]
    if request.keys is not None and len(request.keys) <= KEYS_SHOWN:
        words += [word for key in request.keys for word in ("--key", csv_line(key))]
    elif request.keys is not None:
        words += ["--keys-from", "LIST"]
    words += [] if request.sink is None else ["--sink", request.sink]
    words += [] if request.rate is None else ["--rate", str(request.rate)]
    return shlex.join(words) + " -c FILE"


def tables_text(request: BackfillRequest) -> str:
    """Return the requested tables as a short text, such as `a, b, c, d and 3 more`."""
    named, more = request.tables[:_TABLES_SHOWN], len(request.tables) - _TABLES_SHOWN
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def progress_text(progress: CopyProgress) -> str:
    """Format rows, share, rate and time left as one line; return "" if the backfill has not begun."""
    if progress.state == "queued" and not progress.rows:
        return ""
    words = [f"{progress.rows:,} rows"]
    if progress.state != "done":
        if progress.estimate:
            words[0] += f" of about {progress.estimate:,}"
        if progress.share is not None:
            words.append(f"{progress.share:.0%}")
    if progress.rows_per_second is not None:
        words.append(f"{progress.rows_per_second:,.0f} rows/s")
    if progress.state != "done" and progress.seconds_left is not None:
        words.append(f"{_duration(progress.seconds_left)} left")
    return " · ".join(words)


def _kind(request: BackfillRequest) -> str:
    if request.epoch is not None:
        return "copy"
    return "resync" if request.resync else "backfill"


def _table_progress(table: TableBackfillState, *, part: bool, resting: bool) -> CopyProgress:
    share = _share(table, part=part)
    known = share is not None and not (resting and table.state != "done")
    return CopyProgress(
        state=table.state,
        rows=table.rows,
        estimate=_estimate(table, part=part),
        share=share,
        rows_per_second=_rate(table.rows, table.seconds),
        seconds_left=table.seconds_left if known else None,
    )


def _total_progress(state: str, tables: list[TableBackfillState], *, part: bool) -> CopyProgress:
    estimates = [_estimate(table, part=part) for table in tables]
    rows, seconds = sum(table.rows for table in tables), sum(table.seconds for table in tables)
    share = 1.0 if state == "done" else _mean_share(tables, estimates, part=part)
    left = seconds * (1 - share) / share if share and state not in _STOPPED else None
    return CopyProgress(
        state=state,
        rows=rows,
        estimate=None if not tables or None in estimates else sum(e for e in estimates if e is not None),
        share=share,
        rows_per_second=_rate(rows, seconds),
        seconds_left=left,
    )


def _mean_share(tables: Iterable[TableBackfillState], estimates: Iterable[int | None], *, part: bool) -> float | None:
    """Return the mean of the tables' completed shares, weighted by `estimates`, their estimated row counts.

    `part` is true if the backfill selects only a part of the rows of each table. Returns None if a share or an estimate
    is unknown.
    """
    weighted = total = 0.0
    for table, estimate in zip(tables, estimates, strict=True):
        share = 0.0 if table.state == "queued" else _share(table, part=part)
        if estimate is None or share is None:
            return None
        weighted, total = weighted + share * max(estimate, 1), total + max(estimate, 1)
    return weighted / total if total else None


def _estimate(table: TableBackfillState, *, part: bool) -> int | None:
    """Return the estimated number of rows that the backfill reads of a table; None if unknown.

    `part` is true if the backfill selects only a part of the rows. Once the completed share is large enough, the
    estimate is extrapolated from the rows copied so far.
    """
    if table.state == "done":
        return table.rows
    share = _share(table, part=part)
    if share is not None and share >= _SHARE_FOR_ESTIMATE:
        return round(table.rows / share)
    return None if part or not table.estimate else max(table.estimate, table.rows)


def _share(table: TableBackfillState, *, part: bool) -> float | None:
    if table.state == "done" or (not part and table.blocks is not None and table.size):
        return table.share
    # reading by key, only the planner's estimate is available; it is useless once exceeded
    return None if part or table.rows > table.estimate else table.share


def _rate(rows: int, seconds: float) -> float | None:
    return rows / seconds if rows and seconds > 0 else None


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
