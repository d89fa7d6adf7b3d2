"""Machine load: processor time of the pipeline's processes and of the whole machine, from `/proc`.

On a machine that is too small, a lag looks like a fault of the pipeline. So the status names the machine as the reason
of a lag while nearly all processor time is used. Without `/proc` the load is unknown.
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
"""Seconds over which processor time is measured: long enough for a sink to merge several batches."""
MIN_SPAN: Final = 2.0
"""Minimum seconds from the first sample to the last; the kernel counts only whole hundredths of a second."""
BUSY_SHARE: Final = 0.85
"""The cores count as busy if at least this share of processor time is used; Postgres and the page need the rest."""
LAG_THRESHOLD: Final = 1.0
"""Seconds of lag above which a reason is shown; on two idle cores the lags of the demo are shorter."""
_PROC: Final = Path("/proc")
_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
_PARENT = 1
_USER = 11
_SYSTEM = 12
_STARTED = 19
"""Indices of fields in `/proc/PID/stat`, counted after the process name; times are in clock ticks."""
_IDLE: Final = (3, 4)
"""Indices of the idle and iowait fields in the first line of `/proc/stat`."""
_COUNTED: Final = 8
"""Number of time fields in the first line of `/proc/stat` to add up; later fields are already included in these."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Processor time that was used in the last seconds, in cores."""

    cores: float
    """Number of cores that this process may use: those of the machine, or the limit of its cgroup."""
    pipeline: float
    """Number of cores that reader, apply with its JVM, and server use, if they run on this machine."""
    busy_share: float
    """Share of the processor time of all cores that the machine's processes used, from 0 to 1."""

    def reason(self, lag_seconds: float | None) -> str | None:
        """Return a text that explains a long lag by the machine's load; None if the lag is short or the load is low."""
        if lag_seconds is None or lag_seconds <= LAG_THRESHOLD:
            return None
        usage = f"the pipeline uses {self.pipeline:.1f} of {self.cores:g} cores"
        if self.pipeline >= BUSY_SHARE * self.cores:
            return f"this machine is too slow for the present rate of changes: {usage}"
        if self.busy_share >= BUSY_SHARE:
            return f"this machine is busy: {usage}, and other processes use the rest"
        return None


class _Process(NamedTuple):
    """One process as `/proc` lists it."""

    pid: int
    parent: int
    started: int
    ticks: int


class _Sample(NamedTuple):
    """Counters of processor time that were read at one time."""

    at: float
    ticks: Mapping[tuple[int, int], int]
    """(pid, start time) of each process of the pipeline → its processor time in clock ticks."""
    busy: int
    total: int


class LoadMeter:
    """Computes the machine's load from samples of processor time; one thread calls `measure` every few seconds."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._per_second = os.sysconf("SC_CLK_TCK")
        self._cores = available_cores()

    def measure(self, now: float, processes: Mapping[str, int]) -> MachineLoad | None:
        """Take a sample, and return the load of the last MEASURE_SPAN seconds.

        Returns None until the samples span MIN_SPAN seconds, and on a system without `/proc`. `now` is a monotonic
        time. `processes` maps the name of each process of the pipeline to its pid. The name must be an argument on the
        command line of the process. The time of child processes is added to the time of their parents.
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
        # a process that started after the first sample counts with all its ticks
        spent = sum(max(0, ticks - first.ticks.get(process, 0)) for process, ticks in sample.ticks.items())
        busy = (sample.busy - first.busy) / (sample.total - first.total)
        return MachineLoad(self._cores, spent / self._per_second / (now - first.at), busy)


def available_cores() -> float:
    """Return the number of cores that the CPU affinity and the cgroup limit of this process allow."""
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
    """Return the pids of a process and of its ancestors."""
    line = list[int]()
    while process.pid not in line:
        line.append(process.pid)
        process = running.get(process.parent, process)
    return line


def _command_line_has(pid: int, word: str) -> bool:
    """Return True if `word` is an argument on the command line of the process.

    The check is needed because a reported pid may be from another machine, or may belong to another process by now.
    """
    with suppress(OSError):
        # the title that a forked process has set is one argument
        return word.encode() in (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").split(b" ")
    return False
