"""Capture: the reader into the log against `pg_recvlogical` to /dev/null, and a socket that nobody parses.

All sides get the same WAL with the same options of pgoutput, one after the other, in random order. Each run has three
slots of its own, which exist before the WAL is written; the reader has run once before, and made its log with the
tables as they are then. Two clocks run for each side: one begins when its process is started, the other when its slot
becomes active. The compiled decoder is in the cache of the machine, as after the first start; `start` measures a
machine without it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any, Final

from cdc.log.reader import LogReader
from cdc.log_row import HEARTBEAT_PREFIX, ROW_OPERATIONS
from cdc.lsn import Lsn
from cdc.postgres import logical_messages
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot, slot_status
from tests.benchmarks import kernel, raw_socket, workloads
from tests.benchmarks.commits import lags
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import SOURCE_SETTINGS, Reader, ReaderPlace, prepare, receive_command, until
from tests.benchmarks.workloads import Workload

PARTS: Final = ("drain", "lag", "kernel")
SIDES: Final = ("reader", "pg_recvlogical", "raw_socket")
LAG_SECONDS: Final = 10.0
LAG_RATES: Final = {"lag": 1_000.0, "lag_5000": 5_000.0}
"""Beginning of a figure's key → transactions per second while the lag is measured."""
CONNECTIONS: Final = {"lag": 4, "lag_5000": 16}
"""Beginning of a figure's key → connections that commit them: one waits for the disk at each commit."""
REACHED: Final = 0.95
"""Share of the rate that has to be committed: under less load the lag is shorter."""
KERNEL_ROWS: Final = 200_000
LIMITS: Final = {
    "tpcb": 2.5,
    "insert_300k": 1.9,
    "update_1k": 2.0,
    "wide": 1.2,
    "large": 0.8,
    "tables_1": None,
    "tables_1000": None,
}
"""Workload → least ratio to pg_recvlogical, from the start and from the active slot."""
SIDE_TIMEOUT: Final = 600.0


def run(*, quick: bool, runs: int = 0, parts: Sequence[str] = ()) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or PARTS
    figures = empty_figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
            bench = Bench(server.dsn(), folder, figures)
            if "drain" in parts:
                for key, workload in _workloads(quick=quick):
                    bench.drain(key, workload, runs)
            if "lag" in parts:
                bench.lags(3.0 if quick else LAG_SECONDS, runs)
    if "kernel" in parts:
        for rows, copied in kernel.measure(KERNEL_ROWS, runs):
            figures["kernel_rows_per_second"].values.append(rows)
            figures["memory_copy_gib_per_second"].values.append(copied)
    many, single = (figures[f"ratio_to_pg_recvlogical.active.tables_{count}"].values for count in (1000, 1))
    figures["tables_1000_to_tables_1"].values += [one / other for one, other in zip(many, single, strict=True)]
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    clocks = ("start", "active")
    figures = {
        f"ratio_to_pg_recvlogical.{clock}.{name}": Figure("ratio", at_least=limit)
        for clock in clocks
        for name, limit in LIMITS.items()
    }
    return {
        **figures,
        **{f"share_of_raw_socket.{name}": Figure("ratio") for name in LIMITS},
        "tables_1000_to_tables_1": Figure("ratio", at_least=0.8),
        **{f"seconds_until_active.{side}": Figure("s") for side in SIDES},
        "rss_mib": Figure("MiB", at_most=512),
        "lag_p50_ms": Figure("ms", at_most=60),
        "lag_p99_ms": Figure("ms", at_most=200),
        "lag_5000_p50_ms": Figure("ms", at_most=90),
        "lag_5000_p99_ms": Figure("ms"),
        **{
            f"{key}_transactions_per_second": Figure("1/s", at_least=REACHED * rate, in_every_run=True)
            for key, rate in LAG_RATES.items()
        },
        **{
            f"cpu_seconds_per_million.{clock}.{name}": Figure("s", at_most=2 if name == "tpcb" else None)
            for clock in clocks
            for name in LIMITS
        },
        "kernel_rows_per_second": Figure("rows/s", at_least=2e6),
        "memory_copy_gib_per_second": Figure("GiB/s"),
        **{f"{side}_changes_per_second.{name}": Figure("changes/s") for side in SIDES for name in LIMITS},
    }


