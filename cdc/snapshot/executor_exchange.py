"""Exchange of chunk tasks between the reader and the driver of `cdc spark submit copy`, over the catalog.

The driver offers a number of tasks at a time, and renews a lease as long as it runs. The reader posts each ChunkTask as
a command; the driver finishes the command with the StagedChunk or with an error. The reader deletes a command when it
has the result, or no longer wants it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final, Self

from cdc.bucket_files import Root
from cdc.catalog import Catalog
from cdc.catalog.commands import JOB_LEASE, Command
from cdc.catalog.process_lease import leased
from cdc.errors import CdcError, CopyExecutorFailed, LogCorrupt, SnapshotInvalidated, error_of_code
from cdc.log.encoded_chunk import EncodedChunk
from cdc.log_row import LOG_SCHEMA
from cdc.postgres.chunk_queries import BlockRange
from cdc.postgres.visibility import Visibility
from cdc.snapshot.chunk_plan import ChunkLimits, ChunkRange
from cdc.snapshot.chunk_rows import ChunkRows, ChunkTooLarge, NotRead, SeesAll
from cdc.snapshot.executor_chunks import CHUNKS, ChunkTask, StagedChunk, StagedOutcome
from cdc.snapshot.executor_copy_status import OFFER, TASK, valid_offer
from cdc.table import TableSchema

MOST_TASKS: Final = 32
"""Maximum number of tasks at a time; each of them has a window, and a file in the reader's memory."""
EXECUTOR_MEMORY: Final = 256 * 1024 * 1024
"""Approximate maximum size of the Arrow rows of all chunks that executors read at the same time, in bytes.

The reader has the files of these chunks in memory, which are smaller.
"""
MOST_BYTES: Final = 12 * 1024 * 1024
"""Maximum size of the Arrow rows of one chunk while the stream is busy; while it is idle, a chunk may be larger."""
EXECUTOR_ROWS: Final = 1_000_000
"""Maximum number of rows of one chunk."""
LIMITED_SECONDS: Final = 2.0
"""If a limit of the source's load applies, a chunk has at most the rows and bytes of this time."""
LEAST_BYTES: Final = 64 * 1024
POLL: Final = 0.1
"""Seconds between two looks for finished tasks."""
CHECK_OFFER_EVERY: Final = 1.0
FAILURES: Final = 20
"""Number of tasks that may fail one after another, before the driver gives up and the reader continues alone."""


class ExecutorsChanged(Exception):
    """Raised to end a copy that must continue with other readers: executors were offered, or are gone."""


@dataclass(slots=True)
class _PostedTask:
    is_over: Event = field(default_factory=Event)
    finished: Command | None = None
    error: BaseException | None = None


