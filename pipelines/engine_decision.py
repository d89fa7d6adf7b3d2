"""Which engine applies what waits for a sink: this process (`here`), or the executors of Spark (`spark`).

`decide` is the only place that answers this. The runner of a sink asks about everything that waits. The streaming
query, a catch-up and a replay ask about one range.

    with engine `auto`                      local master              cluster
    --------------------------------------  ------------------------  ------------------------------------------
    SPARK_ROWS and SPARK_BYTES at most      here, in slices           here, in slices
    more waits                              here, in slices           spark, in one micro-batch; here, in slices,
                                                                      while the cluster gives no core
    the next batch is too large for the     spark                     spark
    memory of this process

A slice has SLICE_ROWS rows. The next batch is larger than that if it is one transaction, or the state of a compacted
log, which no range can divide. On one machine Spark has the same cores as this process and needs more of them for a
row, so only memory is a reason to use it there. With engine `spark` every range that has rows goes to Spark. With
engine `here` none does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Self

from cdc.allocators import usable_memory
from cdc.config import EngineChoice
from cdc.log.disk_format import LogFile
from cdc.log.file_selection import MAX_BYTES

SMALL: Final = 50_000
"""Maximum rows of a range that this process always takes, whatever its rows are; it folds them in 0.2 s."""
HERE_BYTES: Final = 192 << 20
"""Maximum bytes in the log files of a larger range that this process takes.

Two million rows take three seconds on the driver, and ten seconds in Spark on two cores. In memory they are three times
as large as on disk.
"""
PARTIAL_ROWS: Final = 250_000
"""Maximum rows in the log files with partial images of such a range.

If partial images moved rows to other keys, the rows of these keys are folded one by one, and need much more memory.
"""
SLICE_ROWS: Final = 200_000
"""Rows of a slice of a backlog that this process takes: about half a second of folding on two cores."""
SPARK_ROWS: Final = 1_000_000
"""Rows above which a backlog goes to the executors of a cluster.

This process needs three seconds for them. A micro-batch takes that long to be planned, started and committed, so for
fewer rows executors gain nothing.
"""
SPARK_BYTES: Final = 256 << 20
"""Bytes of log files above which a backlog of fewer, wide rows goes to the executors: four slices."""
MICRO_BATCH_ROWS: Final = 5_000_000
"""Approximate maximum of rows of a micro-batch that executors fold.

The fixed cost of the micro-batch is then below a tenth of its time on a few cores. A longer one would delay the cut
that readers wait for, and would be lost as a whole when the driver dies.
"""
MICRO_BATCH_BYTES: Final = 2 << 30
"""Maximum bytes of log files of such a micro-batch: at 64 MiB per task, two rounds of sixteen cores.

It is HERE_BYTES if the folded rows of any table come to the driver.
"""

DRIVER_SHARE: Final = 4
"""Divisor of the memory that the process may use, for the folded rows of a range that executors send to it.

