"""Replays: sinks built anew from the log in a child of the server, one at a time; the catalog keeps what came of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Final

import structlog

from cdc.catalog import Catalog, Command, CommandState
from cdc.errors import CdcError, ChildFailed, StateConflict
from cdc.service.supervisor import die_with_parent, kill_group

REPLAY: Final = "replay"
"""The kind of command; its result is what the child reported."""
ENDING: Final = 5.0
"""Seconds that a child has to end when the server does; it leaves the old target in place or the new one."""
LOOKED_BACK: Final = 100
"""Among so many of the newest the last one of a sink is looked for."""

log = structlog.get_logger("server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What was asked for; the words are those of `cdc replay`."""

    sink: str
    start: str = "beginning"
    end: str = "latest"
    tables: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStatus:
    """One replay, running or ended."""

    id: int
    state: str
    """`running`, `done` or `failed`."""
    request: ReplayRequest
    summary: str | None
    """What came of it in one line; None while it runs."""
    result: dict[str, Any] | None
    """The report of `cdc replay --json`: position and tables."""
    error: dict[str, Any] | None
    posted_at: str
    finished_at: str | None
    command: str


class Replays:
    """The replays of one pipeline; may be called from any thread."""

    def __init__(self, catalog: Catalog, pipeline: str, definition: Path | None) -> None:
        self._catalog, self._pipeline, self._definition = catalog, pipeline, definition
        self._lock = Lock()
        self._ending = Event()
        self._child: subprocess.Popen[str] | None = None
        self._runner: Thread | None = None

    def begin(self, request: ReplayRequest, actor: str) -> ReplayStatus:
        """Start one; raises StateConflict while another runs, or where nobody knows the definition's file."""
        if self._definition is None:
            raise StateConflict(
                "this server was started without the file of its definition",
                remedy=f"run 'cdc replay {request.sink} -c FILE'",
            )
        with self._lock:
            if running := self._catalog.commands.pending(self._pipeline, REPLAY):
                sink = running[0].payload["sink"]
                raise StateConflict(f"replay {running[0].id} of {sink!r} is running", remedy="wait until it has ended")
            number = self._catalog.commands.post(self._pipeline, REPLAY, asdict(request))
            self._catalog.audit.write(actor, REPLAY, self._pipeline, {"id": number, "sink": request.sink})
            # a thread of its own for the whole life of the child: the kernel ends a child with the thread that made it
            arguments = (number, _command(self._definition, request))
            self._runner = Thread(target=self._carry_out, args=arguments, name="replay", daemon=True)
            self._runner.start()
        command = self._catalog.commands.get(number)
        assert command is not None  # noqa: S101 - posted above
        return replay_status(command)

    def last(self, sink: str) -> ReplayStatus | None:
        """The newest of a sink that was asked for over the API."""
        newest = self._catalog.commands.ls(self._pipeline, REPLAY, limit=LOOKED_BACK)
        return next((replay_status(c) for c in newest if c.payload["sink"] == sink), None)

    def forget_earlier(self) -> None:
        """Those that a server of before left running ended with it."""
        for command in self._catalog.commands.pending(self._pipeline, REPLAY):
            self._finish(command.id, _lost("the server ended while it ran"))

    def end(self) -> None:
        """End what runs; the server stops."""
        self._ending.set()
        if (child := self._child) is not None:
            child.terminate()
        if self._runner is not None:
            self._runner.join(ENDING)
            if self._runner.is_alive() and child is not None:
                kill_group(child)
                self._runner.join(ENDING)

    def _carry_out(self, number: int, command: tuple[str, ...]) -> None:
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
            outcome = _envelope(printed) or _lost(f"ended with exit status {child.returncode} and said nothing")
        except OSError as error:
            outcome = _lost((error.strerror or "cannot be started").lower())
        finally:
            self._child = None
        if self._ending.is_set() and not outcome["ok"]:
            outcome = _lost("the server ended while it ran")
        self._finish(number, outcome)

    def _finish(self, number: int, outcome: Mapping[str, Any]) -> None:
        try:
            self._catalog.commands.finish(number, outcome, ok=outcome["ok"])
        except CdcError as error:
            log.warning("catalog is unreachable", code=error.code, message=error.message)


def replay_status(command: Command) -> ReplayStatus:
    """What a command of kind REPLAY says."""
    outcome = command.result or {}
    states = {CommandState.PENDING: "running", CommandState.DONE: "done", CommandState.FAILED: "failed"}
    request = ReplayRequest(**{**command.payload, "tables": tuple(command.payload["tables"])})
    return ReplayStatus(
        id=command.id,
        state=states[command.state],
        request=request,
        summary=outcome.get("summary"),
        result=outcome.get("result"),
        error=outcome.get("error"),
        posted_at=command.posted_at.isoformat(),
        finished_at=None if command.finished_at is None else command.finished_at.isoformat(),
        command=shlex.join(["cdc", "replay", request.sink, *_options(request)]) + " -c FILE",
    )


def _command(definition: Path, request: ReplayRequest) -> tuple[str, ...]:
    program = (sys.executable, "-m", "pipelines", "replay", "-c", str(definition), "--json")
    return (*program, *_options(request), "--", request.sink)


def _options(request: ReplayRequest) -> list[str]:
    tables = [f"--tables={glob}" for glob in request.tables]
    return [f"--from={request.start}", f"--to={request.end}", *tables, *(["--dry-run"] if request.dry_run else [])]


def _envelope(printed: str) -> dict[str, Any] | None:
    """The last line that is an envelope."""
    for line in reversed(printed.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "ok" in found and "summary" in found:
                return found
    return None


def _lost(why: str) -> dict[str, Any]:
    error = ChildFailed(why, remedy="read the log of the server and ask again")
    return {"ok": False, "summary": why, "result": None, "error": error.to_json()}
