"""Compact: what is cold of `changes` becomes a run of `compacted`, and runs become one when that pays.

Each step is one fenced commit. Killed anywhere, the table is as before it or as after it, and the next call goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from cdc import atomic_file
from cdc.failpoint import hit
from cdc.log import consumers
from cdc.log.compacted_state import CompactedWriter, Run, WrittenFile, read_compacted_state
from cdc.log.fenced_table import sync_commit
from cdc.log.layout import CHANGES, LogFile, commit_file
from cdc.log.object_path import Root, as_root
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.compaction.key_changes import left_behind, moves_in, moves_of, together
from pipelines.compaction.keyless_netting import cancelled
from pipelines.compaction.live_rows import survivors
from pipelines.compaction.row_partitions import packed
from pipelines.compaction.run_files import RunOrder, bases_by_part, run_files, run_files_by_workers
from pipelines.compaction.runs import cold_end, due

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

LARGE: Final = 8_000_000
"""Rows up to which runs are merged in this process, some 150 bytes each in memory; beyond, Spark's workers do it."""
MOST: Final = 4_000_000
"""Rows of a run from which on another one is begun; what they are found by takes some 150 bytes each."""
PART_ROWS: Final = 1_000_000
"""Rows of one part, several hundred bytes each in the memory of who compacts it."""
PART_BYTES: Final = 32 << 20
"""Bytes of the log behind one part of a worker, several times as much in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionLimits:
    """How much is done at once, and where."""

    large: int = LARGE
    """Rows: what has more is given to Spark's workers, if there are any."""
    most: int = MOST
    """Rows of one run, about."""
    parts: int | None = None
    """Into how many the rows are dealt, by default as many as their number asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """What a compaction did."""

    rows_in: int = 0
    rows_out: int = 0
    bytes_in: int = 0
    """Of files of `changes`."""
    bytes_out: int = 0
    """Of the new run."""
    horizon: Position = Position(0)  # noqa: RUF009 - an int, never changed
    merged: int = 0
    """Runs that became one."""
    merged_bytes: int = 0
    """Of that one."""

    def then(self, later: CompactionResult) -> CompactionResult:
        """Both together."""
        counts = ("rows_in", "rows_out", "bytes_in", "bytes_out", "merged", "merged_bytes")
        said = {name: getattr(self, name) + getattr(later, name) for name in counts}
        return CompactionResult(**said, horizon=later.horizon)

    @property
    def summary(self) -> str:
        """One line for people."""
        if not self.rows_in and not self.merged:
            return f"nothing is cold: the log is compacted up to {self.horizon}"
        folded = f"{self.rows_in:,} rows became {self.rows_out:,}, up to {self.horizon}" if self.rows_in else ""
        return "; ".join(filter(None, (folded, f"{self.merged} runs merged" if self.merged else "")))

    def to_json(self) -> dict[str, Any]:
        """As commands print it."""
        return asdict(self) | {"horizon": str(self.horizon)}


def compact(
    spark: SparkSession | None,
    root: str | Root,
    *,
    upto: Position | None = None,
    everything: bool = False,
    limits: CompactionLimits = CompactionLimits(),
) -> CompactionResult:
    """Compact the closed segments of the log under root, and merge runs when they have grown.

    spark: of a cluster, whose executors fold what is large; on one machine this process is faster, and Spark only
    merges what would not fit into memory.
    upto: no segment that ends later. everything: no matter whether its segment is closed, up to `upto` or the end.
    Raises LogFenced if another process compacts the same log, LogCorrupt if a file cannot be read.
    """
    log = LogReader(root)
    writer = CompactedWriter.open(as_root(root), log.identity, log.log_id)
    job = _Job(spark, as_root(root), writer, limits)
    made = total = job.merge(job.append(log, upto, everything=everything))
    while made.rows_in:
        made = job.append(log, upto, everything=everything)
        if made.rows_in:
            made = job.merge(made)
            total = total.then(made)
    return total


def is_large(root: str | Root, *, everything: bool = False, large: int = LARGE) -> bool:
    """Whether compact() may have so much to do now that it should be given Spark."""
    log = LogReader(root)
    held = read_compacted_state(as_root(root), log.log_id)
    after, runs = (Position(0), ()) if held is None else (held.horizon, held.runs)
    ahead = log.files(after, log.durable or after)
    end = log.durable if everything else cold_end(ahead)
    cold = [file for file in ahead if end is not None and file.first <= end]
    sizes = [*(run.size for run in runs), sum(file.size for file in cold)]
    merging = sum(run.rows for run in runs) if due(sizes) is not None else 0
    return sum(file.rows for file in cold) + merging > large


@dataclass(frozen=True, slots=True)
class _Job:
    spark: SparkSession | None
    root: Root
    writer: CompactedWriter
    limits: CompactionLimits

    def append(self, log: LogReader, upto: Position | None, *, everything: bool) -> CompactionResult:
        """One run of what is cold behind the horizon."""
        writer, after = self.writer, self.writer.horizon
        durable_end = log.durable or after
        ahead = log.files(after, durable_end)
        end = min(durable_end, upto or durable_end) if everything else cold_end(ahead, upto)
        files = [] if end is None else [file for file in ahead if file.first <= end]
        if end is None or end <= after or not files:
            return CompactionResult(horizon=after)
        _, folder = writer.new_run()
        order = RunOrder(folder=folder, after=after, upto=end, parts=1)
        with writer.alone():
            made, end = self._made(files, order, self.limits.most)
            hit("compact_written")
            _secure(self.root, log)
            writer.commit(made, horizon=end, floor=writer.floor)
        hit("compact_committed")
        files = [file for file in files if file.first <= end]
        return CompactionResult(
            rows_in=sum(file.rows for file in files),
            rows_out=sum(file.rows for file in made),
            bytes_in=sum(file.size for file in files),
            bytes_out=sum(file.size for file in made),
            horizon=end,
        )

    def merge(self, before: CompactionResult) -> CompactionResult:
        """The runs that are due as one, once the run before is there."""
        writer = self.writer
        first = due([run.size for run in writer.runs])
        if first is None:
            return before
        gone: tuple[Run, ...] = writer.runs[first:]
        # only where all runs come together is nothing older that a delete would have to hide
        floor = _floor(self.root, writer) if first == 0 else writer.floor
        files = [file for run in gone for file in run.files]
        _, folder = writer.new_run()
        order = RunOrder(folder=folder, after=0, upto=writer.horizon, parts=1)
        if first == 0:
            undone = cancelled(files, floor)
            order = replace(order, forget=floor, cancelled=packed(undone) if undone.num_rows else b"")
        with writer.alone():
            made, _ = self._made(files, order)
            hit("merge_written")
            writer.commit(made, horizon=writer.horizon, floor=floor, replaces=[run.number for run in gone])
        hit("merge_committed")
        return replace(before, merged=len(gone), merged_bytes=sum(file.size for file in made))

    def _made(
        self, files: Sequence[LogFile], order: RunOrder, most: int | None = None
    ) -> tuple[list[WrittenFile], Position]:
        """The files of a run and where it ends; it may end early if it is to have about so many rows at most."""
        after, upto = Position(order.after), Position(order.upto)
        if self.spark is not None and self._for_workers(files, self.spark, merging=most is None):
            moves = None if most is None else moves_in(files, after, upto)
            return run_files_by_workers(self.spark, files, self._dealing(order, self._parts(files), moves)), upto
        files = sorted(files, key=attrgetter("first", "path"))
        found, end = survivors(files, after, upto, sys.maxsize if most is None else most)
        parts = self.limits.parts or max(1, -(-found.num_rows // PART_ROWS))
        moves = None if most is None else moves_of(found)
        return run_files(files, found, self._dealing(replace(order, upto=end), parts, moves)), end

    def _dealing(self, order: RunOrder, parts: int, moves: pa.Table | None) -> RunOrder:
        """The order with so many parts; with moves, what they connect comes together, with what they left behind."""
        order = replace(order, parts=parts)
        if moves is None:  # of runs, in which there are none
            return order
        order = replace(order, together=together(moves, parts))
        return replace(order, bases=bases_by_part(left_behind(moves, self.writer.runs), order))

    def _for_workers(self, files: Sequence[LogFile], spark: SparkSession, *, merging: bool) -> bool:
        if self.limits.parts is not None:
            return self.limits.parts > 1
        on_cluster = not spark.sparkContext.master.startswith("local")
        return sum(file.rows for file in files) > self.limits.large and (merging or on_cluster)

    def _parts(self, files: Sequence[LogFile]) -> int:
        rows, size = sum(file.rows for file in files), sum(file.size for file in files)
        return self.limits.parts or max(2, -(-rows // PART_ROWS), -(-size // PART_BYTES))


def _secure(root: Root, log: LogReader) -> None:
    """Bring to the disk what the view has read: visible a moment before, it must not be gone when its run stays."""
    try:
        sync_commit(root / CHANGES, log.version)
    except FileNotFoundError:  # cleaned away, long after its sync
        atomic_file.sync(commit_file(root / CHANGES, log.version).parent)


def _floor(root: Root, writer: CompactedWriter) -> Position:
    """What every consumer has passed; without one nothing is known to be passed."""
    passed = min((consumer.position for consumer in consumers.list_consumers(root)), default=writer.floor)
    return max(writer.floor, min(passed, writer.horizon))
