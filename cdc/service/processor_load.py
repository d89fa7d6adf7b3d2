"""Machine load: processor time of the pipeline's processes and of the whole machine, from `/proc`.

A lag on a machine that is too small looks like a fault. It is none while the processes use nearly all processor time;
the lag is then shown with that reason. Without `/proc` the load is unknown.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

MEASURE_SPAN: Final = 10.0
"""Seconds over which processor time is measured: some batches of a sink."""
MIN_SPAN: Final = 2.0
"""Minimum seconds between two samples: processor time is counted in hundredths of a second."""
BUSY_SHARE: Final = 0.85
"""Share of the cores above which they count as busy; the source and the page need the rest."""
LAG_THRESHOLD: Final = 1.0
"""Seconds of lag that need a reason; with two free cores the demo stays below."""
_PROC: Final = Path("/proc")
_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
_PARENT, _USER, _SYSTEM, _STARTED = 1, 11, 12, 19
"""Fields after the name in `/proc/PID/stat`; times are in clock ticks."""
_IDLE: Final = (3, 4)
"""Indices of the idle and iowait fields in the first line of `/proc/stat`."""
_COUNTED: Final = 8
"""Fields of that line that do not overlap; guest times are parts of others."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Processor time of the last seconds, in cores."""

    cores: float
    """Cores that this process may use: the machine's, or the limit of its cgroup."""
    pipeline: float
    """Cores used by reader, apply with its JVM, and server, as far as they run on this machine."""
    busy_share: float
    """Busy share of all cores of the machine, 0-1, by any process."""

    def reason(self, lag_seconds: float | None) -> str | None:
        """Why a lag is long, if the machine is the reason; None below LAG_THRESHOLD."""
        if lag_seconds is None or lag_seconds <= LAG_THRESHOLD:
            return None
        usage = f"the pipeline uses {self.pipeline:.1f} of {self.cores:g} cores"
        if self.pipeline >= BUSY_SHARE * self.cores:
            return f"this machine is too slow for this rate: {usage}"
        if self.busy_share >= BUSY_SHARE:
            return f"this machine is busy: {usage}, and other processes use the rest"
        return None


class _Process(NamedTuple):
    """One process of `/proc`."""

    pid: int
    parent: int
    started: int
    ticks: int


class _Sample(NamedTuple):
    """Processor time of all processes at one time."""

    at: float
    ticks: Mapping[tuple[int, int], int]
    """By (pid, start time) of each process of the pipeline."""
    busy: int
    total: int


class LoadMeter:
    """Samples processor time; one thread calls `measure` about once a second."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._per_second = os.sysconf("SC_CLK_TCK")
        self._cores = available_cores()

    def measure(self, now: float, processes: Mapping[str, int]) -> MachineLoad | None:
        """The load since some seconds ago; None at first and without `/proc`.

        now: monotonic seconds. processes: an argument of the command line → pid; children count with their parents.
        """
        sample = _sample(now, processes)
        if sample is None:
            return None
        self._samples.append(sample)
        while len(self._samples) > 1 and now - self._samples[1].at >= MEASURE_SPAN:
            self._samples.popleft()
        first = self._samples[0]
        if now - first.at < MIN_SPAN or sample.total <= first.total:
            return None
        # all ticks of a process that started in between
        spent = sum(max(0, ticks - first.ticks.get(process, 0)) for process, ticks in sample.ticks.items())
        busy = (sample.busy - first.busy) / (sample.total - first.total)
        return MachineLoad(self._cores, spent / self._per_second / (now - first.at), busy)


def available_cores() -> float:
    """Cores that this process may use: by its affinity, or by the limit of its cgroup if that is lower."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = _LIMIT.read_text(encoding="ascii").split()
        return min(cores, int(quota) / int(period))
    return cores


def _sample(now: float, processes: Mapping[str, int]) -> _Sample | None:
    try:
        times = [int(field) for field in (_PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
        running = {process.pid: process for process in _processes()}
    except (OSError, ValueError):
        return None
    roots = {pid for word, pid in processes.items() if pid in running and _command_line_has(pid, word)}
    members = [process for process in running.values() if roots & set(_ancestry(process, running))]
    total = sum(times[:_COUNTED])
    ticks = {(process.pid, process.started): process.ticks for process in members}
    return _Sample(now, ticks, total - sum(times[place] for place in _IDLE), total)


def _processes() -> Iterable[_Process]:
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            # after the name, which may have blanks and parentheses
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks = int(fields[_USER]) + int(fields[_SYSTEM])
            yield _Process(int(folder.name), int(fields[_PARENT]), int(fields[_STARTED]), ticks)


def _ancestry(process: _Process, running: Mapping[int, _Process]) -> Iterable[int]:
    """Its pid and those of its ancestors."""
    line = list[int]()
    while process.pid not in line:
        line.append(process.pid)
        process = running.get(process.parent, process)
    return line


def _command_line_has(pid: int, word: str) -> bool:
    """Whether the argument is on the command line; a reported pid may belong to another machine, or be reused."""
    with suppress(OSError):
        return word.encode() in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    return False
