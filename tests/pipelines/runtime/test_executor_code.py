"""Code that executors import from the driver, and errors of Spark's Python workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import cdc
import pipelines
from cdc.errors import ExecutorPythonUnusable, LogCorrupt, LogInaccessible, Reaction, SinkUnavailable
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


@pytest.fixture(name="executor")
def _executor(spark: SparkSession) -> Iterator[SparkContext]:
    """Give the context of a session, whose executors run another Python if the test sets `pythonExec`."""
    context = spark.sparkContext
    before = context.pythonExec, context.pythonVer
    yield context
    context.pythonExec, context.pythonVer = before


def error_of_a_task(spark: SparkSession) -> ExecutorPythonUnusable:
    """Run a task in Python, and return the error that the driver reports."""

    def unchanged(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from rows

    with pytest.raises(ExecutorPythonUnusable) as raised, raising_task_errors():
        spark.range(1).mapInArrow(unchanged, "id long").toArrow()
    return raised.value


def test_an_executor_without_the_driver_s_python_is_reported(spark: SparkSession, executor: SparkContext) -> None:
    executor.pythonExec = "/nowhere/python"

    assert error_of_a_task(spark).message == (
        "Python of an executor: cannot start /nowhere/python: No such file or directory"
    )


def test_an_executor_with_another_version_of_python_is_reported(spark: SparkSession, executor: SparkContext) -> None:
    executor.pythonVer = "3.99"

    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert error_of_a_task(spark).message == (f"Python of an executor: has version {version}, the driver has 3.99")


def test_an_executor_without_a_package_is_reported(spark: SparkSession, executor: SparkContext, tmp_path: Path) -> None:
    executor.pythonExec = script(tmp_path, f'exec {sys.executable} -S "$@"')  # -S: without installed packages

    assert error_of_a_task(spark).message == "Python of an executor: No module named 'pyarrow'"


def test_an_executor_whose_python_fails_at_its_start_is_reported(
    spark: SparkSession, executor: SparkContext, tmp_path: Path
) -> None:
    executor.pythonExec = script(tmp_path, "echo libpython3.so is missing >&2; exit 127")

    error = error_of_a_task(spark)
    assert error.message == "Python of an executor: does not start: libpython3.so is missing"
    assert error.reaction is Reaction.RETRY


def script(folder: Path, command: str) -> str:
    """Write a program that runs a shell command, and return its path."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    return str(program)


def test_the_error_of_a_worker_that_cannot_access_the_log_is_one_of_access() -> None:
    text = (
        SPARK_MESSAGE.partition("cdc.errors")[0] + "cdc.errors.LogInaccessible: the object store denies access\n\n\tat"
    )
    error = worker_error(RuntimeError(text))

    assert isinstance(error, LogInaccessible)
    assert error.message == "the object store denies access"


def test_other_errors_of_workers_are_not_converted() -> None:
    assert worker_error(RuntimeError("Job aborted due to stage failure: out of memory")) is None


class Busy(SinkUnavailable):
    """A subclass that only its own module knows."""

    code = SinkUnavailable.code


def test_the_driver_raises_the_error_of_a_task_from_spark_s_text() -> None:
    with pytest.raises(TaskError) as raised, forwarding_errors():
        raise Busy("the server\ndoes not answer", remedy="start the server")
    text = (
        f"Traceback (most recent call last):\npipelines.runtime.executor_code.TaskError: {raised.value}\n\n\tat org.x"
    )

    with pytest.raises(SinkUnavailable) as error, raising_task_errors():
        raise PySparkException(text)

    assert type(error.value) is SinkUnavailable
    assert (error.value.message, error.value.fix) == ("the server does not answer", "start the server")


def test_an_exception_of_spark_without_an_error_of_a_task_stays_as_it_is() -> None:
    with pytest.raises(PySparkException, match="out of memory"), raising_task_errors():
        raise PySparkException("out of memory")
