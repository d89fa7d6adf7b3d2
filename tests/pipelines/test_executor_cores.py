"""How many cores of a cluster are free, and the wait for one."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from pyspark.sql import SparkSession

from pipelines.engine_decision import ONE_MACHINE, Cores
from pipelines.executor_cores import ExecutorCores, free_cores
from tests.fixtures.waiting import until
from tests.pipelines.local_cluster import ClusterCores, occupied
from tests.pipelines.spark_starts import spark_that_never_starts, spark_with


def test_one_machine_has_no_executors_and_a_cluster_has_no_core_before_its_session() -> None:
    never = spark_that_never_starts()
    assert ExecutorCores(never, "local[4]").now() == ONE_MACHINE
    for master in ("yarn", "spark://host:7077", "k8s://https://host", "local-cluster[2,1,1024]"):
        assert ExecutorCores(never, master).now() == Cores(is_cluster=True, free=0)


def test_the_master_of_the_session_counts_not_that_of_the_definition(spark: SparkSession) -> None:
    cores = ExecutorCores(spark_with(spark), "yarn")
    assert cores.now() == ONE_MACHINE
    assert not cores.is_cluster


def test_a_wait_ends_when_a_core_is_free(spark: SparkSession, tmp_path: Path) -> None:
    cores = ClusterCores(spark_with(spark), "yarn")
    until(lambda: free_cores(spark) == 2, "no task of another test runs")
    cores.wait()  # at once
    with occupied(spark, tmp_path):
        until(lambda: cores.now() == Cores(is_cluster=True, free=0), "the count follows")
        waiting = Thread(target=cores.wait)
        waiting.start()
        until(lambda: len(spark.sparkContext.statusTracker().getActiveJobsIds()) == 2, "its task waits")
        assert waiting.is_alive()
    waiting.join()
