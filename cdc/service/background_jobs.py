"""Background jobs: replays and verifications that the server runs as child processes.

At most one job of each kind runs at a time. The catalog stores the result of each job. A replay that runs in a cluster
stores its status in the same form.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Final

import structlog

from cdc.catalog import Catalog, Command, CommandState
from cdc.catalog.commands import JOB_LEASE, REPLAY, VERIFY
from cdc.command_output import last_envelope
from cdc.errors import CdcError, ChildFailed, StateConflict, VerifyMismatch
from cdc.service.child_process import die_with_parent, kill_group
from cdc.verify_and_replay_options import Against, VerifyMode

STOP_TIMEOUT: Final = 5.0
"""Maximum seconds for a child process to end when the server stops."""
SEARCH_DEPTH: Final = 100
"""Number of a pipeline's newest replays that the server searches for the last replay of one sink."""

log = structlog.get_logger("server")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Base class of ReplayStatus and VerifyStatus: the fields with the result of a job."""

    summary: str | None
    """Result of the job in one line. While the job runs: None for a child process, the progress for a cluster job."""
    result: dict[str, Any] | None
    """The `result` that the job's command prints with --json; None without such a result."""
    error: dict[str, Any] | None
    posted_at: str
    finished_at: str | None


class BackgroundJobs:
    """The background jobs of one kind in one pipeline; safe to call from any thread."""

    def __init__(self, catalog: Catalog, pipeline: str, kind: str, definition: Path | None) -> None:
        """Prepare to run the jobs of one kind, `replay` or `verify`; no job is started yet.

        `kind` is the kind of the jobs' commands in the catalog. Each child process runs `python -m pipelines KIND`.
        `definition` is the path of the definition file; without it no job can start.
        """
        self._catalog = catalog
        self._pipeline = pipeline
        self._kind = kind
        self._definition = definition
        self._lock = Lock()
        self._stopping = Event()
        self._child: subprocess.Popen[str] | None = None
        self._thread: Thread | None = None

    def start(self, payload: Mapping[str, Any], arguments: Sequence[str], actor: str) -> Command:
        """Record a job in the catalog as a command, start its child process with `arguments`, and return the command.

        Raises StateConflict if a job of this kind is running, or if the server does not know the definition file.
        """
        if self._definition is None:
            raise StateConflict(
                "the server cannot start the job: the server was started without the path of its definition",
                remedy=f"run: cdc {self._kind} -c FILE {shlex.join(arguments)}",
            )
        command = (sys.executable, "-m", "pipelines", self._kind, "-c", str(self._definition), "--json", *arguments)
        with self._lock:
            if running := self._unfinished():
                raise StateConflict(
                    f"{self._kind} {running[0].id} is already running, and only one job of this kind may run",
                    remedy="wait until the job ends; GET on the same path returns its state",
                )
            number = self._catalog.commands.post(self._pipeline, self._kind, payload)
            self._catalog.audit.write(actor, self._kind, self._pipeline, {"id": number, **payload})
            # one thread for the whole life of the child: the kernel ends a child with the thread that started it
            self._thread = Thread(target=self._run_child, args=(number, command), name=self._kind, daemon=True)
            self._thread.start()
        posted = self._catalog.commands.get(number)
        assert posted is not None  # noqa: S101 - posted above
        return posted

    def newest(self, limit: int) -> list[Command]:
        """Return the catalog's commands of the newest `limit` jobs, newest first."""
        self._unfinished()  # marks jobs whose lease has expired as failed
        return self._catalog.commands.ls(self._pipeline, self._kind, limit=limit)

    def fail_unfinished(self) -> None:
        """Record as failed the jobs that an earlier server process left unfinished.

        A cluster job is recorded as failed only if its lease has expired; otherwise it still runs in the cluster.
        """
        for command in self._unfinished():
            if JOB_LEASE not in command.payload:
                self._finish(command.id, _failed_outcome("the server stopped while the job ran"))

    def stop(self) -> None:
        """Stop the child process of the running job, because the server stops."""
        self._stopping.set()
        if (child := self._child) is not None:
            child.terminate()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT)
            if self._thread.is_alive() and child is not None:
                kill_group(child)
                self._thread.join(STOP_TIMEOUT)

    def _unfinished(self) -> list[Command]:
        """Record every cluster job with an expired lease as failed, and return the other unfinished jobs."""
        pending = self._catalog.commands.pending(self._pipeline, self._kind)
        abandoned = [
            c for c in pending if JOB_LEASE in c.payload and self._catalog.leases.holder(c.payload[JOB_LEASE]) is None
        ]
        for command in abandoned:
            self._finish(
                command.id,
                _failed_outcome(
                    "the cluster job ended without a result", "read the log of the job, and submit the job again"
                ),
            )
        return [command for command in pending if command not in abandoned]

    def _run_child(self, number: int, command: tuple[str, ...]) -> None:
        try:
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one prctl call, no locks taken
            ) as child:
                self._child = child
                printed = child.communicate()[0]
                kill_group(child)
            outcome = last_envelope(printed) or _failed_outcome(
                f"the child process of the job ended with exit status {child.returncode} without a result"
            )
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            outcome = _failed_outcome(f"the server cannot start the child process of the job: {reason}")
        finally:
            self._child = None
        if self._stopping.is_set() and not outcome["ok"]:
            outcome = _failed_outcome("the server stopped while the job ran")
        self._finish(number, outcome)

    def _finish(self, number: int, outcome: Mapping[str, Any]) -> None:
        try:
            self._catalog.commands.finish(number, outcome, ok=outcome["ok"])
        except CdcError as error:
            log.warning(
                "cannot record in the catalog that a job ended; the job counts as running until the server restarts",
                code=error.code,
                message=error.message,
            )


