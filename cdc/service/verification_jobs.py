"""Verifications: sinks held against the source, or the log, in a child of the server, one at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from cdc.catalog import Catalog, Command, CommandState
from cdc.catalog.commands import VERIFY
from cdc.config.verify_options import Against, VerifyMode
from cdc.errors import VerifyMismatch
from cdc.service.background_jobs import BackgroundJobs, JobOutcome, told


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """What was asked for; the words are those of `cdc verify`."""

    tables: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    mode: VerifyMode = VerifyMode.ROWS
    against: Against = Against.SOURCE
    repair: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyStatus(JobOutcome):
    """One run, on its way or ended."""

    id: int
    state: str
    """`running`, `equal`, `differs`, or `failed` if it could not compare."""
    request: VerifyRequest


class VerificationJobs:
    """Those of one pipeline; may be called from any thread."""

    def __init__(self, catalog: Catalog, pipeline: str, definition: Path | None) -> None:
        self.errands = BackgroundJobs(catalog, pipeline, VERIFY, definition)

    def begin(self, request: VerifyRequest, actor: str) -> VerifyStatus:
        """Start one; raises StateConflict as Errands.begin."""
        return verify_status(self.errands.begin(asdict(request), _words(request), actor))

    def last(self) -> VerifyStatus | None:
        """The newest that was asked for over the API."""
        return next(map(verify_status, self.errands.newest(1)), None)


def verify_status(command: Command) -> VerifyStatus:
    """What a command of kind VERIFY says."""
    said = command.payload
    request = VerifyRequest(
        tables=tuple(said["tables"]),
        sinks=tuple(said["sinks"]),
        mode=VerifyMode(said["mode"]),
        against=Against(said["against"]),
        repair=said["repair"],
    )
    return VerifyStatus(
        id=command.id,
        state=_state(command),
        request=request,
        **told(command),
    )


def _state(command: Command) -> str:
    if command.state is CommandState.PENDING:
        return "running"
    if command.state is CommandState.DONE:
        return "equal"
    error = (command.result or {}).get("error") or {}
    return "differs" if error.get("code") == VerifyMismatch.code else "failed"


def _words(request: VerifyRequest) -> tuple[str, ...]:
    sinks = [f"--sink={name}" for name in request.sinks]
    options = [f"--mode={request.mode.value}", f"--against={request.against.value}"]
    return (*sinks, *options, *(["--repair"] if request.repair else []), "--", *request.tables)
