"""Code that executors import from the driver, and errors of Spark's Python workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

import cdc
import pipelines
from cdc.errors import LogCorrupt, Reaction, SinkUnavailable
from pipelines.runtime.executor_code import (
    TaskError,
    build_archive,
    forwarding_errors,
    raising_task_errors,
    worker_error,
)

FOLDERS = [Path(str(package.__file__)).parent for package in (cdc, pipelines)]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import pipelines.source.read_tasks, pipelines.source.data_source, pipelines.folding.fold, cdc
print(cdc.__file__, pipelines.source.read_tasks.__file__)
"""
SPARK_MESSAGE = """[STREAM_FAILED] Query [id = 3f] terminated with exception: Job aborted: Task 0 failed 1 times
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "read.py", line 268, in stream_file
    raise unreadable(file) from exc
cdc.errors.LogCorrupt: log file '/log/changes/segment=3/a.parquet' cannot be read: positions 0/78 to 0/8C; tables shop.a

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)"""


def test_python_imports_what_tasks_need_from_the_archive(tmp_path: Path) -> None:
    archive = build_archive(FOLDERS, tmp_path / "code.zip")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, archive], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.stdout.split() == [f"{archive}/cdc/__init__.py", f"{archive}/pipelines/source/read_tasks.py"], (
        done.stderr
    )


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    first, second = (build_archive(FOLDERS[1:], tmp_path / name).read_bytes() for name in ("a.zip", "b.zip"))

    assert first == second
    assert b"__pycache__" not in first


def test_the_error_of_a_worker_that_read_a_damaged_file_names_the_file() -> None:
    error = worker_error(RuntimeError(SPARK_MESSAGE))
    assert isinstance(error, LogCorrupt)
    assert error.reaction is Reaction.HALT
    assert error.message == (
        "log file '/log/changes/segment=3/a.parquet' cannot be read: positions 0/78 to 0/8C; tables shop.a"
    )


def test_other_errors_of_workers_are_not_converted() -> None:
    assert worker_error(RuntimeError("Job aborted due to stage failure: out of memory")) is None


class Busy(SinkUnavailable):
    """A subclass that only its own module knows."""

    code = SinkUnavailable.code


def test_the_driver_raises_the_error_of_a_task_from_spark_s_text() -> None:
    with pytest.raises(TaskError) as raised, forwarding_errors():
        raise Busy("the server\ndoes not answer")
    text = (
        f"Traceback (most recent call last):\npipelines.runtime.executor_code.TaskError: {raised.value}\n\n\tat org.x"
    )

    with pytest.raises(SinkUnavailable) as error, raising_task_errors():
        raise PySparkException(text)

    assert type(error.value) is SinkUnavailable
    assert error.value.message == "the server does not answer"


def test_an_exception_of_spark_without_an_error_of_a_task_stays_as_it_is() -> None:
    with pytest.raises(PySparkException, match="out of memory"), raising_task_errors():
        raise PySparkException("out of memory")
