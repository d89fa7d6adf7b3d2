"""Warm process: imports the modules of the child processes once, and is forked for each child.

Reader, apply process and server share most of their modules. A Python interpreter that imports them spends more than
two seconds of CPU, so three interpreters keep two cores busy for about four seconds before the first change is
captured, and a killed reader is back only after these two seconds. A fork takes some milliseconds, and the memory of
the modules is shared.

The supervisor has threads, so it cannot fork safely: a lock that another thread owns would stay locked in the child
forever. The warm process can, because of these rules:

- It has one thread. Importing OpenBLAS and the two copies of jemalloc starts threads; ONE_THREAD prevents that.
- It only imports modules. It opens no database and no table, so no engine (tokio, Arrow's pools) has started threads.
- It compiles nothing. A first compilation of the kernels takes 20 s, for which no other child could start.
- A child gets what a fresh interpreter has: its own session, its own input, the pipe of the supervisor as output,
  the default signal handlers, its own command line in `ps`, exit handlers, and a new seed of `random`.
- A module whose import fails is left to the child that needs it, which reports the error.

SIGTERM and SIGINT are blocked in the warm process, and unblocked in its children. So a signal to all processes of a
service does not end the warm process before its children, and no signal to a child that was just forked is lost.

Each child reports its pid over a socket, and the warm process, its parent, reports its exit status there. When the
supervisor dies, the warm process reads the end of its control socket and exits, and the kernel sends SIGTERM to its
children. When the warm process dies, its children get SIGTERM too, and their exit statuses are unknown. The supervisor
then starts them again, from a new warm process. A child that could not be forked is started as an interpreter.

A child that is restarted runs the code that was imported before; an upgrade of the package needs a new `cdc run`.

`multiprocessing.forkserver` is not used: its children share one output, have no command line of their own, and end
with `os._exit`, without exit handlers.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import IO, Final, Self, TextIO

from setproctitle import setproctitle

from cdc.errors import ExitCode
from cdc.service.child_process import die_with_parent, kill_group

ONE_THREAD: Final[Mapping[str, str]] = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "_RJEM_MALLOC_CONF": "background_thread:false",
}
"""Environment variables of the warm process: numpy, pyarrow and deltalake start no thread when they are imported."""
REPLACED: Final = "CDC_REPLACED_VARIABLES"
"""Environment variable of the warm process: the values that ONE_THREAD replaces, as JSON; its children get them."""
ORPHAN_DEADLINE: Final = 20.0
"""Maximum seconds for a child to end after the warm process has died."""
LOST_STATUS: Final = ExitCode.RUNTIME.value
"""Exit status of a child whose status is unknown because the warm process has died."""
_MESSAGE: Final = 1 << 16
"""Maximum size of a message in bytes."""
_BLOCKED: Final = (signal.SIGTERM, signal.SIGINT)


class ForkedProcess:
    """A child that the warm process forks, or will fork after the imports; it is used like a `subprocess.Popen`."""

    def __init__(self, reports: socket.socket, stdout: IO[bytes]) -> None:
        """`reports` delivers the pid and then the exit status; `stdout` is the output of the process."""
        reports.setblocking(False)
        self._reports, self.stdout = reports, stdout
        self.pid = 0
        """0 until the process has been forked."""
        self.returncode: int | None = None
        """Exit status, or the negative number of the signal that ended the process; None while it may run."""
        self._pidfd: int | None = None
        self._signal: int | None = None
        self._orphaned_at: float | None = None

    @property
    def is_lost(self) -> bool:
        """True if the warm process could not fork the process, or died before it."""
        return self._orphaned_at is not None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs or is to be forked."""
        while self.returncode is None and self._orphaned_at is None and self._receive():
            pass
        if self.returncode is None and self._orphaned_at is not None:
            self._check_orphan(self._orphaned_at)
        return self.returncode

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        while (status := self.poll()) is None:
            orphan = None if self._orphaned_at is None else self._pidfd
            select.select([self._reports if orphan is None else orphan], [], [], 1.0)
        return status

    def terminate(self) -> None:
        """Send SIGTERM to the process, or as soon as it has been forked."""
        self._send(signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the process and all processes in its group, or as soon as it has been forked."""
        self._send(signal.SIGKILL)
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._pidfd is None:
            self._signal = number
            return
        with suppress(ProcessLookupError):  # the process has ended
            signal.pidfd_send_signal(self._pidfd, number)

    def _receive(self) -> bool:
        """Process one report; return False if none is there."""
        try:
            message, files, _, _ = socket.recv_fds(self._reports, _MESSAGE, 1)
        except BlockingIOError:
            return False
        if not message:
            self._orphaned_at = time.monotonic()
        elif not files:
            self.returncode = int(message)
            self._close()
        else:
            self.pid, self._pidfd = int(message), files[0]
            if self._signal is not None:
                self._send(signal.Signals(self._signal))
        return True

    def _check_orphan(self, since: float) -> None:
        if self._pidfd is None or select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = LOST_STATUS
            self._close()
        elif time.monotonic() - since > ORPHAN_DEADLINE:
            self.kill_group()

    def _close(self) -> None:
        self._reports.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def kill_child(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """Kill a forked child, or a child that was started as a program, with all processes in its group."""
    if isinstance(process, ForkedProcess):
        process.kill_group()
    else:
        kill_group(process)


class WarmProcess:
    """Owner of the warm process, which starts it at once, and again when a child is wanted after it has died.

    Only one thread at a time may use it. The exit of its context ends the warm process, and with it its children.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        """`imports` contains the names of the modules that the warm process imports before it is asked for a child."""
        self._imports = imports
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the warm process, and with it its children."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The pid of the current warm process."""
        return self._process.pid

    def fork(self, command: Sequence[str], imports: Sequence[str], stdin: int | None = None) -> ForkedProcess:
        """Start a child that does what the command would do, and return before it has been forked.

        `command` has the form `PYTHON -u -m MODULE ARGUMENT…`. `imports` contains the names of the modules that the
        warm process imports before it forks. `stdin` is the file descriptor of the child's input; None means
        `/dev/null`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        request = json.dumps({"command": list(command), "imports": list(imports)}).encode()
        files = [theirs.fileno(), writing] if stdin is None else [theirs.fileno(), writing, stdin]
        if not self._send(request, files):
            self._control.close()
            self._process.wait()
            self._start()
            self._send(request, files)  # if this fails, `theirs` is closed, so the child is lost
        theirs.close()
        os.close(writing)
        return ForkedProcess(ours, os.fdopen(reading, "rb"))

    def _send(self, request: bytes, files: Sequence[int]) -> bool:
        """Return False if the warm process has died, or is ending and has closed its socket already."""
        try:
            socket.send_fds(self._control, [request], files)
        except ConnectionError:
            return False
        return True

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        replaced = {name: os.environ[name] for name in ONE_THREAD if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(theirs.fileno()), *self._imports],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the standard output of `cdc run` is for its result
                env={**os.environ, **ONE_THREAD, REPLACED: json.dumps(replaced)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """A child to fork, in the warm process."""

    command: Sequence[str]
    imports: Sequence[str]
    reports: socket.socket
    output: int
    input: int | None

    @classmethod
    def receive(cls, control: socket.socket) -> _ForkRequest | None:
        """Wait for a request; return None when the supervisor has closed its end of the socket."""
        message, files, _, _ = socket.recv_fds(control, _MESSAGE, 3)
        if not message:
            return None
        reports, output, *given = files
        stdin = given[0] if given else None
        return cls(**json.loads(message), reports=socket.socket(fileno=reports), output=output, input=stdin)

    def report_start(self) -> None:
        """Report the pid from the forked child itself, so that no running child is unknown to the supervisor.

        A report from the warm process would be lost if it died between the fork and the report.
        """
        pid = os.getpid()
        pidfd = os.pidfd_open(pid)
        with suppress(ConnectionError):  # the supervisor has died
            socket.send_fds(self.reports, [b"%d" % pid], [pidfd])
        os.close(pidfd)

    def close_streams(self) -> None:
        """Close the descriptors that the request delivered as streams of the child."""
        for stream in (self.output, self.input):
            if stream is not None:
                os.close(stream)

    def run(self) -> None:
        """Run the command in the forked child as a fresh interpreter would run it."""
        os.dup2(self.output, 1)
        os.dup2(self.output, 2)
        if self.input is not None:
            os.dup2(self.input, 0)
        self.close_streams()
        sys.stdout = _reopen(sys.stdout)
        sys.stderr = _reopen(sys.stderr)
        for name in ONE_THREAD:
            os.environ.pop(name, None)
        os.environ |= json.loads(os.environ.pop(REPLACED))
        setproctitle(" ".join(self.command))
        module, *sys.argv[1:] = self.command[self.command.index("-m") + 1 :]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        gc.enable()
        runpy.run_module(module, run_name="__main__", alter_sys=True)


class _ForkLoop:
    """Loop of the warm process: forks a child for each request, and reports the exit status of each child."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._end_with_parent = die_with_parent()
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """Pidfd of each running child → its pid and the socket for its reports."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> _ForkRequest | None:
        """Return in each child its request, and in the warm process None when the supervisor is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._running:
                    self._report_exit(key.fd)
                    continue
                request = _ForkRequest.receive(self._control)
                if request is None:
                    return None
                import_modules(request.imports)
                if self._fork(request) == 0:
                    return request

    def _fork(self, request: _ForkRequest) -> int:
        """Return 0 in the child, and its pid in the warm process."""
        gc.freeze()  # else a collection in a child writes to every object, and so copies all pages
        try:
            pid = os.fork()
        except OSError:  # the report of a process that was not forked is the end of its socket
            pid = -1
        if pid == 0:
            os.setsid()
            if self._end_with_parent is not None:
                self._end_with_parent()
            request.report_start()
            self._close(request)
            return 0
        request.close_streams()
        if pid < 0:
            request.reports.close()
            return pid
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = pid, request.reports
        self._selector.register(pidfd, selectors.EVENT_READ)
        return pid

    def _report_exit(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        pid, reports = self._running.pop(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with reports, suppress(ConnectionError):
            reports.send(b"%d" % status)
        os.close(pidfd)

    def _close(self, request: _ForkRequest) -> None:
        """Close what belongs to the warm process; a copy of a socket would hide the death of the warm process."""
        self._selector.close()
        self._control.close()
        request.reports.close()
        for pidfd, (_, reports) in self._running.items():
            os.close(pidfd)
            reports.close()


def _reopen(stream: TextIO) -> TextIO:
    """Return a new unbuffered stream, as `python -u` makes it; the old one remembers whether its file had positions."""
    unbuffered = os.fdopen(stream.fileno(), "wb", buffering=0, closefd=False)
    return io.TextIOWrapper(unbuffered, stream.encoding, stream.errors, write_through=True)  # type: ignore[arg-type]


def import_modules(names: Sequence[str]) -> None:
    """Import the modules that can be imported; with a name of the form MODULE:FUNCTION, also call the function."""
    for name in names:
        module, _, function = name.partition(":")
        with suppress(Exception):
            imported = import_module(module)
            if function:
                getattr(imported, function)()


def _main(control: int, imports: Sequence[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    gc.disable()  # imports leave little garbage, and the searches take a sixth of their time
    import_modules(imports)
    request = _ForkLoop(socket.socket(fileno=control)).serve()
    if request is None:
        os._exit(ExitCode.OK.value)  # without the search for garbage in all objects
    request.run()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
