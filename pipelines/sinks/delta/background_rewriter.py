"""Background rewriter: rewrites data files of a sink's targets in one thread, while the sink merges.

It is for targets that the indexed writer has open. `finish` and the `start_…` methods are called between merges and
take as long as a small merge: they commit the file that the thread has written, and choose the next ones to rewrite.
The thread reads at most RATE bytes per second, so that merges keep most of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final

from pipelines.sinks.delta.delta_target import APP_ID, DeltaTarget
from pipelines.sinks.delta.file_compaction import files_with_deleted_rows, small_files, together
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.indexed_writer import IndexedRewrite, IndexedTable
from pipelines.sinks.delta.open_indexed_tables import IndexedTargets

RATE: Final = 16 << 20
"""Bytes of data files that the thread reads per second."""
SMALL: Final = 16 << 20
"""Bytes. A smaller file is merged with others once there are many."""


class RewriteStopped(Exception):
    """Raised in the thread when the sink is closed."""


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
        """Return whether files are being rewritten: of the target at `uri`, or of any target."""
        return self._running is not None and uri in {None, self._running.uri}

    @property
    def rewritten(self) -> str | None:
        """URI of the target of which files have been rewritten, or could not be; `finish` is due. None: no target."""
        return self._running.uri if self._running is not None and self._running.result.done() else None

    def rewrites(self, target: DeltaTarget) -> bool:
        """Return whether this rewriter, and not delta-rs, rewrites files of the target."""
        return bool(self._indexed.opened(target))

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
            return False
        if not running.table.commit_rewrite(done, {APP_ID: target.identity}, target.all_columns):
            return False
        target.refresh()
        return True

    def start_merge_of_small_files(self, target: DeltaTarget) -> bool:
        """Start to merge small files of a target; return whether there are any."""
        for table in self._indexed.opened(target):
            if found := small_files(table.own_files().values(), SMALL):
                self._start(target, table, together(found))
                return True
        return False

    def start_purge(self, target: DeltaTarget) -> bool:
        """Start to rewrite files with many deleted rows; return whether there are any."""
        for table in self._indexed.opened(target):
            if found := files_with_deleted_rows(table.own_files().values()):
                # a file of its own for each: rows that were sorted together stay together
                self._start(target, table, found[:1] if target.cluster_by else together(found))
                return True
        return False

    def close(self) -> None:
        """Stop the thread; what it has written is not committed."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._running = None, None
        self._stop = Event()

    def _start(self, target: DeltaTarget, table: IndexedTable, files: Sequence[LiveFile]) -> None:
        if self._running is not None:
            raise ValueError("the thread still rewrites the files of an earlier call")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rewrite")
        columns, described, pace = target.all_columns.names, target.statistics_columns, _Pace(self._rate, self._stop)
        result = self._pool.submit(table.rewrite, tuple(files), columns, described, pace)
        self._running = _Running(target.uri, table, result)


class _Pace:
    """Waits so that not more than a rate of bytes is copied."""

    def __init__(self, rate: float, stop: Event) -> None:
        self._rate, self._stop, self._copied, self._began = rate, stop, 0, time.monotonic()

    def __call__(self, copied: int) -> None:
        """Wait until `copied` more bytes are within the rate. Raises RewriteStopped when the sink is closed."""
        self._copied += copied
        if self._stop.wait(max(0.0, self._began + self._copied / self._rate - time.monotonic())):
            raise RewriteStopped
