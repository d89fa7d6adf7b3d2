"""A day of updates in a target of the indexed writer: bytes written, and how fast the target is read afterwards.

1 % of the rows change in each of 24 hours: random keys, 1,000 or 10,000 to a batch, each batch published, with
maintenance. The batches follow each other without a pause, and an hour ends when maintenance has nothing left to do.

A batch of k keys in a table of T rows writes new vectors for all files, and a vector has two bytes for each deleted
row. With b bytes to a row, vectors and rewritten files together write in the long run at least 2·√(T/(k·b)) bytes for a
changed byte: 30 for 1,000 keys of 45 bytes in 10 million rows. So only the larger batch has a limit.

Reads by Spark have a limit. Reads by delta-rs have none: delta-rs 1.6 takes 1.9 times as long for a file with a vector
as for the same file without one, whatever the vector deletes, and with random keys every file has a vector. So the
ratio is a property of that reader; the writer could only lower it by rewriting every file after every batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from cdc.targets.lake_reader import read_target
from pipelines.runtime.spark_session import SparkSettings, spark_session
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.settings import Writer
from tests.benchmarks.apply_large import Kind, Target, chosen, filled
from tests.benchmarks.figures import Figure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOURS, SHARE = 24, 0.01
BATCHES = {"day_1k": 1_000, "day_10k": 10_000}
UPKEEP = UpkeepSettings(every=1.0, vacuum_after=30.0, retain=10.0)
IDLE = 2 * UPKEEP.every
"""Seconds without a rewrite after which maintenance has nothing left to do."""
WARM, READS = 3, 7
"""Reads of each table before the time of a read is measured, and while it is."""


def figures() -> dict[str, Figure]:
    """Figures that `measure` fills."""
    return {
        "write_amplification.indexed.day_1k": Figure("ratio"),
        "write_amplification.indexed.day_10k": Figure("ratio", at_most=10),
        **{f"read_ratio_by_delta_rs.indexed.{day}": Figure("ratio") for day in BATCHES},
        **{f"read_ratio_by_spark.indexed.{day}": Figure("ratio", at_most=1.3) for day in BATCHES},
        **{f"published_batch_ms.indexed.{day}": Figure("ms") for day in BATCHES},
        **{f"published_batch_p99_ms.indexed.{day}": Figure("ms") for day in BATCHES},
        **{f"rows_differing.indexed.{day}": Figure("rows", at_most=0, in_every_run=True) for day in BATCHES},
    }


def measure(random: np.random.Generator, rows: int, found: dict[str, Figure]) -> None:
    """Measure a day in a target with a fifth of the rows, by both sizes of a batch."""
    for day, batch in BATCHES.items():
        with filled(rows // 5, Kind(Writer.INDEXED, upkeep=UPKEEP)) as target:
            target.apply(chosen(random, 0, rows // 5))
            target.finish_index()
            size = sum(file.stat().st_size for file in Path(target.uri).glob("*.parquet"))
            written, seconds = WrittenBytes(Path(target.uri)), list[float]()
            batches = max(1, int(rows // 5 * SHARE) * HOURS // batch)  # a quick day may be shorter than a batch
            for number in range(batches):
                merged, began = target.apply(chosen(random, 0, rows // 5, batch)).seconds, time.perf_counter()
                target.publish()
                seconds.append(merged + time.perf_counter() - began)
                if (number + 1) * HOURS % batches < HOURS:  # the last batch of an hour
                    _wait_for_maintenance(target)
                written.count()
            amplification = written.bytes / (batches * batch * size / (rows // 5))
            found[f"write_amplification.indexed.{day}"].values.append(amplification)
            found[f"published_batch_ms.indexed.{day}"].values.append(float(np.median(seconds)) * 1e3)
            found[f"published_batch_p99_ms.indexed.{day}"].values.append(float(np.quantile(seconds, 0.99)) * 1e3)
            found[f"rows_differing.indexed.{day}"].values.append(target.differing())
            compacted = f"{target.uri}.compacted"
            write_deltalake(compacted, read_target(target.uri, None))
            found[f"read_ratio_by_delta_rs.indexed.{day}"].values.append(
                _ratio(_seconds_by_delta_rs, target.uri, compacted)
            )
            with _spark() as session:
                by_spark = _ratio(partial(_seconds_by_spark, session), target.uri, compacted)
            found[f"read_ratio_by_spark.indexed.{day}"].values.append(by_spark)


def _wait_for_maintenance(target: Target) -> None:
    worked_at = time.monotonic()
    while time.monotonic() - worked_at < IDLE:
        target.publish()
        if target.is_being_rewritten:
            worked_at = time.monotonic()
        time.sleep(0.02)


class WrittenBytes:
    """Counts the bytes of the files that appear in a table's directory."""

    def __init__(self, root: Path) -> None:
        self._root, self._known, self.bytes = root, set[Path](), 0
        self.count()
        self.bytes = 0

    def count(self) -> None:
        """Add the files that are new since the last call."""
        for folder in (self._root, self._root / "_vectors", self._root / "_delta_log"):
            for file in folder.glob("*.*"):
                if file not in self._known:
                    self._known.add(file)
                    self.bytes += file.stat().st_size if file.exists() else 0


def _ratio(seconds_of: Callable[[str], float], first: str, second: str) -> float:
    """Return the median seconds of reading the first target, divided by those of the second.

    Both are read in turn.
    """
    seconds = [(seconds_of(first), seconds_of(second)) for _ in range(WARM + READS)][WARM:]
    return float(np.median([one for one, _ in seconds]) / np.median([other for _, other in seconds]))


def _seconds_by_delta_rs(uri: str) -> float:
    began = time.perf_counter()
    for _ in pa.RecordBatchReader.from_stream(DeltaTable(uri).scan()):
        pass
    return time.perf_counter() - began


def _seconds_by_spark(session: SparkSession, uri: str) -> float:
    began = time.perf_counter()
    # the noop sink cannot read a table with deletion vectors, so a hash makes Spark read every value
    session.read.format("delta").load(uri).selectExpr("bit_xor(xxhash64(*))").collect()
    return time.perf_counter() - began


@contextmanager
def _spark() -> Iterator[SparkSession]:
    session = spark_session(SparkSettings(master="local[2]", app_name="cdc-bench", download=False))
    try:
        yield session
    finally:
        session.stop()
