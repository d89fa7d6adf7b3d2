"""Indexed writer: milliseconds of a batch of random keys in a large target, next to delta-rs in the same run."""

from __future__ import annotations

import numpy as np

from pipelines.sinks.delta.settings import Writer
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
        **{f"rows_differing.indexed.{size}": Figure("rows", at_most=0, in_every_run=True) for size in ("10m", "50m")},
    }


def measure(random: np.random.Generator, rows: int, found: dict[str, Figure]) -> None:
    """Measure batches in a target with this many rows, and in one with a fifth of them."""
    for name, divisor in (("10m", 5), ("50m", 1)):
        count = rows // divisor
        with filled(count, Kind(Writer.INDEXED)) as target:
            target.apply(chosen(random, 0, count))  # builds the index
            for size, (own, keys, _) in SIZES.items():
                if own != divisor:
                    continue
                seconds = [target.apply(chosen(random, 0, count, keys)).seconds for _ in range(BATCHES)]
                found[f"merge_ms.indexed.{size}"].values.append(float(np.median(seconds)) * 1e3)
                found[f"merge_p90_ms.indexed.{size}"].values.append(float(np.quantile(seconds, 0.9)) * 1e3)
            found[f"rows_differing.indexed.{name}"].values.append(target.differing())
    peer = _peer(random, rows // 5)
    found["vs_delta_rs_merge.10m_1k"].values.append(peer * 1e3 / found["merge_ms.indexed.10m_1k"].values[-1])


def _peer(random: np.random.Generator, rows: int) -> float:
    """Return the median seconds of a batch of 1,000 random keys by delta-rs."""
    with filled(rows, Kind(Writer.DELTA_RS)) as target:
        target.apply(chosen(random, 0, rows))
        return median(target.apply(chosen(random, 0, rows)) for _ in range(PEER_BATCHES)).seconds
