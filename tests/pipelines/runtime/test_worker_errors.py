"""Unread: what a worker says of a damaged file comes out of Spark's text as the same error."""

from __future__ import annotations

from cdc.errors import LogCorrupt, Reaction
from pipelines.runtime.worker_errors import worker_error

TEXT = """[STREAM_FAILED] Query [id = 3f] terminated with exception: Job aborted: Task 0 failed 1 times
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "read.py", line 268, in stream_file
    raise unreadable(file) from exc
cdc.errors.LogCorrupt: log file '/log/changes/segment=3/a.parquet' cannot be read: positions 0/78 to 0/8C; tables shop.a

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)"""


def test_a_damaged_file_that_a_worker_met_halts_and_is_named():
    told = worker_error(RuntimeError(TEXT))
    assert isinstance(told, LogCorrupt)
    assert told.reaction is Reaction.HALT
    assert told.message == (
        "log file '/log/changes/segment=3/a.parquet' cannot be read: positions 0/78 to 0/8C; tables shop.a"
    )


def test_any_other_failure_stays_what_it_was():
    assert worker_error(RuntimeError("Job aborted due to stage failure: out of memory")) is None
