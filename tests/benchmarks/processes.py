"""The processes of a pipeline with their roles, and what the kernel says of each."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

ROLES: Final = {"reader": "cdc reader", "apply": "pipelines apply", "jvm": "java", "server": "cdc server"}
"""Name in the figures → what the command line of the process contains."""
SUPERVISOR: Final = "supervisor"
"""Role of the first process, and of those of its children that have no role of their own."""


def processes_of(pid: int) -> Iterator[tuple[str, Path]]:
    """Yield a process and all its descendants: the role of each, and its folder in /proc.

    A process without a role has that of its parent.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                stat = (process / "stat").read_text(encoding="utf-8")
                children[int(stat.rpartition(")")[2].split()[1])].append(int(process.name))
    pending = [(SUPERVISOR, pid)]
    while pending:
        role, pid = pending.pop()
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            role = next((name for name, words in ROLES.items() if words in command), role)
            yield role, Path(f"/proc/{pid}")
            pending += [(role, child) for child in children[pid]]


def pid_of(pid: int, role: str) -> int | None:
    """Return the id of the first process with a role among a process and its descendants; None without one."""
    return next((int(process.name) for name, process in processes_of(pid) if name == role), None)


def cpu_seconds(process: Path) -> float:
    """Return the CPU seconds of all threads so far, also of those that ended."""
    fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def wakeups(process: Path) -> dict[Path, int]:
    """Return how often each running thread has waited and woken up so far."""
    counts = {}
    for thread in (process / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            lines = (thread / "status").read_text(encoding="utf-8").splitlines()
            counts[thread] = sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return counts


def memory_mib(process: Path, field: str) -> float:
    """Return a field of `/proc/PID/status` that starts with VmRSS, VmHWM or RssAnon; 0 for an ended process."""
    return _kib(process / "status", field) / 1024


def pss_mib(process: Path) -> float:
    """Return the proportional set size: memory that n processes share counts to each of them as the nth part."""
    return _kib(process / "smaps_rollup", "Pss:") / 1024


def _kib(file: Path, field: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = file.read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(field))
    return 0
