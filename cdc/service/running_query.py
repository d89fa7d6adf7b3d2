"""Running query: a query process as the server sees it, and the warm process that query processes are forked from.

A query process that starts as an interpreter needs more than a second for its imports, a forked one some milliseconds.
So the first query starts a warm process (`warm_process.py`), which lives as long as the server.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from tempfile import TemporaryFile
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from cdc.errors import ChildFailed, QueryStopped, error_of_code
from cdc.service.warm_process import ForkedProcess, WarmProcess, kill_child

if TYPE_CHECKING:
    from cdc.targets.table_query import QueriedSink, QueryRequest  # its import takes a second and 100 MB

RUN_TIME: Final = 30.0
"""Maximum seconds for which a query may run; the wait for a position is not part of it."""
_COMMAND: Final = (sys.executable, "-u", "-m", "cdc.service.query_process")
_IMPORTS: Final = ("cdc.targets.table_query",)
_CHUNK: Final = 1 << 20


class RunningQuery:
    """A query in a process of its own; `close` must be called in the end."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, seconds: float) -> None:
        """`seconds` is the maximum time of the process."""
        assert process.stdout is not None  # noqa: S101 - a pipe
        self._process, self._seconds = process, seconds
        self._deadline = time.monotonic() + seconds
        self._stdout = process.stdout
        self._output = bytearray()
        os.set_blocking(self._stdout.fileno(), False)

    def close(self) -> None:
        """Kill the process if it still runs."""
        kill_child(self._process)
        self._process.wait()
        self._stdout.close()

    def answer(self) -> dict[str, Any] | None:
        """Return the answer as JSON values, or None while the query runs.

        Raises the error of the query; QueryStopped if it needs too much time or memory.
        """
        status = self._process.poll()
        self._read()  # after poll: the output of a process that has ended is complete
        if status == 0:
            return self._parsed()
        if status is None and time.monotonic() < self._deadline:
            return None
        if status is None:
            raise QueryStopped(f"the query did not end within {self._seconds:g} s")
        if status < 0:
            raise QueryStopped("the process of the query ended: it needed more than 1 GiB of memory, or was killed")
        raise ChildFailed(f"the process of the query ended with status {status}", remedy="send the request again")

    def _read(self) -> None:
        while chunk := self._read_chunk():
            self._output += chunk

    def _read_chunk(self) -> bytes:
        try:
            return os.read(self._stdout.fileno(), _CHUNK)
        except BlockingIOError:
            return b""

    def _parsed(self) -> dict[str, Any]:
        parsed = json.loads(self._output.rstrip().rpartition(b"\n")[2])
        if (error := parsed.get("error")) is not None:
            raise error_of_code(error["code"], error["message"], remedy=error["suggestion"])
        answer: dict[str, Any] = parsed["answer"]
        return answer


class QueryProcesses:
    """Starts the query processes of a server; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._warm: WarmProcess | None = None

    def start(self, sink: QueriedSink, request: QueryRequest) -> RunningQuery:
        """Start a process for a query of a sink."""
        seconds = RUN_TIME + (0 if request.min_position is None else request.timeout)
        with TemporaryFile() as file:  # not an argument, because every account can read the arguments of a process
            pickle.dump((sink, request), file)
            file.seek(0)
            return RunningQuery(self._start_process(file.fileno()), seconds)

    def stop(self) -> None:
        """End all query processes; none may be started later."""
        with self._lock:
            if self._warm is not None:
                self._warm.close()
                self._warm = None

    def _start_process(self, stdin: int) -> subprocess.Popen[bytes] | ForkedProcess:
        if sys.platform != "linux":
            return subprocess.Popen(
                _COMMAND, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        with self._lock:
            if self._warm is None:
                self._warm = WarmProcess(_IMPORTS)
            return self._warm.fork(_COMMAND, _IMPORTS, stdin)
