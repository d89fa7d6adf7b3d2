"""Runs the continuous verification by the definition's key `verify`: a child process of the server process.

The server process decides when a pass may run, and the child process compares within its budget and exits when nothing
is due (`pipelines/verification/scheduled.py`). The apply process is not the place for it: an apply process that
restarts would lose the comparison, and its memory would stay at the peak of both. The catalog contains the time of the
next pass, so a restart of the server process neither loses nor repeats a pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, Final

import structlog

from cdc.catalog import Catalog
from cdc.catalog.verification_state import NEXT_AT, VerificationRecord, VerificationState
from cdc.config import Definition
from cdc.errors import CdcError, ChildFailed, ExitCode, PositionNotReached, VerifyMismatch
from cdc.service.child_process import die_with_parent, kill_group
from cdc.service.machine_load import BUSY_SHARE, MachineLoad

FAILING_AFTER: Final = 5
"""Number of failed attempts after which the verification counts as failing; a restart of apply fails one or two."""
STOP_TIMEOUT: Final = 5.0
"""Maximum seconds for the child process to end."""
_COMPARED: Final = frozenset({ExitCode.OK.value, ExitCode.FINDING.value})

log = structlog.get_logger("server")


@dataclass(frozen=True, slots=True)
class RunnerTiming:
    """Intervals of the runner, in seconds."""

    settle: float = 300.0
    """Time after the start of the server process in which nothing is compared, or the interval if that is shorter."""
    poll: float = 5.0
    """Time between two checks of the conditions."""
    retry: float = 60.0
    """Time before the child process is started again after it failed; doubled each time, to at most an hour."""


LONGEST_RETRY: Final = 3600.0


class VerificationRunner:
    """The continuous verification of one pipeline; its thread runs from `start` to `stop`."""

    def __init__(
        self,
        catalog: Catalog,
        definition: Definition,
        file: Path | None,
        load: Callable[[], MachineLoad | None],
        timing: RunnerTiming | None = None,
    ) -> None:
        """file: path of the definition file; without it nothing is compared. load: returns the machine's load."""
        self._catalog = catalog
        self._definition = definition
        self._file = file
        self._load = load
        self._timing = timing or RunnerTiming()
        self._every = timedelta(seconds=definition.verify.every)
        self._ended = Event()
        self._thread = Thread(target=self._run, name="verification", daemon=True)
        self._child: subprocess.Popen[str] | None = None
        self._output: Thread | None = None
        self._recorded: VerificationRecord | None = None
        now = datetime.now(UTC)
        self._settled_at = now + min(self._every, timedelta(seconds=self._timing.settle))
        self._next_at = self._due_at = now
        """Earliest next start; the time at which something was due."""
        self._child_next_at: datetime | None = None
        self._failures = 0
        self._error: Mapping[str, Any] | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._file is not None:
            self._thread.start()

    def stop(self) -> None:
        """End the child process and the thread; the next server process continues after the last compared range."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * STOP_TIMEOUT)

    def _run(self) -> None:
        # one thread for the whole life of the child: the kernel ends a child with the thread that started it
        try:
            if not self._definition.verify.every or not self._definition.sinks_of_tables:
                why = "'verify: off' in the definition" if not self._definition.verify.every else "no sink has tables"
                self._attempt(lambda: self._record(VerificationState.OFF, reason=why))
                return
            self._attempt(self._continue_schedule)
            while not self._ended.wait(self._timing.poll):
                self._attempt(self._step)
        finally:
            self._end_child()

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except CdcError as error:
            log.warning(
                "the verification cannot use the catalog, so it waits until the catalog answers",
                code=error.code,
                message=error.message,
            )

    def _continue_schedule(self) -> None:
        """Take over the time of the next pass from an earlier server process, if the interval is the same."""
        before = self._catalog.verification.get(self._definition.name)
        if before is None or before.next_at is None or before.every != self._definition.verify.every:
            return
        self._next_at = self._due_at = datetime.fromisoformat(before.next_at)

    def _step(self) -> None:
        now = datetime.now(UTC)
        if self._child is not None:
            self._watch_child(self._child, now)
            return
        if now < self._next_at:
            self._record_waiting()
        elif (reason := self._reason_to_wait(now)) is not None:
            self._record(VerificationState.PAUSED, reason=reason)
        else:
            self._start_child()

    def _reason_to_wait(self, now: datetime) -> str | None:
        if now < self._settled_at:
            return "the server process has just started"
        if not self._definition.verify.is_open(now):
            return f"it is not between {self._definition.verify.between} UTC"
        load = self._load()
        # a machine that is always busy is verified all the same, in the second half of the interval
        if load is not None and load.busy_share >= BUSY_SHARE and now < self._due_at + self._every / 2:
            return "the machine is busy"
        return None

    def _start_child(self) -> None:
        command = [sys.executable, "-m", "pipelines", "verify", "--scheduled", "--json", "-c", str(self._file)]
        self._child_next_at = None
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - one prctl call, no locks taken
        )
        self._output = Thread(target=self._read_output, args=(self._child.stdout,), daemon=True)
        self._output.start()
        self._record_running()

    def _watch_child(self, child: subprocess.Popen[str], now: datetime) -> None:
        if child.poll() is None:
            if self._definition.verify.is_open(now):
                self._record_running()
                return
            self._end_child()
        elif self._output is not None:
            self._output.join(STOP_TIMEOUT)
        self._child = None
        if child.returncode in _COMPARED and self._child_next_at is not None:
            self._failures, self._error = 0, None
            self._next_at = self._due_at = self._child_next_at
        elif child.returncode in _COMPARED:
            self._next_at = now  # it was ended before everything was compared
        else:
            self._failures = max(self._failures, 1)
            retry = min(LONGEST_RETRY, self._timing.retry * 2 ** (self._failures - 1))
            self._next_at = now + timedelta(seconds=retry)
            if self._error is None:
                message = f"the process that compares ended with exit status {child.returncode}"
                self._count_failure(ChildFailed(message, remedy="read the log of the server process").to_json())

    def _end_child(self) -> None:
        child = self._child
        if child is None:
            return
        child.terminate()
        try:
            child.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            kill_group(child)
            child.wait()
        if self._output is not None:
            self._output.join(STOP_TIMEOUT)
        self._child = None

    def _read_output(self, lines: IO[str]) -> None:
        for line in lines:
            with suppress(ValueError):
                self._note(json.loads(line))

    def _note(self, envelope: Mapping[str, Any]) -> None:
        """Note the result of one range of keys, an error, or the time of the next pass."""
        result, error = envelope.get("result") or {}, envelope.get("error")
        if NEXT_AT in result:
            self._child_next_at = datetime.fromisoformat(result[NEXT_AT])
        elif error is None or error["code"] == VerifyMismatch.code:
            self._failures, self._error = 0, None
            if error is not None:
                log.error("rows of a target differ from the source", code=error["code"], message=error["message"])
        else:
            self._count_failure(error)

    def _count_failure(self, error: Mapping[str, Any]) -> None:
        self._failures, self._error = self._failures + 1, error
        if self._failures == FAILING_AFTER:
            log.warning("the verification fails and is tried again", code=error["code"], message=error["message"])

    def _record_running(self) -> None:
        error = self._error
        if error is None:
            self._record(VerificationState.RUNNING)
        elif error["code"] == PositionNotReached.code:
            self._record(VerificationState.PAUSED, reason=str(error["message"]))
        elif self._failures >= FAILING_AFTER:
            self._record(VerificationState.FAILING, error=error)

    def _record_waiting(self) -> None:
        if self._failures >= FAILING_AFTER:
            self._record(VerificationState.FAILING, error=self._error)
        else:
            self._record(VerificationState.WAITING)

    def _record(
        self, state: VerificationState, *, reason: str | None = None, error: Mapping[str, Any] | None = None
    ) -> None:
        """Write the state to the catalog if it changed."""
        is_off = state is VerificationState.OFF
        record = VerificationRecord(
            state=state,
            every=self._definition.verify.every,
            reason=reason,
            error=error,
            next_at=None if is_off else self._next_at.isoformat(),
        )
        if record != self._recorded:
            self._catalog.verification.put(self._definition.name, record)
            self._recorded = record
