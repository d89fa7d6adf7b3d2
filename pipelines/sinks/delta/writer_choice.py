"""Writer choice: delta-rs or Spark for the merge of a batch, by the estimated seconds of each.

Theory. delta-rs rewrites the files that may contain a key of the batch, on the driver, with several copies of the batch
in memory. Spark needs longer to start its jobs than a small merge takes, reads the keys of every file, and rewrites as
many files on all of its cores. The estimate uses constants that were measured on two cores, times a factor for each
writer that is learned from the real times of its merges. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

MAX_BATCH_BYTES: Final = 64 << 20
"""Bytes of Arrow rows; delta-rs needs about six times as much (700,000 rows of 64 MiB into a million: 380 MiB)."""
MAX_CANDIDATE_BYTES: Final = 512 << 20
"""Bytes of files that a merge may read; delta-rs' memory grows with them (20 M rows: 1.5–4 GB)."""
SPARK_FIXED: Final = 1.4
"""Seconds of an empty merge into an empty target."""
LEARNS_FROM: Final = 0.1
"""Estimated seconds above which a merge is learned from; shorter ones are mostly the commit."""
SWITCHES_AT: Final = 1.3
"""Factor by which the other writer has to be cheaper for a table to change its writer."""
_DELTA_RS_FIXED: Final = 0.01
_DELTA_RS_PER_ROW: Final = 1e-6
_DELTA_RS_PER_BYTE: Final = 1.0e-8
_SPARK_PER_ROW: Final = 4e-6
"""Seconds of one core, like the two below."""
_SPARK_PER_BYTE_READ: Final = 2e-9
_SPARK_PER_BYTE_WRITTEN: Final = 4e-8
_OWN_SHARE: Final = 0.25
"""Share by which a merge moves the factor of its writer."""
_OTHER_SHARE: Final = 0.02
"""Share by which it moves the factor of the other writer, which is not measured and would never be tried again."""
_AT_MOST: Final = 8.0
"""Limit of a factor, at least 1 / 8: the first merge of a session loads classes, and a machine may be busy."""


@dataclass(frozen=True, slots=True)
class MergeWork:
    """The size of one merge."""

    rows: int
    """Rows of the batch."""
    nbytes: int
    """Bytes of the batch as Arrow rows in the target's columns."""
    target: int
    """Bytes of the target's live files."""
    candidates: int
    """Bytes of the live files that may contain a key of the batch."""

    @property
    def fits(self) -> bool:
        """Whether delta-rs has the memory for it."""
        return self.nbytes <= MAX_BATCH_BYTES and self.candidates <= MAX_CANDIDATE_BYTES

    def by_delta_rs(self) -> float:
        """Seconds as measured beforehand."""
        return _DELTA_RS_FIXED + self.rows * _DELTA_RS_PER_ROW + self.candidates * _DELTA_RS_PER_BYTE

    def by_spark(self, cores: int) -> float:
        """Seconds as measured beforehand."""
        of_bytes = self.target * _SPARK_PER_BYTE_READ + self.candidates * _SPARK_PER_BYTE_WRITTEN
        return SPARK_FIXED + (self.rows * _SPARK_PER_ROW + of_bytes) / max(1, cores)


@dataclass(frozen=True, slots=True)
class WriterDecision:
    """The writer of one merge."""

    spark: bool
    seconds: float = 0.0
    """Estimated time; 0 where none was needed."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured time over estimated time, for the merges of each writer."""

    delta_rs: float = 1.0
    spark: float = 1.0

    def learned(self, ratio: float, *, spark: bool) -> Factors:
        """The factors after a merge that took `ratio` times its estimate."""
        own, other = (self.spark, self.delta_rs) if spark else (self.delta_rs, self.spark)
        ratio = min(max(ratio, 1 / _AT_MOST), _AT_MOST)
        own = own * (ratio / own) ** _OWN_SHARE
        # both work on one machine, and what makes it slow passes
        other = other * (own / other) ** _OTHER_SHARE
        return Factors(other, own) if spark else Factors(own, other)

    def prefer_spark(self, work: MergeWork, cores: int, *, before: bool) -> bool:
        """Whether Spark is to merge it; before: whether it merged the table's last batch. For work that fits."""
        by_delta_rs, by_spark = self.delta_rs * work.by_delta_rs(), self.spark * work.by_spark(cores)
        return by_spark <= by_delta_rs * SWITCHES_AT if before else by_spark * SWITCHES_AT < by_delta_rs


class WriterCosts:
    """The learned costs of one sink's writers; several threads may use it."""

    def __init__(self) -> None:
        self.factors = Factors()
        self._by_spark: set[str] = set()
        """URIs of the targets whose last batch Spark merged."""
        self._lock = Lock()

    def is_small(self, work: MergeWork) -> bool:
        """Whether delta-rs finishes before Spark would begin, whichever writer merged the last batch."""
        factors = self.factors
        return work.fits and factors.delta_rs * work.by_delta_rs() * SWITCHES_AT < factors.spark * SPARK_FIXED

    def choose(self, uri: str, work: MergeWork, cores: int) -> WriterDecision:
        """The writer of a merge into a target that both can write."""
        with self._lock:
            spark = not work.fits or self.factors.prefer_spark(work, cores, before=uri in self._by_spark)
            (self._by_spark.add if spark else self._by_spark.discard)(uri)
        return WriterDecision(spark, work.by_spark(cores) if spark else work.by_delta_rs())

    def learn(self, choice: WriterDecision, seconds: float) -> None:
        """Learn from the time that a merge took."""
        if choice.seconds >= LEARNS_FROM:
            with self._lock:
                self.factors = self.factors.learned(seconds / choice.seconds, spark=choice.spark)


def candidates(files: pa.Table, source: pa.Table, key: Sequence[str]) -> int:
    """Bytes of the files that may contain a key of the source; a file without bounds may contain any.

    files: live files with their `size_bytes` and the bounds of columns, `min.<name>` and `max.<name>`.
    """
    may = pa.array([True] * files.num_rows, pa.bool_())
    for name in key:
        if f"min.{name}" not in files.column_names or f"max.{name}" not in files.column_names:
            continue
        try:
            found = pc.min_max(source[name])
            meets = pc.and_(
                pc.less_equal(files[f"min.{name}"], found["max"]), pc.greater_equal(files[f"max.{name}"], found["min"])
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            continue  # bounds in another type than the column's
        may = pc.and_(may, pc.fill_null(meets, fill_value=True))
    return pc.sum(files["size_bytes"].filter(may)).as_py() or 0


def rewritten_bytes(before: pa.Table, after: pa.Table) -> int:
    """Bytes that were written again between two states of a table's live files: of files that came for those that went.

    Files that only came hold new rows, and those that only went hold rows that nobody wrote again.
    """
    if before is after:
        return 0
    came = after["size_bytes"].filter(pc.invert(pc.is_in(after["path"], before["path"])))
    went = before["size_bytes"].filter(pc.invert(pc.is_in(before["path"], after["path"])))
    return min(pc.sum(came).as_py() or 0, pc.sum(went).as_py() or 0)
