"""Verifications started over the API: one child process of the server at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from cdc.catalog import Catalog, Command, CommandState
from cdc.catalog.commands import VERIFY
from cdc.config.verify_options import Against, VerifyMode
from cdc.errors import VerifyMismatch
from cdc.service.background_jobs import BackgroundJobs, JobOutcome, outcome_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """A requested verification, in the terms of `cdc verify`."""

    tables: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    mode: VerifyMode = VerifyMode.ROWS
    against: Against = Against.SOURCE
    repair: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyStatus(JobOutcome):
    """One verification, running or ended."""

    id: int
    state: str
    """`running`, `equal`, `differs`, or `failed` if it could not compare."""
    request: VerifyRequest


class VerificationJobs:
    """The verifications of one pipeline; safe to call from any thread."""

    def __init__(self, catalog: Catalog, pipeline: str, definition: Path | None) -> None:
        self.jobs = BackgroundJobs(catalog, pipeline, VERIFY, definition)

    def start(self, request: VerifyRequest, actor: str) -> VerifyStatus:
        """Start a verification; raises StateConflict as BackgroundJobs.start does."""
        return verify_status(self.jobs.start(asdict(request), _arguments(request), actor))

    def last(self) -> VerifyStatus | None:
        """The newest verification that was started over the API."""
        return next(map(verify_status, self.jobs.newest(1)), None)


def verify_status(command: Command) -> VerifyStatus:
    """The status that a command of kind VERIFY contains."""
    payload = command.payload
    request = VerifyRequest(
        tables=tuple(payload["tables"]),
        sinks=tuple(payload["sinks"]),
        mode=VerifyMode(payload["mode"]),
        against=Against(payload["against"]),
        repair=payload["repair"],
    )
    return VerifyStatus(
        id=command.id,
        state=_state(command),
        request=request,
        **outcome_fields(command),
    )


def _state(command: Command) -> str:
    if command.state is CommandState.PENDING:
        return "running"
    if command.state is CommandState.DONE:
        return "equal"
    error = (command.result or {}).get("error") or {}
    return "differs" if error.get("code") == VerifyMismatch.code else "failed"


def _arguments(request: VerifyRequest) -> tuple[str, ...]:
    sinks = [f"--sink={name}" for name in request.sinks]
    options = [f"--mode={request.mode.value}", f"--against={request.against.value}"]
    return (*sinks, *options, *(["--repair"] if request.repair else []), "--", *request.tables)
