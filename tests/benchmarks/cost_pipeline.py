"""A running pipeline whose CPU, memory and wake-ups are measured: `cdc run` with one Delta sink."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.slot import drop_slot
from cdc.stores.lake_reader import Lake
from cdc.stores.published_record import Published, TargetState
from tests.benchmarks import workloads
from tests.benchmarks.peers import ReaderPlace, execute, running_module, under_load, until

ROLES: Final = {"reader": "cdc reader", "apply": "pipelines apply", "jvm": "java", "server": "cdc serve"}
"""Name in the figures → what the command line of the process contains."""


@dataclass(frozen=True, slots=True)
class Used:
    """CPU, memory and wake-ups of one kind of process."""

    cores: float
    rss_mib: float
    wakeups: float
    """How often its threads woke up, per second."""


class Pipeline:
    """`cdc run` with one Delta sink, over the tables of a workload."""

    def __init__(self, dsn: str, folder: Path, work: workloads.Workload) -> None:
        self.dsn, self._work = dsn, work
        self.first_copy_seconds = 0.0
        """Seconds from the start of `cdc run` until all tables were published."""
        folder.mkdir()
        self._sink = f"{folder}/lake/{{schema}}/{{table}}"
        more = f"sinks: [{{type: delta, name: lake, path: '{self._sink}'}}]\nservice: {{port: 0}}"
        self._place = ReaderPlace("cost", folder, dsn, f"{work.schema}.*", "cost_pub", more)

    @contextmanager
    def running(self, tables: int, *, idle_after: float) -> Iterator[None]:
        """Run the pipeline inside the block, which begins some time after all tables are copied and published."""
        execute(self.dsn, *self._work.setup)
        output, command = self._place.folder / "run.out", ("cdc", "run", "-c", str(self._place.write()))
        began = time.monotonic()
        with running_module(output, *command) as self._process:
            until(lambda: self.is_streaming(tables), 300, pause=0.1)
            self.first_copy_seconds = time.monotonic() - began
            time.sleep(idle_after)
            yield
        with connect(self.dsn) as conn:
            drop_slot(conn, self._place.slot)

    @contextmanager
    def under_load(self, rate: int, tables: int) -> Iterator[None]:
        """Keep up a constant load inside the block."""
        if not rate:
            yield
            return
        with under_load(self.dsn, self._work.schema, rate / tables):
            yield

    def used(self, seconds: float) -> Mapping[str, Used]:
        """Measure for so many seconds; return what each role used, and all of them as `pipeline`."""
        cpu, wakeups, began = self._cpu(), self._wakeups(), time.monotonic()
        time.sleep(seconds)
        cpu_after, wakeups_after, elapsed = self._cpu(), self._wakeups(), time.monotonic() - began
        cores, woken, rss = defaultdict[str, float](float), defaultdict[str, float](float), self._rss()
        for (role, process), used in cpu_after.items():
            cores[role] += (used - cpu.get((role, process), 0.0)) / elapsed
        for (role, thread), count in wakeups_after.items():
            woken[role] += (count - wakeups.get((role, thread), 0)) / elapsed
        found = {role: Used(cores[role], rss.get(role, 0.0), woken[role]) for role in ROLES}
        return found | {"pipeline": Used(sum(cores.values()), sum(rss.values()), sum(woken.values()))}

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all running processes so far."""
        return sum(self._cpu().values())

    def published(self) -> Published | None:
        """Return the record of the last published cut."""
        return Lake.open(self._sink).published()

    def is_streaming(self, tables: int) -> bool:
        """Return whether so many tables are copied, and published with all that the log has."""
        if self._process.poll() is not None:
            raise RuntimeError(f"cdc run ended with status {self._process.returncode}")
        record = self.published()
        states = [] if record is None else [table.state for table in record.tables.values()]
        durable = LogReader(self._place.log).durable if states else None
        done = record is not None and durable is not None and record.position >= durable > Position(0)
        return done and states.count(TargetState.STREAMING) == tables

    def _cpu(self) -> dict[tuple[str, Path], float]:
        """Return the CPU seconds of each running process so far, with its role."""
        found = {}
        for role, process in self._processes():
            fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            found[role, process] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        return found

    def _wakeups(self) -> dict[tuple[str, Path], int]:
        """Return how often each running thread has waited and woken up so far, with its role."""
        found = {}
        for role, process in self._processes():
            for thread in (process / "task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    lines = (thread / "status").read_text(encoding="utf-8").splitlines()
                    counts = [line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")]
                    found[role, thread] = sum(map(int, counts))
        return found

    def _rss(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for role, process in self._processes():
            lines = (process / "status").read_text(encoding="utf-8").splitlines()
            # a process that has ended, and has not been waited for, has no such line
            found[role] += next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0) / 1024
        return found

    def _processes(self) -> Iterator[tuple[str, Path]]:
        """Yield every process of the pipeline with its role; a process that has none counts to its parent's."""
        children: dict[int, list[int]] = defaultdict(list)
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    stat = (process / "stat").read_text(encoding="utf-8")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                children[int(stat.rpartition(")")[2].split()[1])].append(int(process.name))
        pending = [("supervisor", self._process.pid)]
        while pending:
            role, pid = pending.pop()
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            role = next((name for name, words in ROLES.items() if words in command), role)
            yield role, Path(f"/proc/{pid}")
            pending += [(role, child) for child in children[pid]]
