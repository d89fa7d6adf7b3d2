"""Reading the log: the data source `cdc` beside Spark's Parquet reader over the same files; one small table of many."""

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
import pyarrow.parquet as pq

from cdc.change import LOG_SCHEMA
from cdc.log.append import LogWriter
from cdc.log.layout import CHANGES, PARQUET, LogFile
from cdc.log.ranges import Only
from cdc.log.read import read_file
from cdc.log.segments import SegmentLimits
from cdc.position import Position
from pipelines.source import register
from tests.benchmarks.figures import Figure
from tests.log.rows import IDENTITY, info

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGES_READ = 10_000_000
COMMIT = 100_000
"""Changes of a commit, which is one file."""
TURNS = 3
"""Pairs of reads that are timed, after one that is not."""
TABLES, SETTLED_ROWS = 1_000, 16 * 131_072
"""Of the settled file that one table is read from, sorted by table."""
GROUPS = tuple(sorted({8_192, 16_384, 32_768, 131_072, PARQUET["row_group_size"]}))
"""Rows of its row groups."""
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
            self._source(session, folder / "log")
            self._small_table(folder / "settled.parquet")
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

    def _small_table(self, path: Path) -> None:
        count = min(SETTLED_ROWS, self.changes // 131_072 * 131_072) or 131_072
        wanted = Only(relations=(TABLES // 2, TABLES // 2))
        settled = [_of_tables(rows, count) for rows in self._slices(count, 131_072)]
        for group in GROUPS:
            with pq.ParquetWriter(
                path, LOG_SCHEMA, **{k: v for k, v in PARQUET.items() if k != "row_group_size"}
            ) as new:
                for rows in settled:
                    new.write_table(rows, row_group_size=group)
            size = path.stat().st_size
            file = LogFile(
                path=str(path), rows=count, size=size, first=Position(1), last=Position((1 << 63) - 1), segment=0
            )
            before = _bytes_read()
            read_file(file, Position(0), file.last, only=wanted)
            share = (_bytes_read() - before) / size
            self._add(f"small_table_share.groups_of_{group}", share)
            self._add(f"settled_bytes_per_row.groups_of_{group}", size / count)
            if group == PARQUET["row_group_size"]:
                self._add("small_table_share", share)

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
        "small_table_share": Figure("ratio", at_most=0.02),
        **{f"small_table_share.groups_of_{rows}": Figure("ratio") for rows in GROUPS},
        **{f"settled_bytes_per_row.groups_of_{rows}": Figure("B") for rows in GROUPS},
    }


def _of_tables(rows: pa.Table, count: int) -> pa.Table:
    """The changes as those of the many tables, neighbours of one table."""
    change = (rows["position"].to_numpy() - 1_000) * 10 + rows["ordinal"].to_numpy()
    number = change * TABLES // count
    names = pa.array([f"shop.table{n}" for n in range(TABLES)])
    said = {"relation": pa.array(number), "topic": names.take(pa.array(number))}
    columns = [said.get(name, rows[name]) for name in LOG_SCHEMA.names]
    return pa.table(columns, schema=LOG_SCHEMA)


def _seconds(frame: Callable[[], DataFrame]) -> float:
    began = time.monotonic()
    frame().write.format("noop").mode("overwrite").save()
    return time.monotonic() - began


def _bytes_read() -> int:
    """By this process, with any call."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
