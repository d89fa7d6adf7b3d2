"""Compaction of the log: closed segments of `changes` become a run of `compacted`, and small runs are merged.

A run has one row per key: its latest state or its tombstone. Every step is one fenced commit. So a kill leaves the
table as it was before or after a step, and the next call continues from there.

The first run has the most keys. It is rewritten only when the later runs together are larger than the first. So each
byte is written two or three times in total. If thousands of runs contain only new keys, it is four to five times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from cdc import atomic_file
from cdc.bucket_files import Root, as_root
from cdc.delta_protocol.commits import commit_file
from cdc.failpoint import hit
from cdc.log import consumers
from cdc.log.compacted_table import CompactedWriter, Run, WrittenFile
from cdc.log.disk_format import CHANGES, LogFile
from cdc.log.fenced_table import sync_commit
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.compaction.key_partitions import read_base_rows, read_partial_moves
from pipelines.compaction.keyless_netting import find_cancelled_halves
from pipelines.compaction.run_writer import RunPlan, bases_by_part, find_live_rows, write_run, write_run_by_workers
from pipelines.folding.key_parts import moves_as_texts, parts_of_moved_keys, to_ipc

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

StartSpark = Callable[[], "SparkSession | None"]
"""Function that starts Spark at its first call, and returns the session; None: the process compacts without Spark."""

LARGE: Final = 8_000_000
"""Number of rows above which Spark's workers merge runs; this process needs 150 bytes of memory per row.

On a cluster, Spark's workers also compact the closed segments if these have more rows than this.
"""
MOST: Final = 4_000_000
"""Approximate maximum number of rows of a new run; finding the rows of a run needs 150 bytes of memory per row."""
PART_ROWS: Final = 1_000_000
"""Approximate maximum number of log rows in one part of a run; compacting a row needs several hundred bytes."""
PART_BYTES: Final = 32 << 20
"""Approximate maximum log bytes of a part that a Spark worker compacts; this needs several times as much memory."""
MOST_RUNS: Final = 64
"""Maximum number of runs after the first run; more runs are merged, because a read opens every run."""
SMALLER: Final = 4
"""Ratio of sizes that selects the runs to merge, if there are more than MOST_RUNS.

Merging begins at the oldest run for which the later runs together are at least this many times as large. So the merge
rewrites few bytes of old rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionLimits:
    """Limits of one compaction."""

    large: int = LARGE
    """Number of rows above which Spark's workers merge runs and, on a cluster, compact segments."""
    most: int = MOST
    """Approximate maximum number of rows of one new run."""
    parts: int | None = None
    """Number of parts into which a run is divided; None: computed from its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """The result of a compaction."""

    rows_in: int = 0
    """Number of rows in the compacted files of `changes`."""
    rows_out: int = 0
    """Number of rows in the new runs."""
    bytes_in: int = 0
    """Total bytes of the compacted files of `changes`."""
    bytes_out: int = 0
    """Total bytes of the new runs."""
    horizon: Position = Position(0)  # noqa: RUF009 - an int, never changed
    merged: int = 0
    """Number of runs that were merged into one."""
    merged_bytes: int = 0
    """Bytes of the run that replaced the merged runs."""

    def then(self, later: CompactionResult) -> CompactionResult:
        """Return the sum of two results; the horizon is the horizon of `later`."""
        names = ("rows_in", "rows_out", "bytes_in", "bytes_out", "merged", "merged_bytes")
        sums = {name: getattr(self, name) + getattr(later, name) for name in names}
        return CompactionResult(**sums, horizon=later.horizon)

    @property
    def summary(self) -> str:
        """The result as one line of text."""
        if not self.rows_in and not self.merged:
            return f"nothing to compact: the log is compacted up to {self.horizon}"
        folded = f"compacted {self.rows_in:,} rows into {self.rows_out:,}, up to {self.horizon}" if self.rows_in else ""
        return "; ".join(filter(None, (folded, f"merged {self.merged} runs" if self.merged else "")))

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON document for commands to print."""
        return asdict(self) | {"horizon": str(self.horizon)}


