"""Ranges that one batch has to apply whole, by a small driver: transactions and the compacted state of a log.

Each is applied cold by two workers, with `spark.engine: auto`, and every row of the lake is compared afterwards.

- `full`: one transaction has all changes, with full images.
- `partial`: one transaction inserts the rows. In a second one every image is partial, so that the executors complete it
  with the row of the target.
- `compacted`: the log is compacted and its single changes are trimmed, so that a new sink begins with all keys at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np

from cdc.config import EngineChoice
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.writer import LogWriter
from pipelines.compaction.compaction_steps import compact
from tests.benchmarks.apply_input import Changes
from tests.benchmarks.scale_run import Cost, Way, apply_waiting, check_rows
from tests.log.rows import IDENTITY, LIMITS
from tests.pipelines.cold_log import EACH_OF_ITS_OWN

CHANGES_PER_KEY: Final = 10
SEGMENTS: Final = 50
"""Segments of the log that is compacted; the last one is not trimmed."""
TRIMMED: Final = Retention(max_age=1.0, grace=3600.0)
"""Wait for no consumer: the changes are of 2023."""


@dataclass(frozen=True, slots=True)
class LargeRange:
    """A kind of range that one batch applies whole."""

    name: str
    share: Fraction
    """Its rows for each change of the benchmark."""
    apply: Callable[[Path, np.random.Generator, str, int], Cost]
    """Applies so many rows; see `apply_full`."""

    def rows(self, changes: int) -> int:
        """Return its rows in a benchmark of so many changes."""
        return int(changes * self.share)


def apply_full(folder: Path, random: np.random.Generator, master: str, count: int) -> Cost:
    """Apply one transaction of `count` changes with full images."""
    keys = count // CHANGES_PER_KEY
    changes = Changes.random(random, keys, count - keys, transaction=count)
    return _applied(folder, changes.log(folder, commit=count), changes, master)


def apply_partial(folder: Path, random: np.random.Generator, master: str, count: int) -> Cost:
    """Apply a transaction of `count` inserts, and one of as many changes of these rows, with partial images."""
    changes = Changes.random(random, count, count, partial=1.0, transaction=count)
    return _applied(folder, changes.log(folder, commit=count), changes, master)


def apply_compacted(folder: Path, random: np.random.Generator, master: str, count: int) -> Cost:
    """Apply a compacted log of `count` keys to a new sink."""
    changes = Changes.random(random, count, 0)
    log = changes.log(folder, commit=max(1, count // SEGMENTS), limits=EACH_OF_ITS_OWN)
    compact(None, str(log), everything=True)
    trim = plan_trim(str(log), TRIMMED)
    if trim is None:
        raise RuntimeError(f"no change of {log} can be trimmed")
    LogWriter.open(log, IDENTITY, LIMITS).trim(trim.segments, trim.upto)
    return _applied(folder, log, changes, master)


def _applied(folder: Path, log: Path, changes: Changes, master: str) -> Cost:
    cost = apply_waiting(folder / "run", log, Way(master, EngineChoice.AUTO))
    check_rows(folder / "run", changes)
    return cost


KINDS: Final = (
    LargeRange("full", Fraction(1), apply_full),
    LargeRange("partial", Fraction(1, 4), apply_partial),
    LargeRange("compacted", Fraction(5, 2), apply_compacted),
)
