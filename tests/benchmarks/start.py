"""Start: how long one waits for first rows, a command and a restarted process, and what an idle pipeline costs.

The first rows are those of a `cdc demo` in an empty folder: in the log, in a Delta table and in the search index; then
the first change of its workload in Delta. All clocks begin when the command is started. A cold demo has empty caches of
numba and Python, a warm one those that an earlier demo has filled; files may be in memory in both cases.

Commands, jobs and an idle pipeline are measured with a `cdc run` that fills a Delta sink and a search index from seven
tables. The processes are killed by SIGKILL under a load of 200 changes per second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import tantivy
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.errors import CdcError, ExitCode
from cdc.log.reader import LogReader, read_file
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import Published
from cdc.targets.search_index_reader import SearchIndex, layout, rows_of
from tests.benchmarks import workloads
from tests.benchmarks.cost_pipeline import Pipeline, Setting
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import (
    SOURCE_SETTINGS,
    Reader,
    ReaderPlace,
    prepare,
    running_module,
    under_load,
    until,
)
from tests.benchmarks.processes import pid_of

PARTS: Final = ("demo", "commands", "jobs", "restart", "standby", "idle", "suite")
QUICK_PARTS: Final = PARTS[:-1]
FIRST: Final = ("log", "delta", "search", "live_change")
"""What is seen for the first time, in the names of figures."""
DEMO_LIMITS: Final = {"cold": (4, 7, 7, 8), "warm": (2, 4, 4, 4)}
COMMANDS: Final[Mapping[str, tuple[tuple[str, ...], float]]] = {
    "help": (("--help",), 0.15),
    "validate": (("validate", "-c", "{file}"), 0.25),
    "status": (("status", "-c", "{file}"), 0.3),
    "query": (("query", "select count(*) from bench_ticking.t1", "-c", "{file}"), 0.5),
    "tail": (("tail", "bench_ticking.t1", "-n", "5", "-c", "{file}"), 0.3),
    "doctor": (("doctor", "-c", "{file}"), 0.6),
}
"""Name in the figures → arguments of `cdc`, and the limit in seconds."""
JOBS: Final[Mapping[str, tuple[tuple[str, ...], float]]] = {
    "backfill_500_rows": (("backfill", "bench_ticking.t1", "--keys", "1..500", "--wait", "-c", "{file}"), 1.5),
    "replay_5000_rows": (("replay", "lake", "-c", "{file}"), 3.0),
    "verify_7_tables": (("verify", "-c", "{file}"), 3.0),
}
RESTART_LIMITS: Final = {"reader": 1.0, "apply": 2.0, "standby": 5.0}
TABLES: Final = 7
TABLE_ROWS: Final = 715
"""Rows of a table: a replay of all tables has 5,000."""
RATE: Final = 200
"""Changes per second over all tables, while processes are killed."""
REPEATS, QUICK_REPEATS = 5, 2
"""How often a command is run, and a process killed, in one run; the median counts."""
IDLE_AFTER, QUICK_IDLE_AFTER = 45.0, 5.0
IDLE_SECONDS, QUICK_IDLE_SECONDS = 60.0, 5.0
STANDBY_AFTER: Final = 10.0
"""Seconds after which a second reader waits for the slot."""
LOOK_EVERY: Final = 0.02
DEMO_TIMEOUT: Final = 300.0
SUITE_TIMEOUT: Final = 7_200.0


def run(*, quick: bool, runs: int = 0, parts: Sequence[str] = ()) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    figures = empty_figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            values: dict[str, float] = {}
            if "demo" in parts:
                values |= _demos(folder / f"demo{number}")
            if {"commands", "jobs", "restart", "idle"} & set(parts):
                values |= _pipeline(folder / f"pipeline{number}", parts, quick=quick)
            if "standby" in parts:
                values["restart.standby"] = _standby(folder / f"standby{number}")
            if "suite" in parts and number == 0:
                values["suite_seconds"] = _suite()
            for key, value in values.items():
                figures[key].values.append(value)
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        **{
            f"{kind}.first_{what}": Figure("s", at_most=limit)
            for kind, limits in DEMO_LIMITS.items()
            for what, limit in zip(FIRST, limits, strict=True)
        },
        **{f"restart.{process}": Figure("s", at_most=limit) for process, limit in RESTART_LIMITS.items()},
        **{f"command.{name}": Figure("s", at_most=limit) for name, (_, limit) in COMMANDS.items()},
        **{f"job.{name}": Figure("s", at_most=limit) for name, (_, limit) in JOBS.items()},
        "idle.pss_mib": Figure("MiB", at_most=350),
        "idle.cores": Figure("cores", at_most=0.02),
        "idle.wakeups": Figure("1/s", at_most=10),
        "suite_seconds": Figure("s", at_most=600),
    }


def _demos(folder: Path) -> dict[str, float]:
    """Run three demos with the same caches: the first is cold, the second fills what is left, the third is warm."""
    folder.mkdir(mode=0o755)
    caches = {"NUMBA_CACHE_DIR": f"{folder}/numba", "PYTHONPYCACHEPREFIX": f"{folder}/python"}
    seen = [_demo(folder / f"shop{number}", caches) for number in range(3)]
    return {f"{kind}.first_{what}": seconds for kind, times in zip(("cold", "warm"), (seen[0], seen[2]), strict=True)
            for what, seconds in times.items()}  # fmt: skip


def _demo(folder: Path, caches: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds from the start of a demo to each of FIRST."""
    folder.mkdir(mode=0o755)
    demo = DemoFiles(folder / ".cdc-demo")
    looks: Mapping[str, Callable[[], bool]] = {
        "log": demo.log_has_rows,
        "delta": demo.lake_has_rows,
        "search": demo.index_has_rows,
        "live_change": demo.lake_has_live_change,
    }
    seconds: dict[str, float] = {}
    with (folder / "demo.out").open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "cdc", "demo"], cwd=folder, env=os.environ | caches, stdout=output, stderr=output
        )
        try:
            while len(seconds) < len(looks):
                for what in looks.keys() - seconds:
                    with suppress(CdcError, DeltaError, OSError, ValueError):  # the files are not there yet
                        if looks[what]():
                            seconds[what] = time.monotonic() - began
                if process.poll() is not None or time.monotonic() - began > DEMO_TIMEOUT:
                    text = (folder / "demo.out").read_text(encoding="utf-8")[-3000:]
                    raise RuntimeError(f"the demo showed only {', '.join(seconds) or 'nothing'}: {text}")
                time.sleep(LOOK_EVERY)
        finally:
            _end_demo(process)
    return seconds


