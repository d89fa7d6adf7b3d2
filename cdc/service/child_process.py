"""Child processes: the kernel ends them when their parent dies, and their whole process group can be killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill all running processes in the process group of a child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def die_with_parent() -> Callable[[], None] | None:
    """Return a function that, called in a child, makes the kernel send SIGTERM to it when its parent thread ends.

    The calling process is the parent. Return None if the system is not Linux.
    """
    libc, parent = _LIBC, os.getpid()
    if libc is None:
        return None

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # the parent may have died between fork and the line above
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel
