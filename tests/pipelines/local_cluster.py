"""The local session as if it were a cluster, and its cores while other tasks have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from pyspark.sql import SparkSession

from pipelines.executor_cores import ExecutorCores, free_cores
from tests.fixtures.waiting import until


class ClusterCores(ExecutorCores):
    """Takes the cores of the local session for those of a cluster's executors."""

    @property
    def is_cluster(self) -> bool:
        return True


@contextmanager
def occupied(spark: SparkSession, folder: Path) -> Iterator[None]:
    """Let two tasks have both cores of the session until the block ends."""
    ended = folder / "ended"

    def wait(_numbers: Iterator[int]) -> None:
        until(ended.exists, "the block ends")

    job = Thread(target=lambda: spark.sparkContext.parallelize([1, 2], 2).foreachPartition(wait))
    job.start()
    try:
        until(lambda: free_cores(spark) == 0, "both cores have a task")
        yield
    finally:
        ended.touch()
        job.join()
