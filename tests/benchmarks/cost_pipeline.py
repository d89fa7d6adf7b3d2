"""A running pipeline whose CPU, memory and wake-ups are measured: `cdc run` over the tables of a workload."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import EngineChoice
from cdc.log.reader import LogReader, read_file
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.slot import drop_slot
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import Published, TargetState
from cdc.targets.search_index_reader import SearchIndex
from tests.benchmarks import workloads
from tests.benchmarks.peers import ReaderPlace, connections_for, prepare, running_module, under_load, until
from tests.benchmarks.processes import ROLES, cpu_seconds, memory_mib, processes_of, pss_mib, wakeups


@dataclass(frozen=True, slots=True)
class Used:
    """CPU, memory and wake-ups of one kind of process."""

    cores: float
    rss_mib: float
    pss_mib: float
    wakeups: float
    """How often its threads woke up, per second."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The sinks of a pipeline besides its Delta sink, and the engine that applies ranges."""

    has_search: bool = False
    """Whether a local search index is filled, too."""
    engine: EngineChoice = EngineChoice.AUTO

    def lines(self, folder: Path) -> str:
        """Return the lines of the definition."""
        sinks: list[dict[str, Any]] = [{"type": "delta", "name": "lake", "path": f"{folder}/lake/{{schema}}/{{table}}"}]
        if self.has_search:
            sinks.append({"type": "search", "name": "find", "path": f"{folder}/find"})
        spark = json.dumps({"engine": self.engine.value})
        return f"sinks: {json.dumps(sinks)}\nspark: {spark}\nservice: {{port: 0}}"


class Pipeline:
    """`cdc run` over the tables of a workload."""

    def __init__(self, dsn: str, folder: Path, work: workloads.Workload, setting: Setting | None = None) -> None:
        """setting: None means the Delta sink alone, and the default engine."""
        self.dsn, self._work = dsn, work
        self._setting = setting = setting or Setting()
        self.first_copy_seconds = 0.0
        """Seconds from the start of `cdc run` until all tables were published."""
        folder.mkdir()
        self._place = ReaderPlace("cost", folder, dsn, f"{work.schema}.*", "cost_pub", setting.lines(folder))
        self._lake = f"{folder}/lake/{{schema}}/{{table}}"

    @property
    def definition(self) -> Path:
        """The definition's file, while the pipeline runs."""
        return self._place.folder / "definition.yaml"

    @property
    def log(self) -> Path:
        """The change log."""
        return self._place.log

    @property
    def pid(self) -> int:
        """Process id of `cdc run`."""
        return self._process.pid

    @contextmanager
    def running(self, tables: int, *, idle_after: float) -> Iterator[None]:
        """Run the pipeline inside the block, which begins some time after all tables are copied and published."""
        prepare(self.dsn, *self._work.setup)
        output, command = self._place.folder / "run.out", ("cdc", "run", "-c", str(self._place.write()))
        began = time.monotonic()
        with running_module(output, *command) as self._process:
            until(lambda: self.is_streaming(tables), 900, pause=0.1)
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
        with under_load(self.dsn, self._work.schema, rate / tables, connections=connections_for(rate)):
            yield

    def changes_per_second(self, began: float, ended: float) -> float:
        """Return how many changes the source committed per second between two times, in seconds since 1970."""
        log = LogReader(self.log)
        upto, count = log.durable or Position(0), 0
        for file in log.files(Position(0), upto):
            rows = read_file(file, Position(0), upto, ["op", "committed_at"])
            updates = rows.filter(pc.equal(rows["op"], Operation.UPDATE.value))
            times = updates["committed_at"].cast(pa.int64()).to_numpy() / 1e6
            count += int(((times >= began) & (times < ended)).sum())
        return count / (ended - began)

    def used(self, seconds: float) -> Mapping[str, Used]:
        """Measure for so many seconds; return what each role used, and all of them as `pipeline`."""
        cpu = self._cpu()
        woken = self._wakeups()
        began = time.monotonic()
        time.sleep(seconds)
        cpu_after = self._cpu()
        woken_after = self._wakeups()
        elapsed = time.monotonic() - began
        cores, wakes = defaultdict[str, float](float), defaultdict[str, float](float)
        for (role, process), used in cpu_after.items():
            cores[role] += (used - cpu.get((role, process), 0.0)) / elapsed
        for (role, thread), count in woken_after.items():
            wakes[role] += (count - woken.get((role, thread), 0)) / elapsed
        rss, pss = defaultdict[str, float](float), defaultdict[str, float](float)
        for role, process in processes_of(self.pid):
            rss[role] += memory_mib(process, "VmRSS")
            pss[role] += pss_mib(process)
        of_roles = {role: Used(cores[role], rss[role], pss[role], wakes[role]) for role in ROLES}
        sums = (sum(used.values()) for used in (cores, rss, pss, wakes))
        return of_roles | {"pipeline": Used(*sums)}

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all running processes so far."""
        return sum(self._cpu().values())

    def published(self) -> Published | None:
        """Return the record of the last published cut of the Delta sink."""
        return Lake.open(self._lake).published()

    def is_streaming(self, tables: int) -> bool:
        """Return whether so many tables are copied, and published with all that the log has, by every sink."""
        if self._process.poll() is not None:
            raise RuntimeError(f"cdc run ended with status {self._process.returncode}")
        return all(self._has_all(record, tables) for record in self._records())

    def _records(self) -> Iterator[Published | None]:
        yield self.published()
        if self._setting.has_search:
            record = None
            with suppress(Exception):  # the index is not there yet
                record = SearchIndex.open(f"{self._place.folder}/find").published
            yield record

    def _has_all(self, record: Published | None, tables: int) -> bool:
        states = [] if record is None else [table.state for table in record.tables.values()]
        durable = LogReader(self._place.log).durable if states else None
        done = record is not None and durable is not None and record.position >= durable > Position(0)
        return done and states.count(TargetState.STREAMING) == tables

    def _cpu(self) -> dict[tuple[str, Path], float]:
        """Return the CPU seconds of each running process so far, with its role."""
        seconds: dict[tuple[str, Path], float] = {}
        for role, process in processes_of(self.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
                seconds[role, process] = cpu_seconds(process)
        return seconds

    def _wakeups(self) -> dict[tuple[str, Path], int]:
        """Return how often each running thread has waited and woken up so far, with its role."""
        counts: dict[tuple[str, Path], int] = {}
        for role, process in processes_of(self.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
                counts |= {(role, thread): count for thread, count in wakeups(process).items()}
        return counts
