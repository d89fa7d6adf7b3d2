"""Cost: CPU, memory and wake-ups of every process of a running pipeline, under loads that it easily keeps up with.

`cdc run` starts reader, apply process and server. The load is a constant number of changes per second over some
tables. CPU comes from /proc and counts all threads and children; the server that runs Postgres is not counted. The part
`7_tables_search` has a Delta sink and a local search index, and like the others no JVM; `7_tables_spark` has the
Delta sink and `spark.engine: spark`. The part `reader` is the reader alone, at one thousand transactions of four
changes a second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from cdc.config import EngineChoice
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.benchmarks import cost_many_tables, workloads
from tests.benchmarks.cost_pipeline import Pipeline, Setting
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import SOURCE_SETTINGS, Reader, ReaderPlace, connections_for, prepare, under_load, until
from tests.benchmarks.processes import ROLES

PARTS: Final = ("7_tables", "7_tables_search", "7_tables_spark", "1_table", "100_tables", "1000_tables", "reader")
QUICK_PARTS: Final = ("7_tables", "reader")
TABLES: Final = {"7_tables": 7, "7_tables_search": 7, "7_tables_spark": 7, "1_table": 1, "100_tables": 100}
SETTINGS: Final = {
    "7_tables_search": Setting(has_search=True),
    "7_tables_spark": Setting(engine=EngineChoice.SPARK),
}
"""Part → its setting, if that is not the default."""
RATES: Final = (0, 10, 200, 2_000)
"""Changes per second over all tables."""
REACHED: Final = 0.95
"""Share of the rate that has to be committed: under less load less is used."""
TABLE_ROWS: Final = 2_000
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 40.0, 5.0, 20.0, 3.0
"""Seconds that are measured for each rate, and seconds of the load before."""
IDLE_AFTER: Final = 45.0
"""Seconds after the first copy: the streaming query that copied large tables has stopped by then."""
READER_RATE: Final = 1_000.0
"""Transactions per second for the reader alone."""
LIMITS: Final = {
    ("7_tables", 0): 0.03,
    ("7_tables", 10): 0.10,
    ("7_tables", 200): 0.35,
    ("7_tables_search", 200): 0.35,
    ("7_tables_spark", 200): 0.35,
}


def run(*, quick: bool, seconds: float = 0, runs: int = 0, parts: Sequence[str] = ()) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    measured, warm = seconds or (QUICK_SECONDS if quick else SECONDS), QUICK_WARM if quick else WARM
    figures = empty_figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            if "reader" in parts:
                with EmbeddedPostgres(
                    folder / f"reader{number}", version=18, settings=SOURCE_SETTINGS, tcp=True
                ) as server:
                    alone = _reader_alone(server.dsn(), folder / f"reader{number}-cdc", warm, measured)
                figures["cores.reader_1000"].values.append(alone)
            if "1000_tables" in parts:
                many = folder / f"many{number}"
                many.mkdir(mode=0o755)
                cost_many_tables.measure(many, figures, quick=quick)
            for part in [part for part in parts if part in TABLES]:
                work = workloads.ticking(TABLES[part], TABLE_ROWS)
                with EmbeddedPostgres(
                    folder / f"{part}{number}", version=18, settings=SOURCE_SETTINGS, tcp=True
                ) as server:
                    pipeline = Pipeline(server.dsn(), folder / f"{part}{number}-cdc", work, SETTINGS.get(part))
                    with pipeline.running(TABLES[part], idle_after=3.0 if quick else IDLE_AFTER):
                        for rate in RATES:
                            with pipeline.under_load(rate, TABLES[part]):
                                time.sleep(warm)
                                began = time.time()
                                used = pipeline.used(measured)
                                ended = time.time()
                            if rate:
                                until(partial(pipeline.is_streaming, TABLES[part]), 600)
                                figures[f"seconds_behind.{rate}.{part}"].values.append(time.time() - ended)
                                reached = pipeline.changes_per_second(began, ended)
                                figures[f"changes_per_second.{rate}.{part}"].values.append(reached)
                            for role, usage in used.items():
                                case = f"{role}_{_rate(rate)}.{part}"
                                figures[f"cores.{case}"].values.append(usage.cores)
                                figures[f"rss_mib.{case}"].values.append(usage.rss_mib)
                                figures[f"pss_mib.{case}"].values.append(usage.pss_mib)
                                figures[f"wakeups.{case}"].values.append(usage.wakeups)
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    figures = {**cost_many_tables.figures(), "cores.reader_1000": Figure("cores", at_most=0.25)}
    for part in TABLES:
        for rate in RATES[1:]:
            key = f"changes_per_second.{rate}.{part}"
            figures[key] = Figure("changes/s", at_least=REACHED * rate, in_every_run=True)
            figures[f"seconds_behind.{rate}.{part}"] = Figure("s")
        for rate in RATES:
            for role in ("pipeline", *ROLES):
                limit = LIMITS.get((part, rate)) if role == "pipeline" else None
                figures[f"cores.{role}_{_rate(rate)}.{part}"] = Figure("cores", at_most=limit)
                figures[f"rss_mib.{role}_{_rate(rate)}.{part}"] = Figure("MiB")
                figures[f"pss_mib.{role}_{_rate(rate)}.{part}"] = Figure("MiB")
                figures[f"wakeups.{role}_{_rate(rate)}.{part}"] = Figure("1/s")
    return figures


def _reader_alone(dsn: str, folder: Path, warm: float, seconds: float) -> float:
    """Return the cores that a reader without other processes uses at READER_RATE."""
    work = workloads.tpcb(0)
    folder.mkdir()
    prepare(dsn, *work.setup)
    place = ReaderPlace("alone", folder, dsn, f"{work.schema}.*", "alone_pub")
    with Reader(place) as reader:
        until(place.has_copied, 60)
        with under_load(dsn, work.schema, READER_RATE, connections=connections_for(READER_RATE)):
            time.sleep(warm)
            before, began = reader.usage().cpu_seconds, time.monotonic()
            time.sleep(seconds)
            return (reader.usage().cpu_seconds - before) / (time.monotonic() - began)


def _rate(rate: int) -> str:
    return str(rate) if rate else "idle"
