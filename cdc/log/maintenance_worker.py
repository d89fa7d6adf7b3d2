"""Background thread of the reader process, which keeps the log small.

Every 30 s, or after a request, the thread deletes removed files and plans a trim. Every 5 s it looks for small files
and merges them into larger ones. Only the append thread may change the table. It commits the prepared trim and rewrite
between two appends. A failed attempt is logged and repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Final, Protocol, Self

import pyarrow as pa
import structlog
from deltalake.exceptions import DeltaError

from cdc.bucket_files import BucketPath, Root, as_root
from cdc.byte_queue import QueueClosed
from cdc.errors import CdcError, LogCorrupt
from cdc.log.small_file_rewrite import RewritingWriter, SmallFileRewriter
from cdc.log.trim_plan import REQUEST_FILE, Retention, TrimPlan, plan_trim
from cdc.log.vacuum import vacuum
from cdc.position import Position
from cdc.thread_priority import lower_thread_priority

PLAN_EVERY: Final = 30.0
"""Seconds between two plans of a trim; a segment exists for minutes at least."""
CHECK_REQUEST_EVERY: Final = 0.5
"""Seconds between two checks whether REQUEST_FILE exists on a disk; each check costs one `stat` call."""
CHECK_REMOTE_REQUEST_EVERY: Final = 5.0
"""Seconds between two checks whether REQUEST_FILE exists in an object store; each check is an HTTP request."""
REWRITE_EVERY: Final = 5.0
"""Seconds between two searches for small files.

A writer can add many files in that time, and a search costs a millisecond.
"""
NICE_INCREMENT: Final = 10
"""Amount by which the thread's nice value is increased.

A rewrite of a large segment takes a minute of CPU, and the threads of the stream need the same cores.
"""
_FAILURES: Final = (CdcError, OSError, DeltaError, pa.ArrowException)
"""Errors of the log's storage and files, after which the thread logs a warning and tries again."""

log = structlog.get_logger("trimmer")


class TrimmingWriter(RewritingWriter, Protocol):
    """A writer of the log that can remove segments and replace small files."""

    def trim(self, segments: tuple[int, ...], upto: Position) -> None:
        """Remove segments as `LogWriter.trim` does."""


class RetentionWorker:
    """Thread that keeps one log small while its reader runs; it does nothing if `retention` is None.

    It deletes removed files, plans trims, and prepares rewrites of small files.
    """

    def __init__(self, root: str | Root, retention: Retention | None, wake: Callable[[], None]) -> None:
        """Prepare the worker without starting it.

        The worker calls `wake` to make the append thread call `commit_prepared`. `wake` raises QueueClosed if the
        append thread has ended.
        """
        self._root, self._retention, self._wake = as_root(root), retention, wake
        self._planned: TrimPlan | None = None
        self._planned_segments: tuple[int, ...] = ()
        self._end = Event()
        self._rewriter = SmallFileRewriter(self._root, self._end.is_set)
        self._thread = Thread(target=self._run, name="trimmer", daemon=True)

    def __enter__(self) -> Self:
        if self._retention is not None:
            self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def commit_prepared(self, writer: TrimmingWriter) -> TrimPlan | None:
        """Commit the prepared rewrite and the planned trim; return the trim, or None if nothing was trimmed.

        Only the append thread may call this method, and only while all files that it wrote are committed.
        """
        self._rewriter.commit_prepared(writer)
        trim, self._planned = self._planned, None
        if trim is None:
            return None
        try:
            writer.trim(trim.segments, trim.upto)
        except LogCorrupt as exc:  # `compacted` was replaced after the plan
            log.warning(
                "cannot commit the planned trim of the log: the segments stay, and a new trim is planned in 30 s",
                code=exc.code,
                message=exc.message,
            )
            return None
        log.info("trimmed the log", segments=len(trim.segments), oldest=str(trim.upto))
        return trim

    def _run(self) -> None:
        lower_thread_priority(NICE_INCREMENT)
        plan_at = rewrite_at = 0.0
        seconds = CHECK_REMOTE_REQUEST_EVERY if isinstance(self._root, BucketPath) else CHECK_REQUEST_EVERY
        while not self._end.wait(seconds):
            request = self._read_request()
            if time.monotonic() >= plan_at or request is not None:
                plan_at = time.monotonic() + PLAN_EVERY
                if not self._attempt(
                    self._plan, "cannot plan a trim of the log: old segments stay, and the next attempt follows in 30 s"
                ):
                    return
                if self._read_request() == request:  # a later request may follow a compaction that this plan missed
                    (self._root / REQUEST_FILE).unlink(missing_ok=True)
            if time.monotonic() >= rewrite_at:
                rewrite_at = time.monotonic() + REWRITE_EVERY
                if not self._attempt(
                    self._prepare_rewrite,
                    "cannot merge small files of the log: they stay, and the next attempt follows in 5 s",
                ):
                    return

    def _attempt(self, action: Callable[[], None], failure: str) -> bool:
        """Call `action`; if it fails, log `failure` with the error. Return False if the append thread has ended."""
        try:
            action()
        except QueueClosed:
            return False
        except _FAILURES as exc:
            log.warning(failure, message=str(exc))
        return True

    def _read_request(self) -> tuple[int, bytes] | None:
        """Return modification time and content of REQUEST_FILE, which requests a trim; None if there is no file."""
        path = self._root / REQUEST_FILE
        try:
            # an object store reports whole seconds, but no two requests have the same content
            return path.stat().st_mtime_ns, path.read_bytes()
        except FileNotFoundError:
            return None

    def _plan(self) -> None:
        if self._retention is None:
            return
        try:
            deleted = vacuum(self._root, self._retention)
        except _FAILURES as exc:
            log.warning(
                "cannot delete removed files of the log: they keep their disk space, no trim is planned, and the "
                "next attempt follows in 30 s",
                message=str(exc),
            )
            return
        if deleted.files:
            log.info(
                "vacuum deleted files that had left the tables of the log", files=deleted.files, bytes=deleted.size
            )
        plan = plan_trim(self._root, self._retention)
        self._planned_segments = () if plan is None else plan.segments
        self._planned = plan
        if plan is not None:
            self._wake()

    def _prepare_rewrite(self) -> None:
        if self._rewriter.prepare(self._planned_segments):
            self._wake()
