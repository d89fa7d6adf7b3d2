"""Freshness: commit in Postgres → visible in Delta, under a load that does not let up, through a `cdc run`.

A change is visible when the published record that has it stands on disk: before, no reader of the sink sees it. When
that was is told by the record's own Delta log; when the change was committed, and where it lies, by the change log.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import load_definition
from cdc.errors import ExitCode
from cdc.log.reader import LogReader
from cdc.log_row import HEARTBEAT_PREFIX, Operation
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres import logical_messages
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import Published, TargetState
from tests.benchmarks import workloads
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import (
    SOURCE_SETTINGS,
    ReaderPlace,
    connections_for,
    prepare,
    running_module,
    under_load,
    until,
)
from tests.benchmarks.processes import memory_mib, processes_of
from tests.benchmarks.publications import Publications

PARTS: Final = ("small", "large", "tables", "10k", "1m", "10m", "50m")
QUICK_PARTS: Final = PARTS[:3]
SMALL, LARGE, QUICK_LARGE = 10_000, 1_000_000, 20_000
"""Rows of the largest table of TPC-B."""
STEADY: Final = {"10k": SMALL, "1m": LARGE, "10m": 10_000_000, "50m": 50_000_000}
"""Part → rows of its largest table, for the parts with STEADY_RATE."""
MEASURED_ONCE: Final = {"10m", "50m"}
"""The parts that are measured in the first run only."""
QUICK_STEADY: Final = 40_000
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 60.0, 5.0, 20.0, 1.0
"""Of load that is measured, and before it."""
RATE: Final = 1_000.0
"""Transactions per second over four tables; a transaction has four changes."""
STEADY_RATE: Final = 125.0
"""Transactions per second of the parts in STEADY: each updates four rows of the large table, with random keys."""
REACHED: Final = 0.95
"""Of the rate, at least: under less load a target is fresher than it says."""
TABLES, TABLE_ROWS, QUICK_TABLES = 50, 10_000, 5
TARGETS: Final = {
    "small": "target_10k",
    "large": "target_1m",
    "tables": "50_tables",
    "10k": "target_10k_at_500",
    "1m": "target_1m_at_500",
    "10m": "target_10m",
    "50m": "target_50m",
}
"""In the names of figures, also where there are fewer rows."""
LOOK_EVERY: Final = 0.5
"""Seconds between two looks at how the sink is slowed down; the apply process tells it as often."""
_CHANGES: Final = pa.array([Operation.CREATE.value, Operation.UPDATE.value, Operation.DELETE.value])


def run(
    *, quick: bool, rows: int = 0, seconds: float = 0, runs: int = 0, parts: Sequence[str] = ()
) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key); parts that are not asked for stay unmeasured."""
    spell = Spell(seconds or (QUICK_SECONDS if quick else SECONDS), QUICK_WARM if quick else WARM)
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    tables = QUICK_TABLES if quick else TABLES
    accounts = {
        "small": SMALL,
        "large": rows or (QUICK_LARGE if quick else LARGE),
        **{part: QUICK_STEADY if quick else number for part, number in STEADY.items()},
    }
    figures = empty_figures(tables)
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            for part in parts:
                if part in MEASURED_ONCE and number:
                    continue
                ticking = part == "tables"
                work = workloads.ticking(tables, TABLE_ROWS) if ticking else _workload(part, accounts[part])
                # a server of its own each time: what one load leaves behind is no business of the next
                with EmbeddedPostgres(
                    folder / f"{part}{number}", version=18, settings=SOURCE_SETTINGS, tcp=True
                ) as server:
                    rate = 1.0 if ticking else _rate(part)
                    committed = float(tables) if ticking else rate
                    measured = Measurement(server.dsn(), folder / f"{part}{number}-cdc", work, committed)
                    for what, value in measured.of(spell, rate).items():
                        figures[_key(what, part)].values.append(value)
    return runs, figures


def _workload(part: str, rows: int) -> workloads.Workload:
    return workloads.random_keys(rows) if part in STEADY else workloads.tpcb(0, rows)


