"""Writer choice: chooses delta-rs or Spark for the merge of a batch that the indexed writer cannot merge, by the
estimated seconds of each writer.

delta-rs merges on the driver, with several copies of the batch in memory. It rewrites the files that may contain a key
of the batch. Spark rewrites the same files on all of its cores, but it reads the keys of every file. Starting its jobs
takes longer than a small merge. An estimate is a formula with constants that were measured on two cores, times a factor
for each writer. The factor is learned from the real times of the writer's merges. This module reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sinks.delta.settings import Writer

MAX_BATCH_BYTES: Final = 64 << 20
"""Maximum size, in bytes of Arrow rows, of a batch that delta-rs merges; it needs about six times as much memory."""
MAX_CANDIDATE_BYTES: Final = 512 << 20
"""Maximum bytes of target files that a merge by delta-rs may read, because its memory grows with them."""
SPARK_FIXED: Final = 1.4
"""Seconds that Spark needs to merge an empty batch into an empty target."""
LEARNS_FROM: Final = 0.1
"""Minimum estimated seconds of a merge whose real time changes the factors; shorter merges are mostly the commit."""
SWITCHES_AT: Final = 1.3
"""Minimum ratio of the costs of the two writers at which the batches of a target change to the cheaper writer."""
_DELTA_RS_FIXED: Final = 0.01
_DELTA_RS_PER_ROW: Final = 1e-6
_DELTA_RS_PER_BYTE: Final = 1.0e-8
_SPARK_PER_ROW: Final = 4e-6
"""Seconds of one core for each row of a batch; the next two constants are seconds of one core for each byte."""
_SPARK_PER_BYTE_READ: Final = 2e-9
_SPARK_PER_BYTE_WRITTEN: Final = 4e-8
_OWN_SHARE: Final = 0.25
"""Exponent with which a merge moves its writer's factor towards the measured ratio: 0 keeps it, 1 replaces it."""
_OTHER_SHARE: Final = 0.02
"""Exponent with which a merge by one writer moves the factor of the other writer towards its own. So a writer that was
slow for a while is tried again.
"""
_AT_MOST: Final = 8.0
"""Maximum ratio of measured to estimated time that is learned; the minimum is 1 / 8."""


@dataclass(frozen=True, slots=True)
class MergeWork:
    """The numbers of rows and bytes from which the duration of one merge is estimated."""

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
        """Whether the batch and the files are small enough for the memory of delta-rs."""
        return self.nbytes <= MAX_BATCH_BYTES and self.candidates <= MAX_CANDIDATE_BYTES

    def by_delta_rs(self) -> float:
        """Return how many seconds delta-rs would need for this merge, without the learned factor."""
        return _DELTA_RS_FIXED + self.rows * _DELTA_RS_PER_ROW + self.candidates * _DELTA_RS_PER_BYTE

    def by_spark(self, cores: int) -> float:
        """Return how many seconds Spark would need for this merge on `cores` cores, without the learned factor."""
        of_bytes = self.target * _SPARK_PER_BYTE_READ + self.candidates * _SPARK_PER_BYTE_WRITTEN
        return SPARK_FIXED + (self.rows * _SPARK_PER_ROW + of_bytes) / max(1, cores)


@dataclass(frozen=True, slots=True)
class WriterDecision:
    """The choice of the writer that merges one batch."""

    writer: Writer
    """Never AUTO."""
    seconds: float = 0.0
    """Estimated seconds of the merge; 0 if the choice needed no estimate."""


@dataclass(frozen=True, slots=True)
class Factors:
    """For each writer, the learned ratio of the measured to the estimated duration of its merges."""

    delta_rs: float = 1.0
    spark: float = 1.0

    def learned(self, ratio: float, *, spark: bool) -> Factors:
        """Return the factors adjusted after one merge.

        ratio: measured seconds divided by estimated seconds. spark: whether Spark merged.
        """
        own, other = (self.spark, self.delta_rs) if spark else (self.delta_rs, self.spark)
        ratio = min(max(ratio, 1 / _AT_MOST), _AT_MOST)
        own = own * (ratio / own) ** _OWN_SHARE
        # both writers run on one machine, and a cause that slows the machine passes
        other = other * (own / other) ** _OTHER_SHARE
        return Factors(other, own) if spark else Factors(own, other)

    def prefer_spark(self, work: MergeWork, cores: int, *, before: bool) -> bool:
        """Return whether Spark should merge a batch that is small enough for both writers.

        before: whether Spark merged the previous batch of the same target. The other writer is chosen only if it is
        clearly faster.
        """
        by_delta_rs, by_spark = self.delta_rs * work.by_delta_rs(), self.spark * work.by_spark(cores)
        return by_spark <= by_delta_rs * SWITCHES_AT if before else by_spark * SWITCHES_AT < by_delta_rs


class WriterCosts:
    """Chooses the writer of each merge, and learns the costs of the writers of one sink. Several threads may use it."""

    def __init__(self) -> None:
        self.factors = Factors()
        self._by_spark: set[str] = set()
        """URIs of the targets whose last batch Spark merged."""
        self._lock = Lock()

    def is_small(self, work: MergeWork) -> bool:
        """Return whether delta-rs would probably finish this merge before Spark has started its own."""
        factors = self.factors
        return work.fits and factors.delta_rs * work.by_delta_rs() * SWITCHES_AT < factors.spark * SPARK_FIXED

    def choose(self, uri: str, work: MergeWork, cores: int) -> WriterDecision:
        """Choose the writer of a merge into the target at `uri`; cores: the number of Spark's cores."""
        with self._lock:
            spark = not work.fits or self.factors.prefer_spark(work, cores, before=uri in self._by_spark)
            (self._by_spark.add if spark else self._by_spark.discard)(uri)
        if spark:
            return WriterDecision(Writer.SPARK, work.by_spark(cores))
        return WriterDecision(Writer.DELTA_RS, work.by_delta_rs())

    def learn(self, choice: WriterDecision, seconds: float) -> None:
        """Adjust the factors by the measured seconds of a merge. A merge with a short estimate changes nothing."""
        if choice.seconds >= LEARNS_FROM:
            with self._lock:
                self.factors = self.factors.learned(seconds / choice.seconds, spark=choice.writer is Writer.SPARK)


def candidates(files: pa.Table, source: pa.Table, key: Sequence[str]) -> int:
    """Return the total bytes of the target files that may contain a key of the source rows.

    files: the live files, with `size_bytes` and the columns `min.<name>` and `max.<name>` for each key column. A file
    without these bounds may contain any key.
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
