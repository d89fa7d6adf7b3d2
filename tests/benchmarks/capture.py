"""Capture: the reader into the log against `pg_recvlogical` to /dev/null, over the same fixed WAL.

Every run has its own two slots, all made before the WAL is written; a start of the reader before that
makes its log with the tables as they are then. The clock of both begins when its slot becomes active.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from cdc.log.reader import LogReader
from cdc.log_row import HEARTBEAT_PREFIX, ROW_OPERATIONS
from cdc.lsn import Lsn
from cdc.postgres import logical_messages
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot, slot_status
from tests.benchmarks import kernel, workloads
from tests.benchmarks.commits import lags
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import Reader, ReaderPlace, Usage, execute, receive_to_null, until
from tests.benchmarks.workloads import Workload

SETTINGS = {
    "fsync": "off",
    "wal_level": "logical",
    "max_wal_size": "8GB",
    "shared_buffers": "512MB",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    # decoding what is committed asynchronously waits for the WAL writer: latency is measured with `on`
    "synchronous_commit": "off",
}
LAG_SECONDS = 10.0
LAG_RATES = {"lag": 1_000.0, "lag_5000": 5_000.0}
"""Beginning of a figure's key → transactions per second while the lag is measured."""
KERNEL_ROWS = 200_000


def run(*, quick: bool) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key)."""
    runs = 1 if quick else 3
    figures = _figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        with EmbeddedPostgres(folder / "postgres", version=18, settings=SETTINGS, tcp=True) as server:
            bench = Bench(server.dsn(), folder, figures)
            for key, workload in _workloads(quick=quick):
                bench.ratio(key, workload, runs)
            for key, rate in LAG_RATES.items():
                bench.lag(key, rate, 3.0 if quick else LAG_SECONDS, runs)
    for rows, copied in kernel.measure(KERNEL_ROWS, runs):
        figures["kernel_rows_per_second"].values.append(rows)
        figures["memory_copy_gib_per_second"].values.append(copied)
    ratio = "ratio_to_pg_recvlogical.tables_1"
    pairs = zip(figures[f"{ratio}000"].values, figures[ratio].values, strict=True)
    figures["tables_1000_to_tables_1"].values += [many / one for many, one in pairs]
    return runs, figures


def _figures() -> dict[str, Figure]:
    ratios = {
        "tpcb": 2.5,
        "insert_300k": 1.9,
        "update_1k": 2.0,
        "wide": 1.2,
        "large": 0.8,
        "tables_1": None,
        "tables_1000": None,
    }
    return {
        **{f"ratio_to_pg_recvlogical.{name}": Figure("ratio", at_least=bar) for name, bar in ratios.items()},
        "tables_1000_to_tables_1": Figure("ratio", at_least=0.8),
        "rss_mib": Figure("MiB", at_most=512),
        "lag_p50_ms": Figure("ms", at_most=60),
        "lag_p99_ms": Figure("ms", at_most=200),
        "lag_5000_p50_ms": Figure("ms", at_most=90),
        "lag_5000_p99_ms": Figure("ms"),
        **{f"{key}_transactions_per_second": Figure("1/s") for key in LAG_RATES},
        **{f"cpu_seconds_per_million.{name}": Figure("s", at_most=2 if name == "tpcb" else None) for name in ratios},
        "kernel_rows_per_second": Figure("rows/s", at_least=2e6),
        "memory_copy_gib_per_second": Figure("GiB/s"),
        **{f"changes_per_second.{name}": Figure("changes/s") for name in ratios},
        **{f"pg_recvlogical_changes_per_second.{name}": Figure("changes/s") for name in ratios},
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


class Bench:
    """One server and everything that is measured on it."""

    def __init__(self, dsn: str, folder: Path, figures: Mapping[str, Figure]) -> None:
        self._dsn, self._folder, self._figures = dsn, folder, figures

    def ratio(self, key: str, workload: Workload, runs: int) -> None:
        """Both peers over the workload's WAL, `runs` times each, taking turns."""
        places = [self._place(workload, f"{workload.name}{number}") for number in range(runs)]
        execute(self._dsn, *workload.setup)
        for place in places:
            with Reader(place):
                until(place.has_copied, 60)
            self._slot(f"{place.name}_peer")
        execute(self._dsn, *workload.write)
        end = self._end()
        for place in places:
            peer = receive_to_null(self._dsn, f"{place.name}_peer", place.publication, end)
            seconds, usage = self._ours(place, end)
            self._note(f"ratio_to_pg_recvlogical.{key}", peer / seconds)
            self._note(f"changes_per_second.{key}", workload.changes / seconds)
            self._note(f"pg_recvlogical_changes_per_second.{key}", workload.changes / peer)
            self._note("rss_mib", usage.peak_rss_mib)
            self._note(f"cpu_seconds_per_million.{key}", usage.cpu_seconds / workload.changes * 1e6)
        for place in places:
            self._drop(place.slot, f"{place.name}_peer")
            shutil.rmtree(place.folder)

    def lag(self, key: str, rate: float, seconds: float, runs: int) -> None:
        """Milliseconds from commit to durable of every change, at `rate` transactions a second."""
        for number in range(runs):
            place = self._place(workloads.tpcb(0), f"{key}{number}")
            with Reader(place):
                until(place.has_copied, 60)
                first = LogReader(place.log).version
                began = time.perf_counter()
                self._trickle(seconds, rate)
                self._note(f"{key}_transactions_per_second", int(seconds * rate) / (time.perf_counter() - began))
                end = self._end()
                until(partial(_reached, place, end), 60)
            cuts = quantiles(lags(place.log, ROW_OPERATIONS, after=first), n=100)
            self._note(f"{key}_p50_ms", cuts[49])
            self._note(f"{key}_p99_ms", cuts[98])
            self._drop(place.slot)

    def _ours(self, place: ReaderPlace, end: Lsn) -> tuple[float, Usage]:
        with Reader(place) as reader, connect(self._dsn) as conn:
            until(lambda: not _idle(conn, place.slot), 60, pause=0.002)
            began, before = time.perf_counter(), reader.usage()
            log = LogReader(place.log)
            until(lambda: _at(log, end), 600, pause=0.01)
            seconds, after = time.perf_counter() - began, reader.usage()
        return seconds, Usage(after.cpu_seconds - before.cpu_seconds, after.peak_rss_mib)

    def _trickle(self, seconds: float, rate: float) -> None:
        """Transactions at this rate, committed synchronously; paced by the server itself, which costs it little."""
        with connect(self._dsn) as conn:
            conn.execute("SET synchronous_commit = on")
            conn.execute("CALL bench_tpcb.paced(%s, %s)", [int(seconds * rate), rate])

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
        """A place behind every change; the heartbeat behind it makes both peers pass it."""
        with connect(self._dsn) as conn:
            row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            logical_messages.emit_message(conn, HEARTBEAT_PREFIX, "benchmark")
        assert row is not None
        return Lsn.parse(row[0])

    def _note(self, key: str, value: float) -> None:
        self._figures[key].values.append(value)


def _idle(conn: Any, slot: str) -> bool:
    status = slot_status(conn, slot)
    return status is None or not status.active


def _reached(place: ReaderPlace, end: Lsn) -> bool:
    return (place.durable or 0) >= end


def _at(log: LogReader, end: Lsn) -> bool:
    log.refresh()
    return (log.durable or 0) >= end