def compact(
    spark: SparkSession | StartSpark | None,
    root: str | Root,
    *,
    upto: Position | None = None,
    everything: bool = False,
    limits: CompactionLimits = CompactionLimits(),
) -> CompactionResult:
    """Compact the closed segments of the log under root, then merge runs if `first_run_to_merge` selects any.

    spark: on a cluster, executors compact large ranges and merge large runs. On one machine this process compacts
    faster, so Spark merges only runs that do not fit into the memory of this process. A function, on one machine, is
    called for each such merge. None: Spark is not used.
    upto: compact no segment that ends later. everything: also compact segments that are not closed.
    Raises LogFenced if another process compacts the same log, and LogCorrupt if a file cannot be read.
    """
    log = LogReader(root)
    writer = CompactedWriter.open(as_root(root), log.identity, log.log_id)
    job = _Compaction(spark, as_root(root), writer, limits)
    step = total = job.merge(job.append(log, upto, everything=everything))
    while step.rows_in:
        step = job.append(log, upto, everything=everything)
        if step.rows_in:
            step = job.merge(step)
            total = total.then(step)
    return total


def cold_end(files: Sequence[LogFile], upto: Position | None = None) -> Position | None:
    """Return the end of the last closed segment that ends at or before `upto`; None if there is none.

    files: the files after the horizon. The segment with the highest number is not closed. If a transaction continues
    in a later segment, the returned position is before that transaction.
    """
    closed = [file for file in files if file.segment < max(f.segment for f in files)]
    late = [file.segment for file in closed if upto is not None and file.last > upto]
    complete = [file for file in closed if not late or file.segment < min(late)]
    if not complete:
        return None
    last_segment = max(file.segment for file in complete)
    next_first = min(file.first for file in files if file.segment > last_segment)
    return Position(min(max(file.last for file in complete), next_first - 1))


def first_run_to_merge(sizes: Sequence[int], most: int = MOST_RUNS) -> int | None:
    """Return the index of the oldest run to merge; all later runs are merged with it. None: no merge is needed.

    sizes: bytes of the runs, oldest first.
    """
    if len(sizes) < 2:  # noqa: PLR2004 - a merge needs two
        return None
    if sum(sizes[1:]) > sizes[0]:
        return 0
    if len(sizes) - 1 <= most:
        return None
    small = (n for n in range(1, len(sizes) - 1) if SMALLER * sizes[n] <= sum(sizes[n + 1 :]))
    return next(small, len(sizes) - 2)


