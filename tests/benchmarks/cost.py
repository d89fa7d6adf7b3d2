"""Cost: CPU, memory and wake-ups of every process of a running pipeline, under loads that it easily keeps up with.

`cdc run` starts reader, apply process and server. The load is a constant number of changes per second over some
tables. CPU comes from /proc and counts all threads and children; the server that runs Postgres is not counted. The part
`reader` is the reader alone, at one thousand transactions of four changes a second.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot
from cdc.stores.lake_reader import Lake
from cdc.stores.published_record import TargetState
from tests.benchmarks import workloads
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import Reader, ReaderPlace, execute, running_module, under_load, until
from tests.benchmarks.snapshot import SETTINGS

PARTS: Final = ("7_tables", "1_table", "100_tables", "reader")
QUICK_PARTS: Final = ("7_tables", "reader")
TABLES: Final = {"7_tables": 7, "1_table": 1, "100_tables": 100}
RATES: Final = (0, 10, 200, 2_000)
"""Changes per second over all tables."""
TABLE_ROWS: Final = 2_000
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 40.0, 5.0, 20.0, 3.0
"""Seconds that are measured for each rate, and seconds of the load before."""
IDLE_AFTER: Final = 45.0
"""Seconds after the first copy: the streaming query that copied large tables has stopped by then."""
ROLES: Final = {"reader": "cdc reader", "apply": "pipelines apply", "jvm": "java", "server": "cdc serve"}
"""Name in the figures → what the command line of the process contains."""
READER_RATE: Final = 1_000.0
"""Transactions per second for the reader alone."""
LIMITS: Final = {("7_tables", 0): 0.03, ("7_tables", 200): 0.35}


def run(*, quick: bool, seconds: float = 0, runs: int = 0, parts: Sequence[str] = ()) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    measured, warm = seconds or (QUICK_SECONDS if quick else SECONDS), QUICK_WARM if quick else WARM
    figures = _figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            if "reader" in parts:
                with EmbeddedPostgres(folder / f"reader{number}", version=18, settings=SETTINGS, tcp=True) as server:
                    alone = _reader_alone(server.dsn(), folder / f"reader{number}-cdc", warm, measured)
                figures["cores.reader_1000"].values.append(alone)
            for part in [part for part in parts if part in TABLES]:
                work = workloads.ticking(TABLES[part], TABLE_ROWS)
                with EmbeddedPostgres(folder / f"{part}{number}", version=18, settings=SETTINGS, tcp=True) as server:
                    pipeline = _Pipeline(server.dsn(), folder / f"{part}{number}-cdc", work)
                    with pipeline.running(TABLES[part], idle_after=3.0 if quick else IDLE_AFTER):
                        for rate in RATES:
                            with pipeline.under_load(rate, TABLES[part]):
                                time.sleep(warm)
                                used = pipeline.used(measured)
                            for role, usage in used.items():
                                figures[f"cores.{role}_{_rate(rate)}.{part}"].values.append(usage.cores)
                                figures[f"rss_mib.{role}_{_rate(rate)}.{part}"].values.append(usage.rss_mib)
                                figures[f"wakeups.{role}_{_rate(rate)}.{part}"].values.append(usage.wakeups)
    return runs, figures


def _figures() -> dict[str, Figure]:
    figures = {"cores.reader_1000": Figure("cores", at_most=0.25)}
    for part in TABLES:
        for rate in RATES:
            for role in ("pipeline", *ROLES):
                limit = LIMITS.get((part, rate)) if role == "pipeline" else None
                figures[f"cores.{role}_{_rate(rate)}.{part}"] = Figure("cores", at_most=limit)
                figures[f"rss_mib.{role}_{_rate(rate)}.{part}"] = Figure("MiB")
                figures[f"wakeups.{role}_{_rate(rate)}.{part}"] = Figure("1/s")
    return figures


def _reader_alone(dsn: str, folder: Path, warm: float, seconds: float) -> float:
    """Return the cores that a reader without other processes uses at READER_RATE."""
    work = workloads.tpcb(0)
    folder.mkdir()
    execute(dsn, *work.setup)
    place = ReaderPlace("alone", folder, dsn, f"{work.schema}.*", "alone_pub")
    with Reader(place) as reader:
        until(place.has_begun, 60)
        with under_load(dsn, work.schema, READER_RATE):
            time.sleep(warm)
            before, began = reader.usage().cpu_seconds, time.monotonic()
            time.sleep(seconds)
            return (reader.usage().cpu_seconds - before) / (time.monotonic() - began)


def _rate(rate: int) -> str:
    return str(rate) if rate else "idle"


@dataclass(frozen=True, slots=True)
class _Used:
    """CPU, memory and wake-ups of one kind of process."""

    cores: float
    rss_mib: float
    wakeups: float
    """How often its threads woke up, per second."""


class _Pipeline:
    """`cdc run` with one Delta sink, over the tables of a workload."""

    def __init__(self, dsn: str, folder: Path, work: workloads.Workload) -> None:
        self._dsn, self._work = dsn, work
        folder.mkdir()
        self._sink = f"{folder}/lake/{{schema}}/{{table}}"
        more = f"sinks: [{{type: delta, name: lake, path: '{self._sink}'}}]\nservice: {{port: 0}}"
        self._place = ReaderPlace("cost", folder, dsn, f"{work.schema}.*", "cost_pub", more)

    @contextmanager
    def running(self, tables: int, *, idle_after: float) -> Iterator[None]:
        """Run the pipeline inside the block, which begins some time after all tables are copied and published."""
        execute(self._dsn, *self._work.setup)
        output, command = self._place.folder / "run.out", ("cdc", "run", "-c", str(self._place.write()))
        with running_module(output, *command) as self._process:
            until(lambda: self._is_streaming(tables), 300, pause=0.2)
            time.sleep(idle_after)
            yield
        with connect(self._dsn) as conn:
            drop_slot(conn, self._place.slot)

    @contextmanager
    def under_load(self, rate: int, tables: int) -> Iterator[None]:
        """Keep up a constant load inside the block."""
        if not rate:
            yield
            return
        with under_load(self._dsn, self._work.schema, rate / tables):
            yield

    def used(self, seconds: float) -> Mapping[str, _Used]:
        """Measure for so many seconds; return what each role used, and all of them as `pipeline`."""
        cpu, wakeups, began = self._cpu(), self._wakeups(), time.monotonic()
        time.sleep(seconds)
        cpu_after, wakeups_after, elapsed = self._cpu(), self._wakeups(), time.monotonic() - began
        cores, woken, rss = defaultdict[str, float](float), defaultdict[str, float](float), self._rss()
        for (role, process), used in cpu_after.items():
            cores[role] += (used - cpu.get((role, process), 0.0)) / elapsed
        for (role, thread), count in wakeups_after.items():
            woken[role] += (count - wakeups.get((role, thread), 0)) / elapsed
        found = {role: _Used(cores[role], rss.get(role, 0.0), woken[role]) for role in ROLES}
        return found | {"pipeline": _Used(sum(cores.values()), sum(rss.values()), sum(woken.values()))}

    def _is_streaming(self, tables: int) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"cdc run ended with status {self._process.returncode}")
        record = Lake.open(self._sink).published()
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
