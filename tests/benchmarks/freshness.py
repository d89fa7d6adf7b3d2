"""Freshness: commit in Postgres → visible in Delta, under a load that does not let up, with real processes.

A change is visible when the published record that has it stands on disk: before, no reader of the sink sees it. When
that was is told by the record's own Delta log; when the change was committed, and where it lies, by the change log.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from threading import Event
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.change import HEARTBEAT_PREFIX, Operation
from cdc.log.read import LogReader
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres import heartbeat
from cdc.postgres.connection import connect
from cdc.postgres.embedded import EmbeddedPostgres
from cdc.postgres.slot import drop_slot
from cdc.stores.lake import Lake
from tests.benchmarks import workloads
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import Reader, ReaderPlace, until
from tests.benchmarks.snapshot import SETTINGS

PARTS: Final = ("small", "large", "tables")
SMALL, LARGE, QUICK_LARGE = 10_000, 1_000_000, 20_000
"""Rows of the largest table of TPC-B."""
SECONDS, QUICK_SECONDS, WARM = 60.0, 5.0, 5.0
"""Of load that is measured, and before it."""
RATE: Final = 1_000.0
"""Transactions per second over four tables."""
TABLES, TABLE_ROWS, QUICK_TABLES = 50, 10_000, 5
_CHANGES: Final = pa.array([Operation.CREATE.value, Operation.UPDATE.value, Operation.DELETE.value])


def run(
    *, quick: bool, rows: int = 0, seconds: float = 0, runs: int = 0, parts: Sequence[str] = PARTS
) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key); parts that are not asked for stay unmeasured."""
    seconds, runs = seconds or (QUICK_SECONDS if quick else SECONDS), runs or (1 if quick else 3)
    large = rows or (QUICK_LARGE if quick else LARGE)
    figures = _figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            for part in parts:
                tables = (QUICK_TABLES if quick else TABLES) if part == "tables" else 0
                load = workloads.ticking(tables, TABLE_ROWS) if tables else workloads.tpcb(0, _accounts(part, large))
                # a server of its own each time: what one load leaves behind is no business of the next
                with EmbeddedPostgres(folder / f"{part}{number}", version=18, settings=SETTINGS) as server:
                    measured = Measurement(server.dsn(), folder / f"{part}{number}-cdc", load)
                    for key, value in measured.lags(seconds, 1.0 if tables else RATE).items():
                        figures[f"{part}.{key}"].values.append(value)
    return runs, figures


def _accounts(part: str, large: int) -> int:
    return SMALL if part == "small" else large


def _figures() -> dict[str, Figure]:
    bars = {"small": (0.8, 2.0), "large": (0.8, 2.0), "tables": (2.5, None)}
    figures = {}
    for part, (middle, tail) in bars.items():
        figures[f"{part}.p50"] = Figure("s", at_most=middle)
        figures[f"{part}.p99"] = Figure("s", at_most=tail)
        figures[f"{part}.transactions_per_second"] = Figure("tx/s")
        figures[f"{part}.batches_per_second"] = Figure("1/s")
    return figures


