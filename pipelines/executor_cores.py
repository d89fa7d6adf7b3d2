"""The cores of a Spark cluster: whether a task could begin now, and the wait until one does."""

from __future__ import annotations

import time
from typing import Final

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipelines.engine_decision import ONE_MACHINE, Cores
from pipelines.runtime.spark_session import is_local
from pipelines.spark_on_demand import SparkOnDemand

COUNT_EVERY: Final = 0.5
"""Seconds for which a count of free cores is used again; the decision is asked for up to fifty times per second."""


class ExecutorCores:
    """The cores of the executors of one session; the threads of all sinks use it."""

    def __init__(self, spark: SparkOnDemand, master: str) -> None:
        """master: that of the definition, until there is a session."""
        self._spark, self._master = spark, master
        self._counted: tuple[float, int] | None = None
        """(time of the last count on the monotonic clock, free cores)."""

    @property
    def is_cluster(self) -> bool:
        """Whether the executors are other processes than the driver."""
        return not is_local(self._master)

    def now(self) -> Cores:
        """Return the cores that are free; none before the session has started."""
        session = self._spark.available
        if session is not None:
            self._master = session.sparkContext.master  # spark-submit may have named another one
        if not self.is_cluster:
            return ONE_MACHINE
        if session is None:
            return Cores(is_cluster=True, free=0)
        counted = self._counted
        if counted is None or time.monotonic() - counted[0] >= COUNT_EVERY:
            counted = self._counted = (time.monotonic(), free_cores(session))
        return Cores(is_cluster=True, free=counted[1])

    def wait(self) -> None:
        """Return when an executor has a core for a task.

        The task asks for it: a cluster with dynamic allocation starts no executor before a task waits.
        """
        session = self._spark.available
        if session is not None and self.is_cluster and not self.now().free:
            session.range(0, 1, 1, 1).count()


def free_cores(session: SparkSession) -> int:
    """Return how many tasks could begin at once in the executors that the cluster has given.

    The result is 1 if Spark does not say.
    """
    try:
        scala = session.sparkContext._jsc.sc()  # noqa: SLF001 - PySpark has neither of the two numbers
        slots = scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile())
        running = sum(executor.numRunningTasks() for executor in scala.statusTracker().getExecutorInfos())
    except (Py4JError, AttributeError):
        return 1
    return max(0, int(slots) - int(running))
