"""Scale: a log with many changes waiting, applied by Spark on one and two workers, and by the apply process alone.

Both sides of a ratio apply the same changes from a log on this disk to a new lake on this disk, cold: a process is
started, applies what waits and ends, and its seconds include the start of its JVMs. The sides follow each other in
random order. After each the rows of the lake are compared with the rows that the changes leave.

For `speedup_2_workers_running` the same changes arrive at an apply process whose streaming query runs: it has applied
their first commit. The clock starts when the other commits appear in the log, and stops when they are published.

Workers are those of Spark's standalone cluster, each with one executor and one core of this machine, on which the
kernel keeps all of its processes. Otherwise a single worker would use more than one: its JVM and its Python work at the
same time. Driver and master run on any core, so two workers share both with them.

`driver_share` counts what came to the driver: the results of all tasks (`Result Size` in Spark's event log), and the
bytes that its Python process read from files (`rchar` of the kernel, without those of a run over 1,000 changes, which
are modules). It does not count what the driver sent to executors. The bytes of the batch are those of the log's files.

`driver_mib` is the sum of the peaks of the driver's JVM and of its Python process (`VmHWM`), while they apply what
`scale_large.py` makes; the heap is 512 MiB, and `spark.driver.maxResultSize` is 64 MiB.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from cdc.config import EngineChoice
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.benchmarks import scale_copy, scale_driver, scale_large, snapshot, workloads
from tests.benchmarks.apply_input import COMMIT, Changes
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import SOURCE_SETTINGS, prepare
from tests.benchmarks.scale_copy import CopySetting
from tests.benchmarks.scale_large import LargeRange
from tests.benchmarks.scale_run import Cost, Way, apply_waiting, check_rows
from tests.benchmarks.scale_running import seconds_to_publish_backlog
from tests.fixtures.cluster import Cluster

PARTS: Final = ("workers", "full", "partial", "compacted", "entries", "copy")
CHANGES: Final = 20_000_000
QUICK_CHANGES: Final = 200_000
ROWS: Final = 50_000_000
"""Rows of the table that is copied."""
QUICK_ROWS: Final = 300_000
RUNS: Final = 3
FEW: Final = 1_000
"""Changes of the run that shows what a driver costs without rows."""
CHANGES_PER_KEY: Final = 10
MOST_COMMITS: Final = 40
"""Maximum commits of the changes in the log: with more, its writer replaces the first ones by a checkpoint."""


def run(
    *, quick: bool, changes: int = 0, rows: int = 0, runs: int = 0, parts: Collection[str] = PARTS
) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    changes, runs = changes or (QUICK_CHANGES if quick else CHANGES), runs or (1 if quick else RUNS)
    figures = empty_figures()
    for seed in range(runs):
        random = np.random.default_rng(seed)
        if "workers" in parts:
            _measure_workers(random, changes, figures)
        for kind in scale_large.KINDS:
            if kind.name in parts:
                _measure_large(random, kind, kind.rows(changes), figures)
        if "entries" in parts:
            scale_driver.measure(figures)
    if "copy" in parts:
        _measure_copies(rows or (QUICK_ROWS if quick else ROWS), runs, figures)
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        "speedup_2_workers": Figure("ratio", at_least=1.6),
        "speedup_2_workers_running": Figure("ratio", at_least=1.6),
        "spark_vs_here": Figure("ratio", at_least=0.6),
        "driver_share": Figure("ratio", at_most=0.01),
        **{f"driver_mib.{kind.name}": Figure("MiB", at_most=512 + 700) for kind in scale_large.KINDS},
        **{f"seconds.{kind.name}": Figure("s") for kind in scale_large.KINDS},
        "seconds.workers_1": Figure("s"),
        "seconds.workers_2": Figure("s"),
        "seconds.running_1": Figure("s"),
        "seconds.running_2": Figure("s"),
        "seconds.here": Figure("s"),
        "seconds.few_changes": Figure("s"),
        "driver_result_mib": Figure("MiB"),
        "driver_read_mib": Figure("MiB"),
        "log_mib": Figure("MiB"),
        **scale_driver.figures(),
        **scale_copy.figures(),
    }


def _measure_workers(random: np.random.Generator, count: int, figures: dict[str, Figure]) -> None:
    """Apply the same changes on one worker, on two, and without Spark."""
    with _folder() as folder:
        changes = _changes(random, count)
        log = changes.log(folder, commit=COMMIT * max(1, -(-count // (COMMIT * MOST_COMMITS))))
        costs: dict[str, Cost] = {}
        running: dict[str, float] = {}
        for name in random.permutation(["workers_1", "workers_2", "running_1", "running_2", "here"]).tolist():
            if name == "here":
                costs[name] = apply_waiting(folder / name, log, Way("local[2]", EngineChoice.HERE))
            else:
                with _cluster(int(name[-1])) as cluster:
                    way = Way(cluster.master, EngineChoice.SPARK)
                    if name.startswith("running"):
                        running[name] = seconds_to_publish_backlog(folder / name, log, way)
                    else:
                        costs[name] = apply_waiting(folder / name, log, way)
            check_rows(folder / name, changes)
            shutil.rmtree(folder / name)
            figures[f"seconds.{name}"].values.append(running[name] if name in running else costs[name].seconds)
        few = _cost_of_few(folder)
        size = sum(file.stat().st_size for file in log.rglob("*.parquet"))
    spark, results = costs["workers_2"], costs["workers_2"].result_bytes
    read = max(0, spark.bytes_read - few.bytes_read)
    for key, value in {
        "speedup_2_workers": costs["workers_1"].seconds / spark.seconds,
        "speedup_2_workers_running": running["running_1"] / running["running_2"],
        "spark_vs_here": costs["here"].seconds / spark.seconds,
        "driver_share": (results + read) / size,
        "seconds.few_changes": few.seconds,
        "driver_result_mib": results / 2**20,
        "driver_read_mib": read / 2**20,
        "log_mib": size / 2**20,
    }.items():
        figures[key].values.append(value)


def _cost_of_few(folder: Path) -> Cost:
    """Apply few changes on two workers: what the run costs is the start of a driver."""
    changes = _changes(np.random.default_rng(0), FEW)
    log = changes.log(folder / "few")
    with _cluster(2) as cluster:
        cost = apply_waiting(folder / "few" / "run", log, Way(cluster.master, EngineChoice.SPARK))
    check_rows(folder / "few" / "run", changes)
    return cost


def _measure_large(random: np.random.Generator, kind: LargeRange, count: int, figures: dict[str, Figure]) -> None:
    """Apply one range that cannot be divided, with a small driver."""
    with _folder() as folder, _cluster(2) as cluster:
        cost = kind.apply(folder, random, cluster.master, count)
    figures[f"driver_mib.{kind.name}"].values.append(cost.driver_mib)
    figures[f"seconds.{kind.name}"].values.append(cost.seconds)


def _measure_copies(rows: int, runs: int, figures: dict[str, Figure]) -> None:
    """Copy a table of a new server both ways, once for each run."""
    with _folder() as folder:
        folder.chmod(0o755)  # the server runs as another user
        with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
            prepare(server.dsn(), *workloads.mixed(rows).setup)
            for number in range(runs):
                place = folder / f"copy-{number}"
                place.mkdir()
                for key, value in scale_copy.measure_copy(CopySetting(server.dsn(), snapshot.TOPIC, place)).items():
                    figures[key].values.append(value)
                shutil.rmtree(place)


def _changes(random: np.random.Generator, count: int) -> Changes:
    keys = count // CHANGES_PER_KEY
    return Changes.random(random, keys, count - keys)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cdc-scale-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def _cluster(workers: int) -> Iterator[Cluster]:
    with _folder() as folder:
        cluster = Cluster(folder, workers=workers, memory="3g", has_own_cores=True)
        try:
            yield cluster
        finally:
            cluster.end()