def empty_figures(tables: int = TABLES) -> dict[str, Figure]:
    """Return the figures without values; tables: how many of them a transaction a second goes into."""
    bars = {
        "small": (800, 2_000),
        "large": (800, 2_000),
        "tables": (2_500, None),
        "10k": (250, 1_000),
        "1m": (250, 1_000),
        "10m": (300, 1_000),
        "50m": (400, 1_000),
    }
    figures = {}
    for part, (middle, tail) in bars.items():
        reached = REACHED * (tables if part == "tables" else _rate(part))
        for what, figure in {
            "p50_ms": Figure("ms", at_most=middle),
            "p99_ms": Figure("ms", at_most=tail),
            "rows_differing": Figure("rows", at_most=0, in_every_run=True),
            "transactions_per_second": Figure("tx/s", at_least=reached, in_every_run=True),
            "batches_per_second": Figure("1/s"),
            "longest_cadence_seconds": Figure("s"),
            "apply_mib": Figure("MiB", at_most=1_536),
            "jvm_mib": Figure("MiB"),
        }.items():
            figures[_key(what, part)] = figure
    return figures


def _rate(part: str) -> float:
    return STEADY_RATE if part in STEADY else RATE


def _key(what: str, part: str) -> str:
    if not what.endswith("_ms"):
        return f"{what}.{TARGETS[part]}"
    return f"delta_{TARGETS[part]}_{what}" if part == "tables" else f"delta_{what}.{TARGETS[part]}"


@dataclass(frozen=True, slots=True)
class Spell:
    """How long the load lasts."""

    seconds: float
    """While it is measured."""
    before: float
    """Until it is."""