def _end_demo(process: subprocess.Popen[bytes]) -> None:
    """End a demo at once, as a second ^C does."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            return
    process.wait(60.0)


class DemoFiles:
    """What the files of a running demo contain, as any other program could read them."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._live_change: Position | None = None
        """Position of the first change that is no copied row, once the log has it."""

    def log_has_rows(self) -> bool:
        """Return whether the log has a copied row."""
        return self._first_position({Operation.READ}) is not None

    def lake_has_rows(self) -> bool:
        """Return whether a published Delta table has a row."""
        record = self._published()
        targets = [] if record is None else [table.target for table in record.tables.values()]
        adds = [DeltaTable(target).get_add_actions(flatten=True) for target in targets]
        return any(sum(pa.table(added)["num_records"].to_pylist()) for added in adds)

    def index_has_rows(self) -> bool:
        """Return whether the search index has a row of a published table."""
        index = self._state / "search"
        record, searcher = SearchIndex.open(index).published, tantivy.Index.open(str(index)).searcher()
        relations = () if record is None else record.tables
        return any(searcher.search(rows_of(layout(), relation), limit=1).hits for relation in relations)

    def lake_has_live_change(self) -> bool:
        """Return whether the published cut has a change of the workload."""
        if self._live_change is None:
            self._live_change = self._first_position({Operation.CREATE, Operation.UPDATE, Operation.DELETE})
        record = self._published()
        return record is not None and self._live_change is not None and record.position >= self._live_change

    def _published(self) -> Published | None:
        return Lake.open(f"{self._state}/lake/{{schema}}/{{table}}").published()

    def _first_position(self, operations: set[Operation]) -> Position | None:
        """Return the position of the first row with one of the operations; None without one."""
        log = LogReader(self._state / "log")
        upto = log.durable or Position(0)
        for file in log.files(Position(0), upto):
            rows = read_file(file, Position(0), upto, ["position", "op"])
            chosen = rows.filter(pc.is_in(rows["op"], pa.array([name.value for name in operations])))
            if chosen.num_rows:
                return Position(pc.min(chosen["position"]).as_py())
        return None