def _workloads(*, quick: bool) -> list[tuple[str, Workload]]:
    if quick:
        return [
            ("tpcb", workloads.tpcb(25_000)),
            ("insert_300k", workloads.inserts(60_000)),
            ("update_1k", workloads.updates(60)),
            ("wide", workloads.wide(10_000)),
            ("large", workloads.large(200)),
        ]
    return [
        ("tpcb", workloads.tpcb(250_000)),
        ("insert_300k", workloads.inserts(300_000)),
        ("update_1k", workloads.updates(300)),
        ("wide", workloads.wide(50_000)),
        ("large", workloads.large(1_000)),
        ("tables_1", workloads.many_tables(250_000, 1)),
        ("tables_1000", workloads.many_tables(250_000, 1_000)),
    ]


def order_of_sides(workload: str, number: int) -> list[str]:
    """Return the sides in the order of one run: any order, and the same one when a run is repeated."""
    return Random(f"{workload} {number}").sample(SIDES, len(SIDES))


@dataclass(frozen=True, slots=True)
class Drained:
    """How long a side took to get all changes of its slot, and what it used."""

    from_start: float
    """Seconds since its process was started."""
    from_active: float
    """Seconds since its slot was active."""
    cpu_from_start: float = 0.0
    """CPU seconds of the reader; those of the other sides are not measured."""
    cpu_from_active: float = 0.0
    peak_rss_mib: float = 0.0


