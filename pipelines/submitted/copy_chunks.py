"""The driver of `cdc spark submit copy`: executors read the chunks that the reader posts (see `executor_chunks.py`).

The driver plans nothing and sees no row: it passes tasks and their results between the catalog and Spark. Each chunk is
a Spark job with one task, so that a result reaches the reader as soon as its chunk is written.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from cdc.catalog import REPORT_MAX_AGE, Catalog
from cdc.config import Definition
from cdc.errors import CdcError, CopyExecutorFailed, LogError, StateConflict, error_of_code
from cdc.log.reader import LogReader
from cdc.pgoutput.load_kernels import load_copy_kernels
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL
from cdc.snapshot.executor_chunks import CHUNKS, ChunkTask, ExecutorAccess, StagedChunk, stage_chunk
from cdc.snapshot.executor_exchange import MOST_TASKS, offered_executors
from cdc.table import TableState
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.runtime.spark_session import SparkSettings, spark_session
from pipelines.runtime.worker_process import collect_garbage_rarely_in_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET: Final = 3.0
"""Seconds without a pending copy after which the job ends; the reader requests first copies in this time."""
READER_WITHIN: Final = 60.0
"""Seconds for which the job waits for a running reader."""
CHECK_EVERY: Final = 1.0


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What the executors of one job have read."""

    tasks: int
    """Number of tasks that could run at the same time."""
    chunks: int
    rows: int

    @property
    def summary(self) -> str:
        """One line for a person."""
        return f"executors read {self.rows:,} rows in {self.chunks:,} chunks, up to {self.tasks} at a time"

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _TaskFailure:
    """An error that a task returns instead of raising it, because Spark would repeat the task."""

    code: str
    message: str


def copy_by_executors(
    definition: Definition, connections: int | None, report_line: Callable[[str], None]
) -> CopyReport:
    """Let executors read chunks until no copy is pending.

    `connections` is the maximum number of tasks at a time, by default the number of cores of the cluster. Raises
    CopyExecutorFailed if an executor cannot read or hand over rows, SinkInUse if another job does this for the
    pipeline, and StateConflict if no reader runs.
    """
    settings = SparkSettings.of(definition, f"cdc-{definition.name}-copy")
    session = spark_session(replace(settings, has_rows=False))
    with Catalog.open(definition.catalog.url) as catalog:
        check_executors(session, _access(definition), connections or 1)
        # after the first tasks: before, a cluster may not have given any core
        slots = min(connections or session.sparkContext.defaultParallelism, MOST_TASKS)
        end = EndOfCopies(catalog, definition)
        with offered_executors(catalog, definition.name, definition.log.root, slots) as tasks:
            report_line(f"up to {slots} tasks of executors read chunks of pipeline {definition.name!r}")
            tasks.serve(partial(_run_on_executor, session, definition), end.is_reached)
    return CopyReport(slots, tasks.chunks, tasks.rows)


def check_executors(session: SparkSession, access: ExecutorAccess, slots: int) -> None:
    """Raise CopyExecutorFailed unless executors can import cdc, connect to the source, and write for the reader."""
    for probe in _run(session, partial(_probe, access), list(range(slots))):
        file = access.root / CHUNKS / probe
        if not file.exists():
            raise CopyExecutorFailed(f"an executor wrote {str(file)!r}, but the driver does not see the file")
        file.unlink(missing_ok=True)


def _access(definition: Definition) -> ExecutorAccess:
    """Return the access to source and log with the present password."""
    source = definition.source
    return ExecutorAccess(source.current_dsn(), definition.log.root, source.undecodable)


def _run_on_executor(session: SparkSession, definition: Definition, task: ChunkTask) -> StagedChunk:
    (staged,) = _run(session, partial(_stage, _access(definition)), [task])
    assert isinstance(staged, StagedChunk)  # noqa: S101 - as `_stage` returns it
    return staged


