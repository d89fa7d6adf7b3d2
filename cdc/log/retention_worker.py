"""Background thread of the reader that plans trims and rewrites of small files; the committing thread executes them.

It looks from a thread of its own, seldom, or soon after somebody has asked; a failed look is told and tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import Final, Protocol, Self

import pyarrow as pa
import structlog
from deltalake.exceptions import DeltaError

from cdc.byte_queue import QueueClosed
from cdc.errors import CdcError, LogCorrupt
from cdc.log import consumers
from cdc.log.boot_clock import SECOND
from cdc.log.compacted_state import secured_horizon
from cdc.log.layout import COMPACTED
from cdc.log.object_path import BucketPath, Root, as_root
from cdc.log.reader import LogReader
from cdc.log.retention import Retention, trimmable
from cdc.log.small_file_rewrite import Rewrites, SmallFileRewriter
from cdc.log.vacuum import vacuum
from cdc.position import Position
from cdc.table import TableState

LOOK_EVERY: Final = 30.0
"""Seconds between looks: a segment lives for minutes at least."""
ASKED_EVERY: Final = 0.5
"""Seconds between two looks for somebody who asks; each is a stat."""
ASKED_FAR_EVERY: Final = 5.0
"""The same in an object store, where each is a request that is paid for."""
SETTLE_EVERY: Final = 5.0
"""Seconds between two looks for small files; many come in as short a time, and a look at few costs a millisecond."""
REQUEST_FILE: Final = "_trim"
"""Under the log's root: there while somebody waits for a look."""

log = structlog.get_logger("trimmer")


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """What may go from `changes`."""

    segments: tuple[int, ...]
    upto: Position
    """The last position in them."""


class TrimmingWriter(Rewrites, Protocol):
    """The methods of the log's writer that trimming and the rewriting of small files need."""

    def trim(self, segments: tuple[int, ...], upto: Position) -> None:
        """As LogWriter.trim."""


def request_trim(root: str | Root) -> None:
    """Let the reader of the log under root look at once; the file is gone once it has."""
    (as_root(root) / REQUEST_FILE).touch()


def plan_trim(root: str | Root, retention: Retention) -> TrimPlan | None:
    """What may go of the log under root as it is now, None if nothing."""
    root = as_root(root)
    if not (root / COMPACTED).is_dir():
        return None
    view = LogReader(root)
    segments, upto = trimmable(
        view.segments(),
        horizon=secured_horizon(root, view.log_id),
        consumers=consumers.list_consumers(root),
        max_age=retention.max_age,
        now_us=int(time.time() * SECOND),
    )
    # a copy that is on its way asks the log what has changed since it began
    if segments and (began := oldest_copy_start(view)) is not None and began < upto:
        kept = [one for one in view.segments() if one.segment in segments and one.last <= began]
        segments, upto = [one.segment for one in kept], max((one.last for one in kept), default=Position(0))
    return TrimPlan(tuple(segments), upto) if segments else None


def oldest_copy_start(view: LogReader) -> Position | None:
    """Where the first of the copies began that have not ended; None if there is none."""
    open_since: dict[int, Position] = {}
    for place, schema in view.schema_history():
        if schema.state is TableState.SNAPSHOTTING:
            open_since.setdefault(schema.relation, place.position)
        else:
            open_since.pop(schema.relation, None)
    return min(open_since.values(), default=None)


class RetentionWorker:
    """Keeps one log short while its reader runs; does nothing without a retention."""

    def __init__(self, root: str | Root, retention: Retention | None, wake: Callable[[], None]) -> None:
        """wake: lets the committing thread pass by soon; PipeClosed from it means that there is none any more."""
        self._root, self._retention, self._wake = as_root(root), retention, wake
        self._offered: TrimPlan | None = None
        self._spared: tuple[int, ...] = ()
        self._end = Event()
        self._settling = SmallFileRewriter(self._root, self._end.is_set)
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

    def carry_out(self, writer: TrimmingWriter) -> TrimPlan | None:
        """Trim what was found to be due, and settle; for the committing thread, while it has nothing staged."""
        self._settling.carry_out(writer)
        trim, self._offered = self._offered, None
        if trim is None:
            return None
        try:
            writer.trim(trim.segments, trim.upto)
        except LogCorrupt as exc:  # somebody has put something else in the place of `compacted` meanwhile
            log.warning("the log is not trimmed", code=exc.code, message=exc.message)
            return None
        log.info("trimmed", segments=len(trim.segments), oldest=str(trim.upto))
        return trim

    def _run(self) -> None:
        due_at = settle_at = 0.0
        pause = ASKED_FAR_EVERY if isinstance(self._root, BucketPath) else ASKED_EVERY
        while not self._end.wait(pause):
            asked = self._asked()
            if time.monotonic() >= due_at or asked is not None:
                due_at = time.monotonic() + LOOK_EVERY
                if not self._going_on(self._look, "the log is not trimmed"):
                    return
                if self._asked() == asked:  # who asked meanwhile may have compacted meanwhile
                    (self._root / REQUEST_FILE).unlink(missing_ok=True)
            if time.monotonic() >= settle_at:
                settle_at = time.monotonic() + SETTLE_EVERY
                if not self._going_on(self._settle, "small files stay"):
                    return

    def _going_on(self, look: Callable[[], None], otherwise: str) -> bool:
        """Look; False once nobody commits any more."""
        try:
            look()
        except QueueClosed:
            return False
        except (CdcError, OSError, DeltaError, pa.ArrowException) as exc:
            log.warning(otherwise, message=str(exc))
        return True

    def _asked(self) -> tuple[int, bytes] | None:
        """Which question somebody has put last; None if nobody waits."""
        asked = self._root / REQUEST_FILE
        try:
            # an object store counts time in seconds, but no two of its questions are of one content
            return asked.stat().st_mtime_ns, asked.read_bytes()
        except FileNotFoundError:
            return None

    def _look(self) -> None:
        if self._retention is None:
            return
        swept = vacuum(self._root, self._retention)
        if swept.files:
            log.info("vacuumed", files=swept.files, bytes=swept.size)
        found = plan_trim(self._root, self._retention)
        self._spared = () if found is None else found.segments
        self._offered = found
        if found is not None:
            self._wake()

    def _settle(self) -> None:
        if self._settling.look(self._spared):
            self._wake()
