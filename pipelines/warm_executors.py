"""Warm executors: Python workers that have started and loaded the code of a batch before the first batch needs them.

A worker needs seconds for that, and so does the JVM of its executor. Meanwhile the driver plans its first query. It
plans the streaming query in Python processes of its own. They need seconds as well, and start at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from pipelines.runtime.spark_session import SparkSettings
from pipelines.runtime.worker_process import collect_garbage_rarely_in_task
from pipelines.sinks.delta import executor_upsert  # noqa: F401 - what a worker loads to merge a batch
from pipelines.sinks.delta.indexed.load_kernels import load_kernels
from pipelines.source.options import LATEST

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_T = TypeVar("_T")

log = structlog.get_logger("apply")


def warm_executors(session: SparkSession) -> list[Thread]:
    """Begin to warm the executors of a cluster in other threads, which end with the session at the latest.

    Tasks without SQL load the code: the driver plans them at once, while its first plan in SQL takes seconds. Tasks of
    SQL follow in the same Python workers, and load what the JVMs of executors need.
    """
    tasks = session.sparkContext.defaultParallelism
    threads = [
        Thread(target=_run, args=(run_tasks, session, tasks), name="warm-executors", daemon=True)
        for run_tasks in (_load_python, _load_jvm)
    ]
    for thread in threads:
        thread.start()
    return threads


def warm_planners(session: SparkSession, path: str, storage: str) -> Thread:
    """Begin to start the processes in which Spark plans a range of the log, in another thread.

    path, storage: options of the data source `cdc`, which has to be registered.
    """
    options = {"path": path, "storage": storage, "startingPosition": LATEST}
    thread = Thread(target=_run, args=(_plan_empty_range, session, options), name="warm-planners", daemon=True)
    thread.start()
    return thread


def has_executors(settings: SparkSettings) -> bool:
    """Return whether a session with these settings has executors before a task waits for them."""
    return not settings.local and settings.conf.get("spark.dynamicAllocation.enabled", "false") != "true"


def _run(warm: Callable[[SparkSession, _T], object], session: SparkSession, argument: _T) -> None:
    try:
        warm(session, argument)
    except (PySparkException, Py4JError, OSError) as exc:
        # the first batch has the same error, if it was not the end of the session
        log.debug("Spark was not warmed", error=str(exc))


def _load_python(session: SparkSession, tasks: int) -> None:
    session.sparkContext.parallelize(range(tasks), tasks).foreachPartition(_load_code)


def _load_jvm(session: SparkSession, tasks: int) -> None:
    session.range(0, tasks, 1, tasks).mapInArrow(_unchanged, "id long").count()


def _load_code(_numbers: Iterator[int]) -> None:
    # the import of this module has loaded the modules of a merge
    load_kernels()
    collect_garbage_rarely_in_task()


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _plan_empty_range(session: SparkSession, options: Mapping[str, str]) -> None:
    # a checkpoint that is not written yet: planned, but no task waits for an executor
    session.read.format("cdc").options(**options).load().localCheckpoint(eager=False)