class Bench:
    """One server and everything that is measured on it."""

    def __init__(self, dsn: str, folder: Path, figures: Mapping[str, Figure]) -> None:
        self._dsn, self._folder, self._figures = dsn, folder, figures

    def drain(self, key: str, workload: Workload, runs: int) -> None:
        """Let each side get the workload's WAL `runs` times."""
        places = [self._place(workload, f"{workload.name}{number}") for number in range(runs)]
        prepare(self._dsn, *workload.setup)
        for place in places:
            with Reader(place):
                until(place.has_copied, 60)
            for side in SIDES[1:]:
                self._slot(f"{place.name}_{side}")
        prepare(self._dsn, *workload.write)
        end = self._end()
        ways: Mapping[str, Callable[[ReaderPlace, Lsn], Drained]] = {
            "reader": self._reader,
            "pg_recvlogical": self._pg_recvlogical,
            "raw_socket": self._raw_socket,
        }
        for number, place in enumerate(places):
            drained = {side: ways[side](place, end) for side in order_of_sides(key, number)}
            self._note_drained(key, workload, drained)
            self._drop(place.slot, *(f"{place.name}_{side}" for side in SIDES[1:]))
            shutil.rmtree(place.folder)

    def lags(self, seconds: float, runs: int) -> None:
        """Measure the milliseconds from commit to durable of every change, at each rate."""
        workload = workloads.tpcb(0)
        earlier = (
            f"DROP PUBLICATION IF EXISTS {workload.schema}_pub",
            f"DROP SCHEMA IF EXISTS {workload.schema} CASCADE",
        )
        prepare(self._dsn, *earlier, *workload.setup)
        for key, rate in LAG_RATES.items():
            for number in range(runs):
                place = self._place(workload, f"{key}{number}")
                with Reader(place):
                    until(place.has_copied, 60)
                    first = LogReader(place.log).version
                    self._note(f"{key}_transactions_per_second", self._commit(seconds, rate, CONNECTIONS[key]))
                    end = self._end()
                    until(partial(_reached, place, end), 60)
                cuts = quantiles(lags(place.log, ROW_OPERATIONS, after=first), n=100)
                self._note(f"{key}_p50_ms", cuts[49])
                self._note(f"{key}_p99_ms", cuts[98])
                self._drop(place.slot)

    def _note_drained(self, key: str, workload: Workload, drained: Mapping[str, Drained]) -> None:
        ours, peer, raw = (drained[side] for side in SIDES)
        self._note(f"ratio_to_pg_recvlogical.start.{key}", peer.from_start / ours.from_start)
        self._note(f"ratio_to_pg_recvlogical.active.{key}", peer.from_active / ours.from_active)
        self._note(f"share_of_raw_socket.{key}", raw.from_active / ours.from_active)
        self._note("rss_mib", ours.peak_rss_mib)
        self._note(f"cpu_seconds_per_million.start.{key}", ours.cpu_from_start / workload.changes * 1e6)
        self._note(f"cpu_seconds_per_million.active.{key}", ours.cpu_from_active / workload.changes * 1e6)
        for side, seconds in drained.items():
            self._note(f"{side}_changes_per_second.{key}", workload.changes / seconds.from_active)
            self._note(f"seconds_until_active.{side}", seconds.from_start - seconds.from_active)

    def _reader(self, place: ReaderPlace, end: Lsn) -> Drained:
        reader = Reader(place)
        with connect(self._dsn) as conn:
            began = time.perf_counter()
            with reader:
                until(lambda: reader.runs() and not _idle(conn, place.slot), 60, pause=0.002)
                active, before = time.perf_counter(), reader.usage()
                log = LogReader(place.log)
                until(lambda: reader.runs() and _at(log, end), SIDE_TIMEOUT, pause=0.01)
                ended, after = time.perf_counter(), reader.usage()
        return Drained(
            ended - began, ended - active, after.cpu_seconds, after.cpu_seconds - before.cpu_seconds, after.peak_rss_mib
        )

    def _pg_recvlogical(self, place: ReaderPlace, end: Lsn) -> Drained:
        slot = f"{place.name}_pg_recvlogical"
        return self._drain_by(receive_command(self._dsn, slot, place.publication, end), slot)

    def _raw_socket(self, place: ReaderPlace, _end: Lsn) -> Drained:
        slot = f"{place.name}_raw_socket"
        command = [sys.executable, "-m", raw_socket.__name__, self._dsn, slot, place.publication]
        return self._drain_by(command, slot, is_end_printed=True)

    def _drain_by(self, command: Sequence[str], slot: str, *, is_end_printed: bool = False) -> Drained:
        """Run a command that ends when it has got everything.

        is_end_printed: it prints when it got the last change, because its interpreter takes some time to end.
        """
        with connect(self._dsn) as conn:
            began = time.perf_counter()
            with _running(command, self._folder / "side.out") as process:
                until(lambda: _still_runs(process) and not _idle(conn, slot), 60, pause=0.002)
                active = time.perf_counter()
                status = process.wait(SIDE_TIMEOUT)
                ended = time.perf_counter()
        output = (self._folder / "side.out").read_text(encoding="utf-8")
        if status:
            raise RuntimeError(f"{command[0]} ended with status {status}: {output[-2000:]}")
        ended = float(output) if is_end_printed else ended
        return Drained(ended - began, ended - active)

    def _commit(self, seconds: float, rate: float, connections: int) -> float:
        """Commit transactions at a rate, by several connections; return how many per second were committed.

        The server keeps the rate itself, which costs it little.
        """
        number = int(seconds * rate / connections)

        def work() -> None:
            with connect(self._dsn) as conn:
                conn.execute("CALL bench_tpcb.paced(%s, %s)", [number, rate / connections])

        began = time.perf_counter()
        with ThreadPoolExecutor(connections) as pool:
            for worker in [pool.submit(work) for _ in range(connections)]:
                worker.result()
        return number * connections / (time.perf_counter() - began)

    def _place(self, workload: Workload, name: str) -> ReaderPlace:
        folder = self._folder / name
        folder.mkdir()
        return ReaderPlace(name, folder, self._dsn, f"{workload.schema}.*", f"{workload.schema}_pub")

    def _slot(self, name: str) -> None:
        with connect(self._dsn) as conn:
            conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

    def _drop(self, *names: str) -> None:
        with connect(self._dsn) as conn:
            for name in names:
                until(partial(_idle, conn, name), 30)
                drop_slot(conn, name)

    def _end(self) -> Lsn:
        """Return a position behind every change; all sides pass it, because a message follows."""
        with connect(self._dsn) as conn:
            row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            logical_messages.emit_message(conn, HEARTBEAT_PREFIX, raw_socket.END.decode())
        assert row is not None
        return Lsn.parse(row[0])

    def _note(self, key: str, value: float) -> None:
        self._figures[key].values.append(value)


@contextmanager
def _running(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command inside the block, and end it if it still runs afterwards."""
    with output.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"a process ended with status {process.returncode} before its slot was seen active")
    return True


def _idle(conn: Any, slot: str) -> bool:
    status = slot_status(conn, slot)
    return status is None or not status.active


def _reached(place: ReaderPlace, end: Lsn) -> bool:
    return (place.durable or 0) >= end


def _at(log: LogReader, end: Lsn) -> bool:
    log.refresh()
    return (log.durable or 0) >= end