def outcome_fields(command: Command) -> dict[str, Any]:
    """Return name → value for the fields of JobOutcome, from the command of a job in the catalog."""
    outcome = command.result or {}
    return {
        **{name: outcome.get(name) for name in ("summary", "result", "error")},
        "posted_at": command.posted_at.isoformat(),
        "finished_at": None if command.finished_at is None else command.finished_at.isoformat(),
    }


def _failed_outcome(why: str, remedy: str = "read the log of the server and try again") -> dict[str, Any]:
    error = ChildFailed(why, remedy=remedy)
    return {"ok": False, "summary": why, "result": None, "error": error.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A requested replay, with the options of `cdc replay`."""

    sink: str
    start: str = "beginning"
    end: str = "latest"
    tables: tuple[str, ...] = ()
    into: str | None = None
    """Path of the new target; None for the sink's own target. A request over the API cannot set a path."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStatus(JobOutcome):
    """Status of one replay, running or ended."""

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
        """Start a replay in a child process.

        Raises StateConflict if a replay is running, or if the server does not know the definition file.
        """
        return replay_status(self.jobs.start(asdict(request), (*_replay_options(request), "--", request.sink), actor))

    def last(self, sink: str) -> ReplayStatus | None:
        """Return the newest replay of a sink; None if none was started over the API or submitted to a cluster."""
        newest = self.jobs.newest(SEARCH_DEPTH)
        return next((replay_status(c) for c in newest if c.payload["sink"] == sink), None)


def replay_status(command: Command) -> ReplayStatus:
    """Return the status of the replay that a command of kind REPLAY describes."""
    states = {CommandState.PENDING: "running", CommandState.DONE: "done", CommandState.FAILED: "failed"}
    payload = {name: value for name, value in command.payload.items() if name != JOB_LEASE}
    request = ReplayRequest(**{**payload, "tables": tuple(payload["tables"])})
    verb = ("spark", "submit", "replay") if JOB_LEASE in command.payload else ("replay",)
    return ReplayStatus(
        id=command.id,
        state=states[command.state],
        request=request,
        **outcome_fields(command),
        command=shlex.join(["cdc", *verb, request.sink, *_replay_options(request)]) + " -c FILE",
    )


def _replay_options(request: ReplayRequest) -> list[str]:
    tables = [f"--tables={glob}" for glob in request.tables]
    into = [] if request.into is None else [f"--into={request.into}"]
    dry_run = ["--dry-run"] if request.dry_run else []
    return [f"--from={request.start}", f"--to={request.end}", *tables, *into, *dry_run]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """A requested verification, with the options of `cdc verify`."""

    tables: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    mode: VerifyMode = VerifyMode.ROWS
    against: Against = Against.SOURCE
    repair: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyStatus(JobOutcome):
    """Status of one verification, running or ended."""

    id: int
    state: str
    """`running`, `equal`, `differs`, or `failed` if the tables could not be compared."""
    request: VerifyRequest


class VerificationJobs:
    """The verifications of one pipeline; safe to call from any thread."""

    def __init__(self, catalog: Catalog, pipeline: str, definition: Path | None) -> None:
        self.jobs = BackgroundJobs(catalog, pipeline, VERIFY, definition)

    def start(self, request: VerifyRequest, actor: str) -> VerifyStatus:
        """Start a verification in a child process.

        Raises StateConflict if a verification is running, or if the server does not know the definition file.
        """
        return verify_status(self.jobs.start(asdict(request), _verify_arguments(request), actor))

    def last(self) -> VerifyStatus | None:
        """Return the newest verification that was started over the API; None if there is none."""
        return next(map(verify_status, self.jobs.newest(1)), None)


def verify_status(command: Command) -> VerifyStatus:
    """Return the status of the verification that a command of kind VERIFY describes."""
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
        state=_verify_state(command),
        request=request,
        **outcome_fields(command),
    )


def _verify_state(command: Command) -> str:
    if command.state is CommandState.PENDING:
        return "running"
    if command.state is CommandState.DONE:
        return "equal"
    error = (command.result or {}).get("error") or {}
    return "differs" if error.get("code") == VerifyMismatch.code else "failed"


def _verify_arguments(request: VerifyRequest) -> tuple[str, ...]:
    sinks = [f"--sink={name}" for name in request.sinks]
    options = [f"--mode={request.mode.value}", f"--against={request.against.value}"]
    return (*sinks, *options, *(["--repair"] if request.repair else []), "--", *request.tables)