A merge on the driver has them a second time as typed rows, and a third time while it writes them.
"""


class Engine(StrEnum):
    """What applied a batch, or applies the next one."""

    #: The apply process reads, folds and merges.
    HERE = "here"
    #: A micro-batch of the streaming query of the sink.
    SPARK = "spark"


@dataclass(frozen=True, slots=True)
class RangeSize:
    """What the log files of a range contain; files that the range shares with others count whole."""

    rows: int = 0
    nbytes: int = 0
    partial_rows: int = 0
    """Rows in files that contain partial images."""

    @classmethod
    def of(cls, files: Iterable[LogFile]) -> Self:
        """Add up the files of a range."""
        rows = nbytes = partial_rows = 0
        for file in files:
            rows += file.rows
            nbytes += file.size
            partial_rows += file.rows if file.partial else 0
        return cls(rows, nbytes, partial_rows)

    def __str__(self) -> str:
        partial = f", {self.partial_rows:,} of them in files with partial images" if self.partial_rows else ""
        return f"{self.rows:,} rows in {self.nbytes:,} bytes of log files{partial}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The sizes at which the decision changes; tests lower them."""

    small_rows: int = SMALL
    here_bytes: int = HERE_BYTES
    partial_rows: int = PARTIAL_ROWS
    slice_rows: int = SLICE_ROWS
    spark_rows: int = SPARK_ROWS
    spark_bytes: int = SPARK_BYTES
    micro_batch_rows: int = MICRO_BATCH_ROWS
    micro_batch_bytes: int = MICRO_BATCH_BYTES
    driver_bytes: int = field(default_factory=lambda: usable_memory() // DRIVER_SHARE)
    """Maximum bytes of folded rows of a range, as Arrow, that executors send to this process."""

    def fits_here(self, batch: RangeSize) -> bool:
        """Return whether the memory of this process is enough to fold the batch."""
        if batch.rows <= self.small_rows:
            return True
        return batch.partial_rows <= self.partial_rows and batch.nbytes <= self.here_bytes

    def is_for_cluster(self, backlog: RangeSize, last: Engine) -> bool:
        """Return whether a backlog is worth a micro-batch on a cluster.

        last: what applied the last batch. After a micro-batch the next one follows until a single slice is left, so
        that a backlog near the limit does not change from one engine to the other with every batch.
        """
        rows = self.spark_rows
        nbytes = self.spark_bytes
        partial_rows = self.partial_rows
        if last is Engine.SPARK:
            rows = self.slice_rows
            nbytes = MAX_BYTES
            partial_rows = self.small_rows
        return backlog.rows > rows or backlog.nbytes > nbytes or backlog.partial_rows > partial_rows

    def micro_batch(self, choice: EngineChoice, *, is_cluster: bool) -> tuple[int, int]:
        """Return the approximate rows and the bytes of a micro-batch of the streaming query.

        On one machine with `auto` the query is there for single transactions that are too large, so that the slices
        between them stay small.
        """
        if choice is EngineChoice.SPARK or is_cluster:
            return self.micro_batch_rows, self.micro_batch_bytes
        return self.slice_rows, MAX_BYTES


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores with which Spark would apply a batch."""

    is_cluster: bool
    """Whether executors are other processes than the driver."""
    free: int
    """Cores of the executors that run no task; without meaning on one machine."""


ONE_MACHINE: Final = Cores(is_cluster=False, free=0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the log has for a sink."""

    next_batch: RangeSize
    """The smallest range that this process could take next: a slice, or one transaction, or a compacted state."""
    backlog: RangeSize
    """Everything from the sink's position to the durable position."""
    is_compacted: bool = False
    """Whether the next batch begins with the state of a compacted log, which is taken whole."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What applies the next batch, and whether the streaming query has to run."""

    engine: Engine
    spark_reason: str = ""
    """Why what waits is for Spark; empty if it is not. With the engine `here`, Spark takes over once it has a core."""

    @property
    def wants_spark(self) -> bool:
        """Whether the streaming query has to run."""
        return bool(self.spark_reason)


TAKEN_HERE: Final = Decision(Engine.HERE)
"""What waits is for this process, or nothing waits."""


def decide(waiting: Waiting, choice: EngineChoice, limits: EngineLimits, cores: Cores, last: Engine) -> Decision:
    """Return what applies the next batch; the table at the top of this module says when.

    last: what applied the last batch of the sink. If `choice` is HERE, the result is `here` also for a batch that does
    not fit; the caller checks that by `EngineLimits.fits_here`.
    """
    if choice is EngineChoice.HERE or not waiting.backlog.rows:
        return TAKEN_HERE
    if choice is EngineChoice.SPARK:
        return Decision(Engine.SPARK, "spark.engine is 'spark'")
    if not limits.fits_here(waiting.next_batch):
        kind = "the state of the compacted log" if waiting.is_compacted else "the next batch"
        return Decision(Engine.SPARK, f"{kind} is too large for this process: {waiting.next_batch}")
    if cores.is_cluster and limits.is_for_cluster(waiting.backlog, last):
        return Decision(Engine.SPARK if cores.free else Engine.HERE, f"a backlog waits: {waiting.backlog}")
    return TAKEN_HERE
