"""Apply: from the change log into Delta by the default writer, by the others, and by a hand-made `foreachBatch`.

Everything runs in one process with one Spark session that is warm before a clock starts. Rows of both sides are
compared in the end: a figure of a run in which they differ is not printed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cdc.position import Position
from pipelines.engine_decision import SLICE_ROWS
from pipelines.runtime.spark_session import SparkSettings, has_delta, spark_session
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.source.data_source import register
from tests.benchmarks import apply_bucket, apply_day, apply_indexed, apply_large, apply_random
from tests.benchmarks.apply_input import Changes
from tests.benchmarks.apply_loop import ApplyLoop
from tests.benchmarks.apply_peer import Peer, rows_of
from tests.benchmarks.figures import Figure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTS = ("throughput", "peer", "large", "random", "indexed", "day", "bucket")
CHANGES, KEYS, RUNS = 5_000_000, 500_000, 3
QUICK_CHANGES, QUICK_KEYS = 100_000, 10_000
ROWS, QUICK_ROWS = 50_000_000, 200_000
PARTIAL = 0.2
BATCHES = {"batch_10k": (10_000, 20), "batch_2m": (2_000_000, 1)}
"""(changes, how many) of those that the peer is compared by."""
QUICK_BATCHES = {"batch_10k": (1_000, 1), "batch_2m": (10_000, 1)}
OTHERS = {"indexed": Writer.INDEXED, "copy_on_write": Writer.COPY_ON_WRITE, "spark": Writer.SPARK}
WRITERS = {"": apply_large.DEFAULT_WRITER, **{f".{name}": writer for name, writer in OTHERS.items()}}
"""End of a figure's key → writer; the first one is the default of a definition."""
KINDS = {
    "": (0.0, SLICE_ROWS, 100_000),
    ".batches_2m": (0.0, 2_000_000, 450_000),
    ".partial_20": (PARTIAL, SLICE_ROWS, 80_000),
}
"""Kind of changes → (share of partial images, rows of a batch, least changes per second of the default writer)."""


def run(
    *, quick: bool, changes: int = 0, keys: int = 0, rows: int = 0, runs: int = 0, parts: Collection[str] = PARTS
) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key); parts that are not asked for stay unmeasured."""
    changes, keys = changes or (QUICK_CHANGES if quick else CHANGES), keys or (QUICK_KEYS if quick else KEYS)
    rows, runs = rows or (QUICK_ROWS if quick else ROWS), runs or (1 if quick else RUNS)
    figures = empty_figures()
    for part, alone in (
        ("large", apply_large),
        ("indexed", apply_indexed),
        ("day", apply_day),
        ("bucket", apply_bucket),
    ):
        for seed in range(runs if part in parts else 0):
            alone.measure(np.random.default_rng(seed), rows, figures)
    if {"throughput", "peer", "random"} & set(parts):
        with _spark() as session:
            if "random" in parts:  # which is reported only: once, whatever the runs
                apply_random.measure(session, np.random.default_rng(0), rows, figures)
            bench = Bench(session, figures)
            bench.warm()
            for seed in range(runs):
                random = np.random.default_rng(seed)
                if "throughput" in parts:
                    bench.throughput(random, keys, changes)
                if "peer" in parts:
                    for kind, (size, count) in (QUICK_BATCHES if quick else BATCHES).items():
                        bench.peer(random, keys, kind, size, count)
    return runs, figures


@contextmanager
def _spark() -> Iterator[SparkSession]:
    session = spark_session(SparkSettings(master="local[2]", app_name="cdc-bench", download=False))
    try:
        if not has_delta(session):
            raise RuntimeError("Spark has no Delta here")
        register(session)
        yield session
    finally:
        session.stop()


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        **{
            f"changes_per_second{kind}{writer}": Figure("changes/s", at_least=None if writer else limit)
            for kind, (_, _, limit) in KINDS.items()
            for writer in WRITERS
        },
        "vs_foreachbatch_merge.batch_10k": Figure("ratio", at_least=3),
        "vs_foreachbatch_merge.batch_2m": Figure("ratio", at_least=1),
        **{f"{who}_seconds.{size}": Figure("s") for who in ("batch", "foreachbatch_merge") for size in BATCHES},
        **apply_large.figures(),
        **apply_random.figures(),
        **apply_indexed.figures(),
        **apply_day.figures(),
        **apply_bucket.figures(),
    }


class Bench:
    """One Spark session and everything that is measured with it."""

    def __init__(self, session: SparkSession, figures: dict[str, Figure]) -> None:
        self._session, self._figures = session, figures

    def warm(self) -> None:
        """Let every writer apply a small log, so that none of them loads modules and compiles while it is measured."""
        made = Changes.random(np.random.default_rng(0), QUICK_KEYS, QUICK_CHANGES)
        with _folder() as folder:
            log = made.log(folder)
            for name, writer in WRITERS.items():
                _ours(self._session, folder / f"target{name}", log, writer).catch_up(SLICE_ROWS)

    def throughput(self, random: np.random.Generator, keys: int, changes: int) -> None:
        """From a log into an empty sink, in batches as the driver takes them."""
        for kind, (partial, rows, _) in KINDS.items():
            made = Changes.random(random, keys, changes - keys, partial=partial)
            with _folder() as folder:
                log = made.log(folder)
                for name in random.permutation(list(WRITERS)).tolist():
                    loop = _ours(self._session, folder / f"target{name}", log, WRITERS[name])
                    self._note(f"changes_per_second{kind}{name}", len(made) / _timed(loop.catch_up, rows))
                targets = [_rows_of(folder / f"target{name}") for name in WRITERS]
            for other in targets[1:]:
                _check_equal(targets[0], other)

    def peer(self, random: np.random.Generator, keys: int, kind: str, size: int, batches: int) -> None:
        """Batches of a size into a target with all keys, taking turns; the first one of each is not counted."""
        made = Changes.random(random, keys, size * (batches + 1))
        ours_took, peer_took = [], []
        with _folder() as folder:
            ours = _ours(self._session, folder / "ours", made.log(folder), WRITERS[""])
            peer = Peer(self._session, folder / "peer")
            ours.step(Position(made.position(keys - 1)))
            peer.fill(made.plain(folder, 0, keys))
            for batch in range(batches + 1):
                start = keys + batch * size
                end, plain = Position(made.position(start + size - 1)), made.plain(folder, start, size)
                took = _timed(ours.step, end), _timed(peer, plain)
                if batch:
                    ours_took.append(took[0])
                    peer_took.append(took[1])
            _check_equal(_rows_of(folder / "ours"), peer.rows())
        self._note(f"batch_seconds.{kind}", float(np.median(ours_took)))
        self._note(f"foreachbatch_merge_seconds.{kind}", float(np.median(peer_took)))
        self._note(f"vs_foreachbatch_merge.{kind}", float(np.median(peer_took) / np.median(ours_took)))

    def _note(self, key: str, value: float) -> None:
        self._figures[key].values.append(value)


def _ours(session: SparkSession, folder: Path, log: Path, writer: Writer) -> ApplyLoop:
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", writer), session)
    return ApplyLoop(folder, log, sink, session)


def _timed(work: Callable[..., None], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cdc-apply-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _rows_of(folder: Path) -> pa.Table:
    return rows_of(str(folder / "shop" / "items"))


def _check_equal(one: pa.Table, other: pa.Table) -> None:
    if not one.equals(other):
        raise RuntimeError(f"the two sides differ: {one.num_rows:,} and {other.num_rows:,} rows")