def _pipeline(folder: Path, parts: Sequence[str], *, quick: bool) -> dict[str, float]:
    """Measure commands, jobs, restarts and the idle pipeline with one `cdc run`."""
    values: dict[str, float] = {}
    repeats = QUICK_REPEATS if quick else REPEATS
    folder.mkdir(mode=0o755)
    with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
        work = workloads.ticking(TABLES, TABLE_ROWS)
        pipeline = Pipeline(server.dsn(), folder / "cdc", work, Setting(has_search=True))
        with pipeline.running(TABLES, idle_after=QUICK_IDLE_AFTER if quick else IDLE_AFTER):
            if "idle" in parts:
                used = pipeline.used(QUICK_IDLE_SECONDS if quick else IDLE_SECONDS)["pipeline"]
                values |= {"idle.pss_mib": used.pss_mib, "idle.cores": used.cores, "idle.wakeups": used.wakeups}
            for kind, commands in (("command", COMMANDS), ("job", JOBS)):
                for name, (arguments, _) in commands.items() if f"{kind}s" in parts else ():
                    seconds = [_seconds_of(arguments, pipeline.definition) for _ in range(repeats)]
                    values[f"{kind}.{name}"] = median(seconds)
            if "restart" in parts:
                with pipeline.under_load(RATE, TABLES):
                    time.sleep(2.0)
                    for role, progress in (("reader", _durable), ("apply", _published)):
                        seconds = [_seconds_after_kill(pipeline, role, progress) for _ in range(repeats)]
                        values[f"restart.{role}"] = median(seconds)
    return values


def _seconds_of(arguments: Sequence[str], definition: Path) -> float:
    """Return the seconds of a command, from the start of its process to its exit."""
    command = [sys.executable, "-m", "cdc", *(argument.format(file=definition) for argument in arguments)]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    seconds = time.perf_counter() - began
    advice = {ExitCode.FINDING.value} if arguments[0] in {"doctor", "status"} else set[int]()
    if done.returncode not in {ExitCode.OK.value, *advice}:
        raise RuntimeError(f"cdc {arguments[0]} ended with status {done.returncode}: {done.stdout[-2000:]}")
    return seconds


def _seconds_after_kill(pipeline: Pipeline, role: str, progress: Callable[[Pipeline], Position]) -> float:
    """Kill a process; return the seconds until its successor has made progress.

    The pipeline gets some seconds for itself afterwards, so that its supervisor restarts the process at once again.
    """
    pid = pid_of(pipeline.pid, role)
    assert pid is not None
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), 10, pause=0.001)
    before = progress(pipeline)
    until(lambda: progress(pipeline) > before, 60, pause=0.01)
    seconds = time.monotonic() - began
    time.sleep(10.0)
    return seconds


def _durable(pipeline: Pipeline) -> Position:
    return LogReader(pipeline.log).durable or Position(0)


def _published(pipeline: Pipeline) -> Position:
    record = pipeline.published()
    return Position(0 if record is None else record.position)


def _standby(folder: Path) -> float:
    """Kill a reader while a second one waits for its slot; return the seconds until that one has made progress."""
    folder.mkdir(mode=0o755)
    with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
        work = workloads.ticking(TABLES, TABLE_ROWS)
        prepare(server.dsn(), *work.setup)
        (folder / "cdc").mkdir()
        place = ReaderPlace("standby", folder / "cdc", server.dsn(), f"{work.schema}.*", "standby_pub")
        with _killed_reader(place) as first:
            until(place.has_copied, 120)
            with Reader(place) as second, under_load(server.dsn(), work.schema, RATE / TABLES):
                time.sleep(STANDBY_AFTER)
                began = time.monotonic()
                first.kill()
                first.wait()
                before = place.durable or Position(0)
                until(lambda: second.runs() and (place.durable or Position(0)) > before, 60, pause=0.01)
                return time.monotonic() - began


@contextmanager
def _killed_reader(place: ReaderPlace) -> Iterator[subprocess.Popen[bytes]]:
    """Run a reader inside the block, which may kill it."""
    with running_module(place.folder / "first.out", "cdc", "reader", "-c", str(place.write())) as process:
        yield process


def _suite() -> float:
    """Return the seconds of all default tests. Raises RuntimeError if one fails."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], stdout=subprocess.PIPE, text=True, check=False,
                          timeout=SUITE_TIMEOUT)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the tests ended with status {done.returncode}: {json.dumps(done.stdout[-2000:])}")
    return time.monotonic() - began