class Measurement:
    """One load on one server, and a pipeline with one Delta sink behind it."""

    def __init__(self, dsn: str, folder: Path, load: workloads.Workload, transactions: float) -> None:
        """transactions: how many the load commits per second."""
        self._dsn, self._folder, self._load, self._transactions = dsn, folder, load, transactions
        folder.mkdir()
        self._sink = f"{folder}/lake/{{schema}}/{{table}}"
        more = [
            f"sinks: [{{type: delta, name: lake, path: '{self._sink}'}}]",
            "service: {port: 0}",
        ]
        self._place = ReaderPlace("fresh", folder, dsn, f"{load.schema}.*", "fresh_pub", "\n".join(more))
        self._publications = Publications(self._sink)

    def of(self, spell: Spell, rate: float) -> Mapping[str, float]:
        """Figures of all transactions that committed while the load was measured, and of the rows in the end."""
        tables = self._made()
        command = ("cdc", "run", "-c", str(self._place.write()))
        with running_module(self._folder / "run.out", *command) as process:
            until(lambda: _runs(process) and self._streams(tables), 1_800, pause=0.2)
            first = self._durable()
            with under_load(self._dsn, self._load.schema, rate, connections=connections_for(self._transactions)):
                began = time.time() + spell.before
                cadence = self._longest_cadence(began, began + spell.seconds)
                ended = time.time()
            end = self._end()
            until(lambda: _runs(process) and self._published() >= end, 300)
            lags, batches = self._measured(first, began, ended)
            memory = defaultdict[str, float](float)
            for role, place in processes_of(process.pid):
                memory[role] += memory_mib(place, "RssAnon")
            differing = self._differing(tables)
        with connect(self._dsn) as conn:
            drop_slot(conn, self._place.slot)
        shutil.rmtree(self._folder)
        cuts = quantiles(lags, n=100)
        return {
            "p50_ms": cuts[49] * 1e3,
            "p99_ms": cuts[98] * 1e3,
            "rows_differing": differing,
            "transactions_per_second": len(lags) / (ended - began),
            "batches_per_second": batches / (ended - began),
            "longest_cadence_seconds": cadence,
            "apply_mib": memory["apply"],
            "jvm_mib": memory["jvm"],
        }

    def _made(self) -> int:
        """The tables of the load_definition, and how many they are."""
        prepare(self._dsn, *self._load.setup)
        with connect(self._dsn) as conn:
            row = conn.execute("SELECT count(*) FROM pg_tables WHERE schemaname = %s", [self._load.schema]).fetchone()
        assert row is not None
        return int(row[0])

    def _record(self) -> Published | None:
        self._publications.look()
        return Lake.open(self._sink).published()

    def _published(self) -> Position:
        record = self._record()
        return Position(0 if record is None else record.position)

    def _streams(self, tables: int) -> bool:
        """Whether every table was copied, and all that the log holds is published."""
        record = self._record()
        streaming = [] if record is None else [t for t in record.tables.values() if t.state == TargetState.STREAMING]
        if record is None or len(streaming) < tables:
            return False
        return record.position >= self._durable()

    def _longest_cadence(self, asked: float, end: float) -> float:
        """Wait; the most seconds between two batches that the sink was held to from then to the end, 0 if to none."""
        longest = 0.0
        with Catalog.open(
            load_definition(self._place.folder / "definition.yaml").catalog.url, migrate=False
        ) as catalog:
            while (now := time.time()) < end:
                self._publications.look()
                if now >= asked:
                    longest, asked = max(longest, _cadence(catalog, self._place.name)), now + LOOK_EVERY
                time.sleep(LOOK_EVERY / 10)
        return longest

    def _differing(self, tables: int) -> int:
        """Rows that differ between the source and the targets, by `cdc verify` over all of them."""
        definition = str(self._place.folder / "definition.yaml")
        command = [sys.executable, "-m", "cdc", "verify", "-c", definition, "--timeout", "300", "--json"]
        verified = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if verified.returncode not in {ExitCode.OK.value, ExitCode.FINDING.value}:
            raise RuntimeError(f"cdc verify ended with status {verified.returncode}")
        found = json.loads(verified.stdout.splitlines()[-1])["result"]["tables"]
        if len(found) != tables:
            raise RuntimeError(f"cdc verify compared {len(found)} tables: expected {tables}")
        return sum(_differing_of(table) for table in found)

    def _end(self) -> Position:
        with connect(self._dsn) as conn:
            row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            logical_messages.emit_message(conn, HEARTBEAT_PREFIX, "benchmark")
        assert row is not None
        end = Lsn.parse(row[0])
        until(lambda: self._durable().lsn >= end, 120)
        return self._durable()

    def _durable(self) -> Position:
        return LogReader(self._place.log).durable or Position(0)

    def _measured(self, first: Position, began: float, ended: float) -> tuple[list[float], int]:
        """(seconds of each transaction that committed meanwhile, batches that were published meanwhile).

        first: where the log ended before the load.
        """
        self._publications.look()
        moments, positions = self._publications.moments()
        committed: dict[int, float] = {}
        for rows in LogReader(self._place.log).rows(first, self._durable()):
            chosen = rows.filter(pa.compute.is_in(rows["op"], _CHANGES))
            times = chosen["committed_at"].cast(pa.int64()).to_numpy() / 1e6
            committed |= dict(zip(chosen["position"].to_pylist(), times.tolist(), strict=True))
        wanted = [(p, at) for p, at in committed.items() if began <= at <= ended]
        places = np.searchsorted(positions, [p for p, _ in wanted])
        lags = [float(moments[place] - at) for place, (_, at) in zip(places, wanted, strict=True)]
        batches = len(np.unique(positions[(moments >= began) & (moments <= ended)]))
        return lags, batches


def _cadence(catalog: Catalog, pipeline: str) -> float:
    """Seconds between two batches as the apply process tells them, from which `cdc status` has its line as well."""
    told = [process.figures for process in catalog.processes.ls(pipeline) if process.process == "apply"]
    return max((value for figures in told for name, _, value in figures if name == metrics.CADENCE.name), default=0.0)


def _differing_of(table: Mapping[str, Any]) -> int:
    """Rows of one verdict of `cdc verify`; a table that was not compared differs, and so do rows that are parked."""
    found = sum(table["counts"].values()) or abs(table["rows"] - table["target_rows"])
    return int(table["parked"] + (0 if table["equal"] else max(1, found)))


def _runs(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"cdc run ended with status {process.returncode}")
    return True
