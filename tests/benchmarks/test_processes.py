"""Processes: roles by command line, and what the kernel says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.benchmarks.processes import SUPERVISOR, memory_mib, pid_of, processes_of, pss_mib, wakeups
from tests.fixtures.waiting import until


def test_a_process_has_the_role_of_its_command_line_or_of_its_parent() -> None:
    shell = shutil.which("sh")
    assert shell is not None
    command = ["cdc reader", "-c", "sleep 60 & read line"]
    with subprocess.Popen(command, executable=shell, stdin=subprocess.PIPE) as reader:
        try:
            until(lambda: len(_readers()) == 2, "the child of the reader")
            assert next(processes_of(os.getpid())) == (SUPERVISOR, Path(f"/proc/{os.getpid()}"))
            assert _readers()[0] == reader.pid
            assert pid_of(os.getpid(), "reader") == reader.pid
            assert pid_of(os.getpid(), "server") is None
            process = Path(f"/proc/{reader.pid}")
            assert 0 < pss_mib(process) <= memory_mib(process, "VmRSS")
            assert set(wakeups(process)) == {process / "task" / str(reader.pid)}
        finally:
            for pid in _readers():
                os.kill(pid, signal.SIGKILL)


def _readers() -> list[int]:
    return [int(process.name) for role, process in processes_of(os.getpid()) if role == "reader"]


def test_an_ended_process_uses_nothing() -> None:
    gone = Path("/proc/0")
    assert (pss_mib(gone), memory_mib(gone, "VmRSS")) == (0, 0)
