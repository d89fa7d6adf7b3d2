"""Background rewriter: rewrites data files of a sink's targets in one thread, while the sink merges.

It rewrites files only of targets with deletion vectors that the indexed writer has open. Its methods are called between
merges, and each call takes as long as a small merge. `finish` commits the file that the thread has written. A `start_…`
method chooses the files that the thread rewrites next. The thread reads at most RATE bytes per second, so that most of
the machine's capacity stays free for merges.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final

from cdc.thread_priority import lower_thread_priority
from pipelines.sinks.delta.delta_target import APP_ID, DeltaTarget
from pipelines.sinks.delta.file_compaction import files_with_deleted_rows, small_files, together
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.indexed_writer import IndexedRewrite, IndexedTable
from pipelines.sinks.delta.open_indexed_tables import IndexedTargets

RATE: Final = 16 << 20
"""Bytes of data files that the thread reads per second."""
SMALL: Final = 16 << 20
"""Size in bytes below which a data file counts as small. Small files of a target are merged once there are many."""
MERGE_ABOVE: Final = 32
"""Number of new files of a target after which its small files are merged. The indexed writer does not open all files of
a target, but readers do.
"""
NICE_INCREMENT: Final = 10
"""Amount by which the nice value of the thread is increased, because merges need the same cores."""


class RewriteStopped(Exception):
    """Raised in the thread that rewrites files, to end it when the sink is closed."""


@dataclass(frozen=True, slots=True)
class _Running:
    """The rewrite that the thread works on."""

    uri: str
    table: IndexedTable
    result: Future[IndexedRewrite]


class BackgroundRewriter:
    """Rewrites files of one sink's targets, one group of files at a time."""

    def __init__(self, indexed: IndexedTargets, rate: float = RATE) -> None:
        self._indexed, self._rate = indexed, rate
        self._stop = Event()
        self._running: _Running | None = None
        self._pool: ThreadPoolExecutor | None = None

    def is_busy(self, uri: str | None = None) -> bool:
        """Return whether a rewrite of the target at `uri` runs or waits for `finish`; None: of any target."""
        return self._running is not None and uri in {None, self._running.uri}

    @property
    def rewritten(self) -> str | None:
        """URI of the target whose rewrite has ended or failed, so that `finish` is due; None if there is none."""
        return self._running.uri if self._running is not None and self._running.result.done() else None

    def rewrites(self, target: DeltaTarget) -> bool:
        """Return whether this rewriter, and not delta-rs, rewrites files of the target."""
        return bool(self._tables(target))

    def data_paths(self, target: DeltaTarget) -> frozenset[str] | None:
        """See IndexedTargets.data_paths."""
        return self._indexed.data_paths(target)

    def finish(self, targets: Mapping[str, DeltaTarget], *, wait: bool = False) -> bool:
        """Commit the rewritten file if the thread has written it; return whether the table was changed.

        targets: URI → open target. wait: wait for the thread.
        """
        running = self._running
        if running is None or not (wait or running.result.done()):
            return False
        self._running = None
        done, target = running.result.result(), targets.get(running.uri)
        # the target may have been closed, or replaced by a replay
        if target is None or running.table not in self._indexed.opened(target):
            running.table.index.discard(done.entries)
            return False
        since = target.version
        if not running.table.commit_rewrite(done, {APP_ID: target.identity}):
            return False
        target.current.record_own_commit(since, running.table.files.version, {})
        return True

    def start_merge_of_small_files(self, target: DeltaTarget) -> bool:
        """Start to merge small files of a target; return whether there are any."""
        for table in self._tables(target):
            if found := small_files(table.own_files().values(), SMALL):
                self._start(target, table, together(found))
                return True
        return False

    def start_purge(self, target: DeltaTarget) -> bool:
        """Start to rewrite files with many deleted rows; return whether there are any."""
        for table in self._tables(target):
            if found := files_with_deleted_rows(table.own_files().values()):
                # a file of its own for each: rows that were sorted together stay together
                self._start(target, table, found[:1] if target.cluster_by else together(found))
                return True
        return False

    def close(self) -> None:
        """Stop the thread; a file that it has written is not committed."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._running = None, None
        self._stop = Event()

    def _tables(self, target: DeltaTarget) -> list[IndexedTable]:
        return [table for table in self._indexed.opened(target) if table.has_vectors]

    def _start(self, target: DeltaTarget, table: IndexedTable, files: Sequence[LiveFile]) -> None:
        if self._running is not None:
            raise ValueError("the thread still rewrites the files of an earlier call")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "rewrite", lower_thread_priority, (NICE_INCREMENT,))
        columns, described, pace = target.all_columns.names, target.statistics_columns, _Pace(self._rate, self._stop)
        result = self._pool.submit(table.rewrite, tuple(files), columns, described, pace)
        self._running = _Running(target.uri, table, result)


class _Pace:
    """Limits the bytes per second that a rewrite copies."""

    def __init__(self, rate: float, stop: Event) -> None:
        self._rate, self._stop, self._copied, self._began = rate, stop, 0, time.monotonic()

    def __call__(self, copied: int) -> None:
        """Wait until the rate allows `copied` more bytes. Raises RewriteStopped if the sink is closed meanwhile."""
        self._copied += copied
        if self._stop.wait(max(0.0, self._began + self._copied / self._rate - time.monotonic())):
            raise RewriteStopped
