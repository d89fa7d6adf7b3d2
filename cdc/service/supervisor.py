"""Supervisor: runs the processes of a pipeline as children of one process, and restarts them when they fail.

When a child exits, the supervisor waits and starts the child again. The pause is 0.5 s at first, is doubled each time,
has jitter, and is at most 30 s. After a child has run for a minute, its pauses begin at 0.5 s again. Exit status 2
(wrong definition) ends the supervisor, because a restart cannot help. After status 3 (wrong environment) the pauses are
at least 5 s. After status 5 (halted until an operator acts) the supervisor restarts the child every five minutes. It
restarts this child at once when an operator acts: the definition or the audit log changed, or SIGUSR1 arrived.

A child with `may_end` is done when it exits with status 0. When all children are done, the supervisor ends.

To stop, the supervisor sends SIGTERM to the children in the given order, one after the other: readers of the log before
its writer. A child that passes its deadline gets SIGKILL. After a second signal all children get SIGKILL at once. On
Linux the kernel ends the children when the supervisor dies, even after `kill -9`.

The children of a pipeline are forked from a warm process (`warm_process.py`), if there is one. All other children are
started as programs. So is a child that the warm process could not fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import IO, Final

from cdc.errors import ChildFailed, ExitCode
from cdc.service.child_process import die_with_parent
from cdc.service.pipeline_children import Child
from cdc.service.restart_policy import RestartPolicy, Triggers
from cdc.service.warm_process import ForkedProcess, WarmProcess, kill_child

POLL: Final = 0.05
"""Seconds between two checks of a child that is ending."""
INTERRUPTED: Final = 130
RETRY_HINT: Final = "or at once when the definition changes, a cdc command changes something, or you run kill -USR1"


@dataclass(slots=True)
class _ChildState:
    """A child and the state of its current process."""

    spec: Child
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    started: float = 0.0
    failures: int = 0
    start_at: float = 0.0
    done: bool = False
    halted: bool = False
    unforked: bool = False
    """True if the warm process could not fork the last process."""
    definition: str = ""
    """Digest that the definition had when the child was started."""
    began: float = 0.0
    """Start time of the current process as `time.time()`; `started` is the same in monotonic seconds."""
    reader: Thread | None = field(default=None, repr=False)


class Supervisor:
    """Keeps children running until a signal, a call of `stop`, or a failure that no restart can fix."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        policy: RestartPolicy | None = None,
        say: Callable[[str, str], None] | None = None,
        triggers: Triggers | None = None,
        warm: WarmProcess | None = None,
    ) -> None:
        self._children = [_ChildState(child) for child in children]
        self._policy = policy or RestartPolicy()
        self._print = say or _print_line
        self._triggers, self._warm = triggers, warm
        self._retries: SimpleQueue[None] = SimpleQueue()  # put() is safe in a signal handler, Event.set() is not
        self._signals: SimpleQueue[int] = SimpleQueue()
        self.restarts: dict[str, int] = {child.name: 0 for child in children}
        """Number of restarts of each child, by its name."""

    def run(self) -> int:
        """Start every child and keep it running until the supervisor is stopped.

        Return 0, or 130 if a second signal made the children end at once. Raises ChildFailed if a child exits with
        status 2. No child runs any more when this method returns or raises.
        """
        forced = False
        try:
            while not self._wait_for_stop(self._step()) and not all(child.done for child in self._children):
                pass
        finally:
            forced = self._end()
        return INTERRUPTED if forced else ExitCode.OK.value

    def stop(self) -> None:
        """Make `run` end; safe from any thread and from a signal handler."""
        self._signals.put(signal.SIGTERM)

    def retry(self) -> None:
        """Restart at once all children that exited with status HALTED; safe from any thread and signal handler."""
        self._retries.put(None)

    def handle_signals(self) -> None:
        """Install signal handlers: SIGTERM and SIGINT end `run`, SIGUSR1 calls `retry`. Only for the main thread."""

        def on_signal(number: int, _: FrameType | None) -> None:
            self._signals.put(number)

        signal.signal(signal.SIGUSR1, lambda *_: self.retry())
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def _step(self) -> float:
        """Check every child once, and return the seconds until the next check."""
        retry = not self._retries.empty()
        while not self._retries.empty():
            self._retries.get()
        for child in self._children:
            if child.halted and (retry or self._has_changed(child)):
                self._print(
                    child.spec.name,
                    "restarting, because the definition changed, a cdc command changed something, or SIGUSR1 arrived",
                )
                child.start_at = 0.0
            self._check_child(child)
        waiting = [p.start_at - time.monotonic() for p in self._children if p.process is None and not p.done]
        return max(0.0, min([0.25, *waiting]))

    def _wait_for_stop(self, timeout: float) -> bool:
        try:
            self._signals.get(timeout=max(0.001, timeout))
        except Empty:
            return False
        return True

    def _check_child(self, child: _ChildState) -> None:
        now = time.monotonic()
        if child.process is None:
            if now >= child.start_at and not child.done:
                self._start(child, now)
            return
        code = child.process.poll()
        if code is not None:
            self._handle_exit(child, code, now)

    def _has_changed(self, child: _ChildState) -> bool:
        """Return True if, since the child's start, the definition changed or the catalog's audit log got an entry."""
        if self._triggers is None:
            return False
        newest = self._triggers.last_change()
        return (newest is not None and newest > child.began) or self._triggers.definition_digest() != child.definition

    def _start(self, child: _ChildState, now: float) -> None:
        if child.started:
            self.restarts[child.spec.name] += 1
        child.halted, child.began = False, time.time()
        child.definition = "" if self._triggers is None else self._triggers.definition_digest()
        child.process = self._start_process(child)
        child.started = now
        child.reader = Thread(target=self._forward_output, args=(child.spec.name, child.process.stdout), daemon=True)
        child.reader.start()

    def _start_process(self, child: _ChildState) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._warm is not None and child.spec.imports and not child.unforked:
            return self._warm.fork(child.spec.command, child.spec.imports)
        return subprocess.Popen(
            child.spec.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # its own process group: the terminal's ^C reaches only the supervisor, which stops children in order
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - one prctl call, no locks taken
        )

    def _handle_exit(self, child: _ChildState, code: int, now: float) -> None:
        _join_output_thread(child)
        ended = _describe_end(child.process, code)
        child.unforked = isinstance(child.process, ForkedProcess) and not child.process.pid
        child.process = None
        if code == ExitCode.USAGE:
            raise ChildFailed(
                f"{child.spec.name!r} ended with exit status {code}: its definition or its options are wrong, "
                "so a restart would fail again"
            )
        if child.spec.may_end and code == ExitCode.OK:
            child.done = True
            self._print(child.spec.name, "is done")
            return
        child.failures = 1 if now - child.started >= self._policy.healthy_after else child.failures + 1
        wait = self._policy.wait(child.failures, code)
        child.start_at = now + wait
        child.halted = code == ExitCode.HALTED
        sooner = f", {RETRY_HINT} {os.getpid()}" if child.halted else ""
        self._print(child.spec.name, f"{ended}; restarting in {wait:.1f} s{sooner}")

    def _end(self) -> bool:
        """Stop the children in order; return True if a second signal made them end at once."""
        forced = False
        for child in self._children:
            if child.process is None:
                continue
            if not forced:
                child.process.terminate()
                forced = self._wait_for_exit(child.process)
            if child.process.poll() is None:
                why = "a second signal arrived" if forced else "it did not end in time"
                self._print(child.spec.name, f"killed the process, because {why}")
                kill_child(child.process)
            child.process.wait()
            # grandchildren (a JVM, workers) are in the group
            kill_child(child.process)
            _join_output_thread(child)
        return forced

    def _wait_for_exit(self, process: subprocess.Popen[bytes] | ForkedProcess) -> bool:
        """Wait until a child has exited or its deadline has passed; return True if a signal arrived before that."""
        limit = time.monotonic() + self._policy.deadline
        while time.monotonic() < limit and process.poll() is None:
            if self._wait_for_stop(POLL):
                return True
        return False

    def _forward_output(self, name: str, lines: IO[bytes] | None) -> None:
        for line in lines or ():
            self._print(name, line.decode(errors="replace").rstrip("\n"))


def _describe_end(process: subprocess.Popen[bytes] | ForkedProcess | None, code: int) -> str:
    if isinstance(process, ForkedProcess) and process.is_lost:
        return "ended with the warm process" if process.pid else "was not started by the warm process"
    return f"ended with signal {-code}" if code < 0 else f"ended with status {code}"


def _print_line(name: str, line: str) -> None:
    sys.stderr.write(f"{name:<7}│ {line}\n")
    sys.stderr.flush()


def _join_output_thread(child: _ChildState) -> None:
    if child.reader is not None:
        # a grandchild may keep the pipe open, so do not wait for its end
        child.reader.join(timeout=1.0)
