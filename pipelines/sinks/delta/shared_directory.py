"""Whether driver and executors share the directory of a target: checked before a commit names files of executors.

Executors of a cluster create files on their own machine, under their own account and umask. If the directory is not
shared, or the driver may not read these files, a commit would name files that no reader can open. So the driver opens
the files before its own commit. Spark commits what it writes itself: before that, tasks write probes into the
directory, which the driver reads. An object store needs no such check.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from cdc.errors import ExecutorFilesUnusable
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.runtime.spark_session import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONTENT: Final = b"probe"
_NOT_SHARED: Final = "set the sink's path to an object store, or to a directory that driver and executors share"
_OTHER_ACCOUNT: Final = "run driver and executors under one account, or with a group and a umask that let both read"


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a task that wrote a probe into a directory."""

    host: str
    name: str
    error: str = ""
    """The message of `unwritable` if the task could not write; otherwise empty."""


class SharedDirectories:
    """The directories that the driver of one sink has checked; any thread may use it."""

    def __init__(self) -> None:
        self._checked: dict[str, frozenset[str]] = {}
        """Directory → the executors that there were at its last check."""

    def check(self, session: SparkSession, uri: str) -> None:
        """Raise ExecutorFilesUnusable if executors and driver do not share the directory of a target.

        The directory is checked again when there are further executors. Tasks go to all free executors, but Spark does
        not promise that each one gets a task.
        """
        if "://" in uri or is_local(session.sparkContext.master):
            return
        executors = executors_of(session)
        if not executors <= self._checked.get(uri, frozenset()):
            numbers = range(max(len(executors), session.sparkContext.defaultParallelism))
            tasks = session.sparkContext.parallelize(numbers, len(numbers))
            with raising_task_errors():
                probes = tasks.mapPartitions(partial(_probes, uri)).collect()
            check_probes(uri, probes)
            self._checked[uri] = executors


def executors_of(session: SparkSession) -> frozenset[str]:
    """Return the addresses of the executors that the cluster has given, and the driver's own address."""
    infos = session.sparkContext._jsc.sc().statusTracker().getExecutorInfos()  # noqa: SLF001 - PySpark has none
    return frozenset(f"{info.host()}:{info.port()}" for info in infos)


def write_probe(uri: str) -> Probe:
    """In a task: write a file into the directory, with the modes that a data file gets."""
    probe = Probe(socket.gethostname(), f".probe-{uuid4().hex}.tmp")
    try:
        Path(uri, probe.name).write_bytes(_CONTENT)
    except OSError as exc:
        return replace(probe, error=unwritable(uri, exc).message)
    return probe


def unwritable(uri: str, exc: OSError) -> ExecutorFilesUnusable:
    """In a task: return the error that says why this executor cannot write into the directory."""
    reason = (exc.strerror or str(exc)).lower()
    return ExecutorFilesUnusable(f"the executor on {socket.gethostname()!r} cannot write into {uri!r}: {reason}")


def check_probes(uri: str, probes: Iterable[Probe]) -> None:
    """On the driver: read and remove the probes; raise ExecutorFilesUnusable for the first one that it cannot read."""
    errors = [error for probe in probes if (error := _error_of(uri, probe)) is not None]
    if errors:
        raise errors[0]


def check_readable(path: Path, size: int, host: str = "") -> None:
    """Raise ExecutorFilesUnusable unless the driver can read a file of this size that an executor wrote.

    host: the machine of the executor, for the message; empty if it is not known.
    """
    writer = f"the executor on {host!r}" if host else "an executor"
    try:
        with path.open("rb"):
            has_size = path.stat().st_size == size
    except FileNotFoundError:
        has_size = False
    except PermissionError as exc:
        raise ExecutorFilesUnusable(
            f"the driver may not read file {path.name!r}, which {writer} wrote into {str(path.parent)!r}: "
            f"{_modes_of(path)}",
            remedy=_OTHER_ACCOUNT,
        ) from exc
    if not has_size:
        raise ExecutorFilesUnusable(
            f"{writer} wrote file {path.name!r} into {str(path.parent)!r}, but the driver does not see it",
            remedy=_NOT_SHARED,
        )


def _probes(uri: str, _numbers: Iterator[int]) -> Iterator[Probe]:
    yield write_probe(uri)


def _error_of(uri: str, probe: Probe) -> ExecutorFilesUnusable | None:
    if probe.error:
        return ExecutorFilesUnusable(probe.error, remedy=_NOT_SHARED)
    path = Path(uri, probe.name)
    try:
        check_readable(path, len(_CONTENT), probe.host)
    except ExecutorFilesUnusable as exc:
        return exc
    finally:
        with suppress(OSError):  # of another account
            path.unlink(missing_ok=True)
    return None


def _modes_of(path: Path) -> str:
    status = path.stat()
    return f"its mode is {stat.filemode(status.st_mode)}, its owner {status.st_uid}, and the driver's {os.geteuid()}"
