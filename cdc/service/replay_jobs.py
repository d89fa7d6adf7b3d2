"""Replays started over the API: one child process of the server at a time; the catalog keeps the results.

A replay that was submitted to a cluster writes its status in the same form.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cdc.catalog import Catalog, Command, CommandState
from cdc.catalog.commands import JOB_LEASE, REPLAY
from cdc.service.background_jobs import BackgroundJobs, JobOutcome, outcome_fields

SEARCH_DEPTH: Final = 100
"""Number of newest replays among which the last one of a sink is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A requested replay, in the terms of `cdc replay`."""

    sink: str
    start: str = "beginning"
    end: str = "latest"
    tables: tuple[str, ...] = ()
    into: str | None = None
    """Path of the new target; always None over the API."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStatus(JobOutcome):
    """One replay, running or ended."""

    id: int
    state: str
    """`running`, `done` or `failed`."""
    request: ReplayRequest
    command: str


class ReplayJobs:
    """The replays of one pipeline; safe to call from any thread."""

    def __init__(self, catalog: Catalog, pipeline: str, definition: Path | None) -> None:
        self.jobs = BackgroundJobs(catalog, pipeline, REPLAY, definition)

    def start(self, request: ReplayRequest, actor: str) -> ReplayStatus:
        """Start a replay; raises StateConflict as BackgroundJobs.start does."""
        return replay_status(self.jobs.start(asdict(request), (*_options(request), "--", request.sink), actor))

    def last(self, sink: str) -> ReplayStatus | None:
        """The newest replay of a sink, started over the API or submitted to a cluster."""
        newest = self.jobs.newest(SEARCH_DEPTH)
        return next((replay_status(c) for c in newest if c.payload["sink"] == sink), None)


def replay_status(command: Command) -> ReplayStatus:
    """The status that a command of kind REPLAY contains."""
    states = {CommandState.PENDING: "running", CommandState.DONE: "done", CommandState.FAILED: "failed"}
    payload = {name: value for name, value in command.payload.items() if name != JOB_LEASE}
    request = ReplayRequest(**{**payload, "tables": tuple(payload["tables"])})
    verb = ("spark", "submit", "replay") if JOB_LEASE in command.payload else ("replay",)
    return ReplayStatus(
        id=command.id,
        state=states[command.state],
        request=request,
        **outcome_fields(command),
        command=shlex.join(["cdc", *verb, request.sink, *_options(request)]) + " -c FILE",
    )


def _options(request: ReplayRequest) -> list[str]:
    tables = [f"--tables={glob}" for glob in request.tables]
    into = [] if request.into is None else [f"--into={request.into}"]
    dry_run = ["--dry-run"] if request.dry_run else []
    return [f"--from={request.start}", f"--to={request.end}", *tables, *into, *dry_run]
