"""Indexed writer: milliseconds of a batch of random keys in a large target, next to delta-rs in the same run."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Event, Thread

import numpy as np

from pipelines.sinks.delta.settings import Writer
from tests.benchmarks import apply_large
from tests.benchmarks.apply_large import Kind, chosen, filled, median
from tests.benchmarks.figures import Figure

BATCHES = 20
PEER_BATCHES = 5
SIZES = {"10m_1k": (5, 1_000, 20), "10m_10k": (5, 10_000, 60), "50m_1k": (1, 1_000, 80), "50m_10k": (1, 10_000, 300)}
"""Name → divisor of the rows of the largest target, keys of a batch, limit in milliseconds."""


def figures() -> dict[str, Figure]:
    """Figures that `measure` fills."""
    return {
        **{f"merge_ms.indexed.{size}": Figure("ms", at_most=limit) for size, (_, _, limit) in SIZES.items()},
        **{f"merge_p90_ms.indexed.{size}": Figure("ms") for size in SIZES},
        "vs_delta_rs_merge.10m_1k": Figure("ratio", at_least=50),
        **{f"index_lost_s.{size}": Figure("s", at_most=limit) for size, limit in (("10m", 10), ("50m", None))},
        "index_bytes_per_entry.50m": Figure("bytes", at_most=24),
        "anonymous_memory_mib.50m": Figure("MiB", at_most=1536),
        **{f"rows_differing.indexed.{size}": Figure("rows", at_most=0, in_every_run=True) for size in ("10m", "50m")},
    }


def measure(random: np.random.Generator, rows: int, found: dict[str, Figure]) -> None:
    """Measure batches in a target with this many rows, and in one with a fifth of them."""
    for name, divisor in (("10m", 5), ("50m", 1)):
        count = rows // divisor
        with filled(count, Kind(Writer.INDEXED)) as target:
            memory = AnonymousMemory()
            # the batch does not wait for the index
            found[f"index_lost_s.{name}"].values.append(target.apply(chosen(random, 0, count)).seconds)
            target.finish_index()
            for size, (own, keys, _) in SIZES.items():
                if own != divisor:
                    continue
                seconds = [target.apply(chosen(random, 0, count, keys)).seconds for _ in range(BATCHES)]
                found[f"merge_ms.indexed.{size}"].values.append(float(np.median(seconds)) * 1e3)
                found[f"merge_p90_ms.indexed.{size}"].values.append(float(np.quantile(seconds, 0.9)) * 1e3)
            greatest = memory.stop()
            if name == "50m":
                found["anonymous_memory_mib.50m"].values.append(greatest - target.nbytes / 2**20)
            found[f"rows_differing.indexed.{name}"].values.append(target.differing())
            target.close()
            if name == "50m":
                nbytes = sum(file.stat().st_size for file in target.index_folder.rglob("*.run"))
                added = apply_large.BATCH + sum(BATCHES * keys for own, keys, _ in SIZES.values() if own == divisor)
                found["index_bytes_per_entry.50m"].values.append(nbytes / (count + added))
    peer = _peer(random, rows // 5)
    found["vs_delta_rs_merge.10m_1k"].values.append(peer * 1e3 / found["merge_ms.indexed.10m_1k"].values[-1])


class AnonymousMemory:
    """Measures the resident memory of this process that is not mapped from files, every 20 ms."""

    def __init__(self) -> None:
        self._greatest, self._stopped = 0.0, Event()
        self._thread = Thread(target=self._measure)
        self._thread.start()

    def stop(self) -> float:
        """Return the greatest size so far, in MiB."""
        self._stopped.set()
        self._thread.join()
        return self._greatest

    def _measure(self) -> None:
        while not self._stopped.wait(0.02):
            status = Path("/proc/self/status").read_text(encoding="ascii")
            sizes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
            self._greatest = max(self._greatest, sum(map(int, sizes)) / 1024)


def _peer(random: np.random.Generator, rows: int) -> float:
    """Return the median seconds of a batch of 1,000 random keys by delta-rs."""
    with filled(rows, Kind(Writer.COPY_ON_WRITE)) as target:
        target.close()
        return median(target.merge_with_delta_rs(chosen(random, 0, rows)) for _ in range(PEER_BATCHES)).seconds
