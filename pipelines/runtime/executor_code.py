"""Sends the driver's code to the Python workers of executors, and recognises errors that such workers raised.

Spark forwards only the text of an exception. So a task that may raise an error of ours raises it with its code inside
`forwarding_errors`, and the driver raises the same error again inside `raising_task_errors`.

Executors get the packages cdc and pipelines from the driver, so that both run the same version. Their dependencies,
such as pyarrow and deltalake, are not sent: they must be installed where executors run.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import cdc
import pipelines
from cdc.errors import (
    CdcError,
    ExecutorPythonUnusable,
    LakeInaccessible,
    LogCorrupt,
    LogError,
    LogInaccessible,
    LogUnreachable,
    error_of_code,
)
from cdc.targets.lake_access import access_error
from pipelines.runtime.worker_process import collect_garbage_rarely_in_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARCHIVE: Final = "cdc-code.zip"
_PACKAGES: Final = (cdc, pipelines)
_REMEDY: Final = "; remedy: "
_TASK_ERROR: Final = re.compile(rf"TaskError: (CDC-[0-9]{{4}}): ([^\n]+?)(?:{_REMEDY}([^\n]+))?$", re.MULTILINE)
_LOG_ERRORS: Final = {error.__name__: error for error in (LogCorrupt, LogInaccessible, LogUnreachable)}
_LOG_ERROR: Final = re.compile(rf"({'|'.join(_LOG_ERRORS)}): ([^\n]+)")
_OF_WORKER: Final = "from the Python worker"
"""Text in every exception of Spark that a worker raised."""
_UNUSABLE: Final = (
    (re.compile(r'Cannot run program "([^"\n]+)": (?:error=\d+, )?([^\n]+)'), "cannot start {}: {}"),
    (
        re.compile(r"Python in worker has different version: ([\d.]+) than that in driver: ([\d.]+)"),
        "has version {}, the driver has {}",
    ),
    (re.compile(r"from the Python worker:.*?\n(?:ModuleNotFoundError|ImportError): ([^\n]+)", re.DOTALL), "{}"),
    (re.compile(r"Error from python worker:\s+([^\n]+)"), "does not start: {}"),
)
"""Text in an exception of Spark that shows that an executor has no suitable Python → what is wrong with it."""


def ship(session: SparkSession) -> None:
    """Send cdc and pipelines to the executors of a session, once per session.

    Nothing is sent if this process imports the packages from an archive: `--py-files` has then sent that archive to all
    executors.
    """
    context = session.sparkContext
    packages = [Path(package.__file__ or "").parent for package in _PACKAGES]
    if all(package.is_dir() for package in packages) and not any(ARCHIVE in file for file in context.listFiles):
        folder = Path(tempfile.mkdtemp(prefix="cdc-code-"))
        # executors that start later fetch it as well
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        context.addPyFile(str(build_archive(packages, folder / ARCHIVE)))


def build_archive(folders: list[Path], archive: Path) -> Path:
    """Write the packages to a zip archive from which Python can import; the same files give the same bytes."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as zipped:
        for folder in folders:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    zipped.writestr(ZipInfo(str(file.relative_to(folder.parent))), file.read_bytes(), ZIP_DEFLATED)
    return archive


def worker_error(exc: BaseException) -> LogError | ExecutorPythonUnusable | LakeInaccessible | None:
    """Return the error of ours that Spark's exception `exc` contains as text; None for another error.

    It is the error of the log that a worker raised, or says that an executor has no Python that can run a worker, or no
    access to a lake.
    """
    text = str(exc)
    if (of_log := _LOG_ERROR.search(text)) is not None:
        return _LOG_ERRORS[of_log[1]](of_log[2])
    for pattern, message in _UNUSABLE:
        if (match := pattern.search(text)) is not None:
            return ExecutorPythonUnusable(f"Python of an executor: {message.format(*match.groups())}")
    return access_error(exc, "a target that an executor writes") if _OF_WORKER in text else None


class TaskError(Exception):
    """A CdcError of a task: its code, its message and a remedy of its own as one line of text."""


@contextmanager
def forwarding_errors() -> Iterator[None]:
    """In a task: convert a CdcError of the block to a TaskError, which the driver recognises."""
    collect_garbage_rarely_in_task()
    try:
        yield
    except CdcError as exc:
        own_remedy = "" if exc.fix == type(exc).remedy else f"{_REMEDY}{exc.fix}"
        raise TaskError(" ".join(f"{exc.code}: {exc.message}{own_remedy}".split())) from exc


@contextmanager
def raising_task_errors() -> Iterator[None]:
    """On the driver: convert an exception of Spark with the text of a TaskError to the CdcError of the task.

    Other exceptions of Spark are converted as `worker_error` does.
    """
    # imported late: a process without Spark does not need it
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as exc:
        match = _TASK_ERROR.search(str(exc))
        error = worker_error(exc) if match is None else error_of_code(match[1], match[2], remedy=match[3])
        if error is None:
            raise
        raise error from exc