def _run(session: SparkSession, function: Callable[[Any], Any], arguments: list[Any]) -> list[Any]:
    """Run a function in one task per argument, and return the results, which contain no rows.

    Raises the CdcError that a task returns, ExecutorPythonUnusable if an executor has not all packages, and
    CopyExecutorFailed if a task fails otherwise.
    """
    # imported late: a process without Spark does not need it
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        with raising_task_errors():
            results: list[Any] = session.sparkContext.parallelize(arguments, len(arguments)).map(function).collect()
    except (PySparkException, Py4JError) as exc:
        reason = str(exc).strip().splitlines()[0][:300]
        raise CopyExecutorFailed(f"a task of an executor failed: {reason}") from exc
    for result in results:
        if isinstance(result, _TaskFailure):
            raise error_of_code(result.code, result.message)
    return results


def _stage(access: ExecutorAccess, task: ChunkTask) -> StagedChunk | _TaskFailure:
    collect_garbage_rarely_in_task()
    try:
        return stage_chunk(task, access)
    except CdcError as exc:
        return _TaskFailure(exc.code, exc.message)
    except OSError as exc:
        return _unwritable(access, exc)


def _probe(access: ExecutorAccess, _number: int) -> str | _TaskFailure:
    """Load the compiled code, connect to the source, write an empty file into CHUNKS, and return its name."""
    load_copy_kernels()  # compiles them once for each machine, before the reader waits for a chunk
    collect_garbage_rarely_in_task()
    name = f"probe-{uuid4().hex}"
    try:
        connect(access.dsn, application_name="cdc copy").close()
    except CdcError as exc:
        message = f"the executor on {socket.gethostname()!r} cannot connect to the source: {exc.message}"
        return _TaskFailure(CopyExecutorFailed.code, message)
    try:
        (access.folder / name).write_bytes(b"")
    except (OSError, LogError) as exc:
        return _unwritable(access, exc)
    return name


def _unwritable(access: ExecutorAccess, exc: Exception) -> _TaskFailure:
    reason = (exc.strerror or str(exc)).lower() if isinstance(exc, OSError) else str(exc)
    return _TaskFailure(
        CopyExecutorFailed.code,
        f"the executor on {socket.gethostname()!r} cannot write into {str(access.root / CHUNKS)!r}: {reason}",
    )


class EndOfCopies:
    """Whether the job may end: nothing is pending at the reader for QUIET seconds."""

    def __init__(self, catalog: Catalog, definition: Definition, reader_within: float = READER_WITHIN) -> None:
        """reader_within: seconds for which a pending copy waits for a running reader."""
        self._catalog, self._definition, self._reader_within = catalog, definition, reader_within
        self._began = self._checked = time.monotonic()
        self._busy_at = self._began

    def is_reached(self) -> bool:
        """Return True if no copy is pending; raise StateConflict if a copy is pending and no reader runs."""
        now = time.monotonic()
        if now - self._checked < CHECK_EVERY:
            return False
        self._checked = now
        if not self._is_copy_pending():
            return now - self._busy_at >= QUIET
        self._busy_at = now
        if self._reader_runs():
            self._began = now
        elif now - self._began > self._reader_within:
            raise StateConflict(
                f"no reader of pipeline {self._definition.name!r} runs, so no chunk can be copied",
                remedy="start the reader with 'cdc reader -c FILE' or 'cdc run -c FILE', then run the command again",
            )
        return False

    def _is_copy_pending(self) -> bool:
        if self._catalog.commands.pending(self._definition.name, BACKFILL):
            return True
        try:
            schemas = LogReader(self._definition.log.root).schemas()
        except LogError:  # the reader has not created the log yet
            return True
        return any(schema.state is TableState.SNAPSHOTTING for schema in schemas.values())

    def _reader_runs(self) -> bool:
        reports = self._catalog.processes.ls(self._definition.name)
        now = datetime.now(UTC)
        return any(report.process == "reader" and report.age(now) < REPORT_MAX_AGE for report in reports)
