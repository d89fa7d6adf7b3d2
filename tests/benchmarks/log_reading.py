"""Reading the log: the data source `cdc` beside Spark's Parquet reader over the same files."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cdc.log.disk_format import CHANGES
from cdc.log.writer import LogWriter, SegmentLimits
from pipelines.source.data_source import register
from tests.benchmarks.figures import Figure
from tests.log.rows import IDENTITY, info

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGES_READ = 10_000_000
COMMIT = 100_000
"""Changes of a commit, which is one file."""
TURNS = 3
"""Pairs of reads that are timed, after one that is not."""
_LIMITS = SegmentLimits(size=64 << 20, age=1e9)

Rows = Callable[[np.ndarray], pa.Table]
"""Changes by number as the log holds them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read, and where the figures go."""

    changes: int
    rows: Rows
    figures: dict[str, Figure]

    def measure(self, session: SparkSession) -> None:
        """Add the values of one run."""
        folder = Path(tempfile.mkdtemp(prefix="cdc-log-"))
        try:
            self._source(session, folder)
        finally:
            shutil.rmtree(folder)

    def _source(self, session: SparkSession, root: Path) -> None:
        register(session)
        writer = LogWriter.open(root, IDENTITY, _LIMITS)
        for rows in self._slices(self.changes, COMMIT):
            writer.commit(writer.stage(rows), info(rows["position"][-1].as_py()))

        def source() -> DataFrame:
            return session.read.format("cdc").load(str(root))

        def parquet() -> DataFrame:
            return session.read.parquet(str(root / CHANGES))

        took = [(_seconds(source), _seconds(parquet)) for _ in range(1 + TURNS)][1:]
        for ours, theirs in took:
            self._add("source_vs_parquet", theirs / ours)
            self._add("source_rows_per_second", self.changes / ours)
            self._add("parquet_rows_per_second", self.changes / theirs)

    def _slices(self, count: int, size: int) -> Iterator[pa.Table]:
        for start in range(0, count, size):
            yield self.rows(np.arange(start, min(start + size, count)))

    def _add(self, name: str, value: float) -> None:
        self.figures[name].values.append(value)


def figures() -> dict[str, Figure]:
    """What is measured, without values."""
    return {
        "source_vs_parquet": Figure("ratio", at_least=0.8),
        "source_rows_per_second": Figure("changes/s"),
        "parquet_rows_per_second": Figure("changes/s"),
    }


def _seconds(frame: Callable[[], DataFrame]) -> float:
    began = time.monotonic()
    frame().write.format("noop").mode("overwrite").save()
    return time.monotonic() - began