class Measurement:
    """One load on one server, and a pipeline with one Delta sink behind it."""

    def __init__(self, dsn: str, folder: Path, load: workloads.Workload) -> None:
        self._dsn, self._folder, self._load = dsn, folder, load
        folder.mkdir()
        more = [
            f"sinks: [{{type: delta, name: lake, path: '{folder}/lake/{{schema}}/{{table}}'}}]",
            "service: {port: 0}",
        ]
        self._place = ReaderPlace("fresh", folder, dsn, f"{load.schema}.*", "fresh_pub", "\n".join(more))

    def lags(self, seconds: float, rate: float) -> Mapping[str, float]:
        """p50 and p99 of all transactions that committed while the load was measured, and how many there were."""
        with connect(self._dsn) as conn:
            for statement in self._load.setup:
                conn.execute(statement.encode())
        with Reader(self._place) as reader, _apply(self._place):
            until(lambda: reader.runs() and self._published() > 0 and self._current(), 600, pause=0.2)
            with self._under_load(rate):
                began = time.time() + WARM
                until(lambda: time.time() > began + seconds, seconds + WARM + 60)
                ended = time.time()
            end = self._end()
            until(lambda: reader.runs() and self._published() >= end, 300, pause=0.1)
        with connect(self._dsn) as conn:
            drop_slot(conn, self._place.slot)
        found, batches = self._measured(began, ended)
        shutil.rmtree(self._folder)
        cuts = quantiles(found, n=100)
        return {
            "p50": cuts[49],
            "p99": cuts[98],
            "transactions_per_second": len(found) / (ended - began),
            "batches_per_second": batches / (ended - began),
        }

    def _published(self) -> Position:
        record = Lake.open(f"{self._folder}/lake/{{schema}}/{{table}}").published()
        return Position(0 if record is None else record.position)

    def _current(self) -> bool:
        return self._published() >= (LogReader(self._place.log).durable or Position(1 << 62))

    def _end(self) -> Position:
        with connect(self._dsn) as conn:
            row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            heartbeat.emit(conn, HEARTBEAT_PREFIX, "benchmark")
        assert row is not None
        end = Lsn.parse(row[0])
        until(lambda: (LogReader(self._place.log).durable or Position(0)).lsn >= end, 120)
        return LogReader(self._place.log).durable or Position(0)

    @contextmanager
    def _under_load(self, rate: float) -> Iterator[None]:
        stop = Event()

        def work() -> None:
            with connect(self._dsn) as conn:
                conn.execute("SET synchronous_commit = on")
                while not stop.is_set():
                    conn.execute(f"CALL {self._load.schema}.paced(%s, %s)".encode(), [max(1, int(rate / 5)), rate])

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            try:
                yield
            finally:
                stop.set()
                working.result()

    def _measured(self, began: float, ended: float) -> tuple[list[float], int]:
        """(seconds of each transaction that committed meanwhile, batches that were published meanwhile)."""
        seen = sorted(_publications(self._folder / "lake" / "_cdc" / "published"))
        moments, positions = np.array([m for m, _ in seen]), np.array([p for _, p in seen])
        log = LogReader(self._place.log)
        committed: dict[int, float] = {}
        for rows in log.rows(Position(0), log.durable or Position(0)):
            chosen = rows.filter(pa.compute.is_in(rows["op"], _CHANGES))
            times = chosen["committed_at"].cast(pa.int64()).to_numpy() / 1e6
            committed |= dict(zip(chosen["position"].to_pylist(), times.tolist(), strict=True))
        wanted = [(p, at) for p, at in committed.items() if began <= at <= ended]
        places = np.searchsorted(positions, [p for p, _ in wanted])
        found = [float(moments[place] - at) for place, (_, at) in zip(places, wanted, strict=True)]
        return found, int(((moments >= began) & (moments <= ended)).sum())


def _publications(table: Path) -> Iterator[tuple[float, int]]:
    """(when a record stood on disk, the position it says); an older record is visible as long as no later one is."""
    for entry in sorted((table / "_delta_log").glob("*.json")):
        for line in entry.read_text(encoding="utf-8").splitlines():
            action = json.loads(line)
            if "txn" in action:
                yield entry.stat().st_mtime_ns / 1e9, int(action["txn"]["version"])


@contextmanager
def _apply(place: ReaderPlace) -> Iterator[None]:
    """`python -m pipelines apply` beside the reader, which has written the definition."""
    output = place.folder / "apply.out"
    command = [sys.executable, "-m", "pipelines", "apply", "-c", str(place.folder / "definition.yaml")]
    with output.open("ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        yield
    except BaseException:
        print(output.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        wait = partial(process.wait, 60)
        wait()