class ExecutorTasks(Thread):
    """The reader's side: posts tasks and waits for their results; a context manager, for the time of one backfill."""

    def __init__(self, catalog: Catalog, pipeline: str, root: Root) -> None:
        super().__init__(name="executors", daemon=True)
        self._catalog, self._pipeline, self.root = catalog, pipeline, root
        self._posted: dict[int, _PostedTask] = {}
        self._over = Event()
        self._offer: int | None = None
        self.slots = 0
        """Number of tasks at a time that the present driver offers; 0 without a driver."""

    def __enter__(self) -> Self:
        # the tasks and files of a reader that was killed
        commands = self._catalog.commands
        if stale := commands.pending(self._pipeline, TASK):
            commands.delete(command.id for command in stale)
        for file in (self.root / CHUNKS).glob("*.parquet"):
            file.unlink(missing_ok=True)
        self._read_offer()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Look for finished tasks and for drivers, until the backfill ends."""
        checked = time.monotonic()
        while not self._over.wait(POLL):
            try:
                if time.monotonic() - checked >= CHECK_OFFER_EVERY:
                    checked = time.monotonic()
                    self._read_offer()
                self._collect()
            except CdcError as exc:  # the catalog does not answer: the copy is tried again
                self._fail_all(exc)

    def result_of(self, task: ChunkTask, cancelled: Event) -> StagedChunk:
        """Post a task, and return its result.

        Raises the error of the executor, ExecutorsChanged if the driver is gone, and SnapshotInvalidated if `cancelled`
        is set.
        """
        number = self._catalog.commands.post(self._pipeline, TASK, task.to_json())
        posted = self._posted[number] = _PostedTask()
        try:
            if self._offer is None:
                raise ExecutorsChanged
            while not posted.is_over.wait(POLL):
                if cancelled.is_set():
                    raise SnapshotInvalidated("a chunk that an executor reads is not needed any more")
        finally:
            del self._posted[number]
            self._catalog.commands.delete([number])
        if posted.error is not None:
            raise posted.error
        assert posted.finished is not None  # noqa: S101 - a task is over with a result or an error
        fields = posted.finished.result or {}
        if "error" in fields:
            raise error_of_code(fields["error"]["code"], fields["error"]["message"])
        return StagedChunk.from_json(fields)

    def _read_offer(self) -> None:
        """Find the driver that offers executors; the tasks of a driver that is gone fail."""
        offer = valid_offer(self._catalog, self._pipeline)
        before, self._offer = self._offer, None if offer is None else offer.id
        self.slots = 0 if offer is None else int(offer.payload["tasks"])
        if before != self._offer:
            self._fail_all(ExecutorsChanged())

    def _collect(self) -> None:
        for command in self._catalog.commands.finished(self._posted) if self._posted else ():
            if (posted := self._posted.get(command.id)) is not None:
                posted.finished = command
                posted.is_over.set()

    def _fail_all(self, error: BaseException) -> None:
        for posted in list(self._posted.values()):
            posted.error = error
            posted.is_over.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorReads:
    """Reads the chunks of one table by tasks of executors, for one thread of a copy."""

    tasks: ExecutorTasks
    publication: str
    server: str
    """Start time of the server from which the reader captures."""
    limits: ChunkLimits
    _cancelled: Event = field(default_factory=Event)

    def cancel(self) -> None:
        """Make a running `read` end, from another thread."""
        self._cancelled.set()

    def read(self, schema: TableSchema, part: ChunkRange, sees_all: SeesAll) -> ChunkRows | NotRead:
        """Read a chunk by a task, and take its file.

        Raises ChunkTooLarge, the errors of the executor, and SnapshotInvalidated if the file is not as it was written.
        """
        assert isinstance(part.rows, BlockRange)  # noqa: S101 - executors read only plans by blocks
        task = ChunkTask(
            schema=schema,
            span=part.rows,
            publication=self.publication,
            server=self.server,
            limit=self.limits.bytes_of(part),
        )
        staged = self.tasks.result_of(task, self._cancelled)
        if staged.outcome is StagedOutcome.TOO_LARGE:
            raise ChunkTooLarge
        if staged.outcome is StagedOutcome.OTHER_COLUMNS:
            return NotRead.OTHER_COLUMNS
        encoded = None if staged.file is None else take_file(self.tasks.root, staged, schema.relation)
        if not sees_all(Visibility.parse(staged.snapshot)):
            return NotRead.NOT_VISIBLE
        return ChunkRows(LOG_SCHEMA.empty_table(), staged.text_bytes, staged.nbytes, encoded)


def take_file(root: Root, staged: StagedChunk, relation: int) -> EncodedChunk:
    """Read and delete the file of a result.

    Raises SnapshotInvalidated if it is not as the executor wrote it, and CopyExecutorFailed if it cannot be used.
    """
    path = root / CHUNKS / str(staged.file)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise SnapshotInvalidated(
            f"the file of a chunk that an executor wrote is missing: {str(path)!r}; the chunk is read again"
        ) from None
    path.unlink(missing_ok=True)
    if zlib.crc32(content) != staged.checksum:
        raise SnapshotInvalidated(
            f"the file of a chunk differs from what an executor wrote: {str(path)!r}; the chunk is read again"
        )
    try:
        return EncodedChunk.parse(content, relation)
    except LogCorrupt as exc:
        raise CopyExecutorFailed(f"an executor wrote a file that cannot be used: {exc.message}") from exc


def executor_limits(slots: int, rows_per_second: int | None, bytes_per_second: int | None) -> ChunkLimits:
    """Return the size of a chunk that one of `slots` tasks reads, under the limits of the source's load."""
    nbytes, rows = min(MOST_BYTES, EXECUTOR_MEMORY // (4 * slots)), EXECUTOR_ROWS
    if bytes_per_second is not None:
        nbytes = min(nbytes, max(LEAST_BYTES, int(bytes_per_second * LIMITED_SECONDS / slots)))
    if rows_per_second is not None:
        rows = min(rows, max(1, int(rows_per_second * LIMITED_SECONDS / slots)))
    return ChunkLimits(rows, nbytes)


class ChunkTasks:
    """The driver's side: the tasks of one pipeline that wait for executors."""

    def __init__(self, catalog: Catalog, pipeline: str, root: Root, slots: int, offer: int) -> None:
        """`slots`: number of tasks that may run at the same time; `offer`: number of the driver's pending OFFER."""
        self._catalog, self._pipeline, self._root, self._slots = catalog, pipeline, root, slots
        self._offer = offer
        self.rows = 0
        """Number of rows that the reader got so far."""
        self.chunks = 0
        """Number of chunks that the reader got so far."""
        self._failures = 0
        """Number of failed tasks since the last result."""

    @property
    def progress(self) -> dict[str, int]:
        """What the reader got so far, as the result of the offer."""
        return {"chunks": self.chunks, "rows": self.rows}

    def serve(self, run: Callable[[ChunkTask], StagedChunk], is_over: Callable[[], bool]) -> None:
        """Run the tasks that the reader posts until `is_over` returns True; it is called while no task runs.

        Any thread may call `run`, which returns the result of an executor or raises a CdcError. Raises
        CopyExecutorFailed if `run` raises it, or if it failed FAILURES times in a row: then the reader should not wait
        for this driver.
        """
        running: dict[Future[StagedChunk], int] = {}
        self._failures = 0
        with ThreadPoolExecutor(self._slots, "tasks") as pool:
            while running or not is_over():
                for number, task in self._waiting(set(running.values())):
                    running[pool.submit(run, task)] = number
                if not running:
                    Event().wait(POLL)
                for future in wait(running, POLL, FIRST_COMPLETED).done:
                    self._hand_over(running.pop(future), future)

    def _waiting(self, known: set[int]) -> list[tuple[int, ChunkTask]]:
        """Return the posted tasks with their numbers, oldest first, without the known ones."""
        commands = self._catalog.commands.pending(self._pipeline, TASK)
        return [(found.id, ChunkTask.from_json(found.payload)) for found in commands if found.id not in known]

    def _hand_over(self, number: int, future: Future[StagedChunk]) -> None:
        """Give the reader the result or the error of a task."""
        try:
            staged = future.result()
        except CopyExecutorFailed as exc:
            self._fail(number, exc)
            raise
        except CdcError as exc:
            self._fail(number, exc)
            self._failures += 1
            if self._failures >= FAILURES:
                raise CopyExecutorFailed(
                    f"{FAILURES} tasks of executors failed one after another: {exc.message}"
                ) from exc
            return
        self._failures = 0
        if self._catalog.commands.finish(number, staged.to_json()):
            self.rows += staged.rows
            self.chunks += staged.outcome is StagedOutcome.STAGED
            self._catalog.commands.record(self._offer, self.progress)
        elif staged.file is not None:  # the reader no longer wants the chunk
            (self._root / CHUNKS / staged.file).unlink(missing_ok=True)

    def _fail(self, number: int, error: CdcError) -> None:
        fields: Mapping[str, Any] = {"error": {"code": error.code, "message": error.message}}
        self._catalog.commands.finish(number, fields, ok=False)


@contextmanager
def offered_executors(catalog: Catalog, pipeline: str, root: Root, slots: int) -> Iterator[ChunkTasks]:
    """Offer executors to the reader for the block; `slots` is the number of tasks that may run at the same time.

    Raises SinkInUse if another driver offers executors for the pipeline.
    """
    lease = f"copy {pipeline}"
    with leased(catalog, lease, f"another 'cdc spark submit copy' of pipeline {pipeline!r} is running"):
        for offer in catalog.commands.pending(pipeline, OFFER):  # of a driver that was killed
            catalog.commands.finish(offer.id, {}, ok=False)
        number = catalog.commands.post(pipeline, OFFER, {"tasks": slots, JOB_LEASE: lease})
        tasks = ChunkTasks(catalog, pipeline, root, slots, number)
        try:
            yield tasks
        finally:
            catalog.commands.finish(number, tasks.progress)
