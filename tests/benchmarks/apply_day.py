"""A day of updates in a target of the indexed writer: bytes written, and how fast the target is read afterwards.

1 % of the rows change in each of 24 hours: random keys, 1,000 or 10,000 to a batch, each batch published, with
maintenance. The day passes as fast as the batches do.

A batch of k keys in a table of T rows writes new vectors for all files, and a vector has two bytes for each deleted
row. With b bytes to a row, vectors and rewritten files together write in the long run at least 2·√(T/(k·b)) bytes for a
changed byte: 30 for 1,000 keys of 45 bytes in 10 million rows. So only the larger batch has a limit.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from cdc.stores.lake_reader import read_target
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.settings import Writer
from tests.benchmarks.apply_large import Kind, Target, chosen, filled
from tests.benchmarks.figures import Figure

HOURS, SHARE = 24, 0.01
BATCHES = {"day_1k": 1_000, "day_10k": 10_000}
UPKEEP = UpkeepSettings(every=5.0, vacuum_after=30.0, retain=10.0)
READS = 3


def figures() -> dict[str, Figure]:
    """Figures that `measure` fills."""
    return {
        "write_amplification.indexed.day_1k": Figure("ratio"),
        "write_amplification.indexed.day_10k": Figure("ratio", at_most=10),
        **{f"read_ratio.indexed.{day}": Figure("ratio", at_most=1.3) for day in BATCHES},
        **{f"published_batch_ms.indexed.{day}": Figure("ms") for day in BATCHES},
        **{f"published_batch_p99_ms.indexed.{day}": Figure("ms") for day in BATCHES},
        **{f"rows_differing.indexed.{day}": Figure("rows", at_most=0, in_every_run=True) for day in BATCHES},
    }


def measure(random: np.random.Generator, rows: int, found: dict[str, Figure]) -> None:
    """Measure a day in a target with a fifth of the rows, by both sizes of a batch."""
    for day, batch in BATCHES.items():
        with filled(rows // 5, Kind(Writer.INDEXED, upkeep=UPKEEP)) as target:
            target.apply(chosen(random, 0, rows // 5))  # builds the index
            size = sum(file.stat().st_size for file in Path(target.uri).glob("*.parquet"))
            written, seconds = WrittenBytes(Path(target.uri)), list[float]()
            changes = int(rows // 5 * SHARE) * HOURS
            for _ in range(changes // batch):
                merged, began = target.apply(chosen(random, 0, rows // 5, batch)).seconds, time.perf_counter()
                target.publish()
                seconds.append(merged + time.perf_counter() - began)
                written.count()
            amplification = written.bytes / (changes * size / (rows // 5))
            found[f"write_amplification.indexed.{day}"].values.append(amplification)
            found[f"published_batch_ms.indexed.{day}"].values.append(float(np.median(seconds)) * 1e3)
            found[f"published_batch_p99_ms.indexed.{day}"].values.append(float(np.quantile(seconds, 0.99)) * 1e3)
            found[f"rows_differing.indexed.{day}"].values.append(target.differing())
            found[f"read_ratio.indexed.{day}"].values.append(_read_ratio(target))


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


def _read_ratio(target: Target) -> float:
    """Return the seconds of reading all rows, divided by those of a new table with the same rows."""
    compacted = f"{target.uri}.compacted"
    write_deltalake(compacted, read_target(target.uri, None))
    seconds: dict[str, list[float]] = {target.uri: [], compacted: []}
    for _ in range(READS):
        for uri, times in seconds.items():
            began = time.perf_counter()
            for _ in pa.RecordBatchReader.from_stream(DeltaTable(uri).scan()):
                pass
            times.append(time.perf_counter() - began)
    ours, theirs = (float(np.median(times)) for times in seconds.values())
    return ours / theirs