@dataclass(frozen=True, slots=True)
class _Compaction:
    spark: SparkSession | StartSpark | None
    root: Root
    writer: CompactedWriter
    limits: CompactionLimits

    def append(self, log: LogReader, upto: Position | None, *, everything: bool) -> CompactionResult:
        """Append one run, compacted from the closed segments after the horizon.

        upto: maximum end position of the run. everything: also compact segments that are not closed. The result has no
        rows if there was nothing to compact.
        """
        writer, after = self.writer, self.writer.horizon
        durable_end = log.durable or after
        ahead = log.files(after, durable_end)
        end = min(durable_end, upto or durable_end) if everything else cold_end(ahead, upto)
        files = [] if end is None else [file for file in ahead if file.first <= end]
        if end is None or end <= after or not files:
            return CompactionResult(horizon=after)
        _, folder = writer.new_run()
        plan = RunPlan(folder=folder, after=after, upto=end, parts=1)
        with writer.alone():
            written, end = self._write(files, plan, self.limits.most)
            hit("compact_written")
            _sync_read_commit(self.root, log)
            writer.commit(written, horizon=end, floor=writer.floor)
        hit("compact_committed")
        files = [file for file in files if file.first <= end]
        return CompactionResult(
            rows_in=sum(file.rows for file in files),
            rows_out=sum(file.rows for file in written),
            bytes_in=sum(file.size for file in files),
            bytes_out=sum(file.size for file in written),
            horizon=end,
        )

    def merge(self, before: CompactionResult) -> CompactionResult:
        """Merge the last runs into one if needed.

        before: the result of the preceding append. Returns it with `merged` and `merged_bytes` of this merge.
        """
        writer = self.writer
        first = first_run_to_merge([run.size for run in writer.runs])
        if first is None:
            return before
        replaced: tuple[Run, ...] = writer.runs[first:]
        # tombstones hide rows of older runs, so they can be removed only if no older run remains
        floor = _new_floor(self.root, writer) if first == 0 else writer.floor
        files = [file for run in replaced for file in run.files]
        _, folder = writer.new_run()
        plan = RunPlan(folder=folder, after=0, upto=writer.horizon, parts=1)
        if first == 0:
            cancelled = find_cancelled_halves(files, floor)
            plan = replace(plan, tombstone_floor=floor, cancelled=to_ipc(cancelled) if cancelled.num_rows else b"")
        with writer.alone():
            written, _ = self._write(files, plan)
            hit("merge_written")
            writer.commit(written, horizon=writer.horizon, floor=floor, replaces=[run.number for run in replaced])
        hit("merge_committed")
        return replace(before, merged=len(replaced), merged_bytes=sum(file.size for file in written))

    def _write(
        self, files: Sequence[LogFile], plan: RunPlan, most: int | None = None
    ) -> tuple[list[WrittenFile], Position]:
        """Write a run; return its files and the position at which it ends.

        most: maximum number of rows in the run. If the files have more needed rows, the run may end before `plan.upto`.
        None: the files are runs to merge, and there is no limit.
        """
        after, upto = Position(plan.after), Position(plan.upto)
        if (session := self._session_for(files, merging=most is None)) is not None:
            moves = None if most is None else read_partial_moves(files, after, upto)
            return write_run_by_workers(session, files, self._with_parts(plan, self._parts(files), moves)), upto
        files = sorted(files, key=attrgetter("first", "path"))
        live, end = find_live_rows(files, after, upto, sys.maxsize if most is None else most)
        parts = self.limits.parts or max(1, -(-live.num_rows // PART_ROWS))
        moves = None if most is None else moves_as_texts(live)
        return write_run(files, live, self._with_parts(replace(plan, upto=end), parts, moves)), end

    def _with_parts(self, plan: RunPlan, parts: int, moves: pa.Table | None) -> RunPlan:
        """Return a copy of the plan that divides the run into `parts` parts.

        moves: the updates with a partial image that changed the key of a row; None if the files have none. The returned
        plan contains the parts of their old and new keys, and their base rows from older runs.
        """
        plan = replace(plan, parts=parts)
        if moves is None:  # runs have no moves
            return plan
        plan = replace(plan, moved_parts=parts_of_moved_keys(moves, parts))
        return replace(plan, bases=bases_by_part(read_base_rows(moves, self.writer.runs), plan))

    def _session_for(self, files: Sequence[LogFile], *, merging: bool) -> SparkSession | None:
        """Return the session whose workers write a run; None if this process writes it."""
        if self.spark is None:
            return None
        if self.limits.parts is None:
            on_cluster = not callable(self.spark) and not self.spark.sparkContext.master.startswith("local")
            by_workers = sum(file.rows for file in files) > self.limits.large and (merging or on_cluster)
        else:
            by_workers = self.limits.parts > 1
        if not by_workers:
            return None
        return self.spark() if callable(self.spark) else self.spark

    def _parts(self, files: Sequence[LogFile]) -> int:
        rows, size = sum(file.rows for file in files), sum(file.size for file in files)
        return self.limits.parts or max(2, -(-rows // PART_ROWS), -(-size // PART_BYTES))


def _sync_read_commit(root: Root, log: LogReader) -> None:
    """Sync to disk the last commit of `changes` that the compaction has read.

    Otherwise a crash could lose that commit and keep the new run.
    """
    try:
        sync_commit(root / CHANGES, log.version)
    except FileNotFoundError:  # removed as an old commit, long after its sync
        atomic_file.sync(commit_file(root / CHANGES, log.version).parent)


def _new_floor(root: Root, writer: CompactedWriter) -> Position:
    """Return the new floor: the lowest position of all consumers, at least the old floor and at most the horizon."""
    passed = min((consumer.position for consumer in consumers.list_consumers(root)), default=writer.floor)
    return max(writer.floor, min(passed, writer.horizon))
