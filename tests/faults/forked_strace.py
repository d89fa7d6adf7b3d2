"""A forked `python -m MODULE` under strace, which sees it from its first step on.

An interpreter that is started under strace has it look at all imports first, which takes longer than what is tested.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from tests.fixtures import forked
from tests.fixtures.waiting import PATIENCE, until

_WAITS: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: anybody may trace it
os.kill(os.getpid(), signal.SIGSTOP)
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@contextmanager
def traced(options: Sequence[str], trace: Path, *command: object, output: IO[Any]) -> Iterator[forked.Forked]:
    """`python -m COMMAND…` next to a block, and what strace with the options sees of it in a file.

    A process that still runs at the end of the block is killed. After the block the file is complete.
    """
    child = forked.start("tests.run_code", _WAITS, *command, output=output)
    try:
        until(lambda: _status(child.pid, "State").startswith("T"), "a process that waits for strace", every=0.01)
        strace = ["strace", "-f", "-qq", "-o", str(trace), *options, "-p", str(child.pid)]
        with subprocess.Popen(strace, stdout=output, stderr=output) as tracing:
            try:
                until(
                    lambda: _status(child.pid, "TracerPid") != "0" or tracing.poll() is not None,
                    "strace to be attached",
                    every=0.01,
                )
                assert tracing.poll() is None, trace
                child.send_signal(signal.SIGCONT)
                yield child
            finally:
                child.kill()
                child.wait(PATIENCE)
                tracing.wait(PATIENCE)
    finally:
        child.kill()


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
