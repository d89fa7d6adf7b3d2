"""Executors are warmed by tasks that load the code of a batch, where there are executors before the first batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from pipelines.runtime.spark_session import ON_A_CLUSTER, SparkSettings
from pipelines.source.data_source import register
from pipelines.warm_executors import has_executors, warm_executors, warm_planners
from tests.benchmarks.apply_input import Changes
from tests.fixtures.waiting import until
from tests.pipelines.spark_queries import QueriesSince


def test_the_tasks_end_without_an_error(spark: SparkSession) -> None:
    queries = QueriesSince(spark)
    with capture_logs() as lines:
        threads = warm_executors(spark)
        until(lambda: not any(thread.is_alive() for thread in threads), "the tasks end")
    assert lines == []
    ended = until(queries.ended, "Spark has recorded the query")
    assert [query.errorMessage().get() for query in ended] == [""]


def test_the_processes_that_plan_a_range_of_the_log_are_started_without_an_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    log = Changes.random(np.random.default_rng(0), 10, 10).log(tmp_path)
    register(spark)
    with capture_logs() as lines:
        thread = warm_planners(spark, str(log), "{}")
        until(lambda: not thread.is_alive(), "the range is planned")

    assert lines == []


def test_a_log_that_does_not_exist_yet_is_no_error(spark: SparkSession, tmp_path: Path) -> None:
    register(spark)
    with capture_logs() as lines:
        thread = warm_planners(spark, str(tmp_path / "none"), "{}")
        until(lambda: not thread.is_alive(), "the plan fails")

    assert [line["log_level"] for line in lines] == ["debug"]


def test_tasks_with_and_without_sql_share_a_worker(spark: SparkSession) -> None:
    """Otherwise the tasks that load the code would load it into other workers than those of a batch."""
    context, prefix = spark.sparkContext, "spark.executorEnv."

    def name_daemon(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"daemon": [os.getppid()]})

    variables = {key.removeprefix(prefix): text for key, text in ON_A_CLUSTER.items() if key.startswith(prefix)}
    before = dict(context.environment)
    context.environment.update(variables)
    try:
        without_sql = context.parallelize([0], 1).map(lambda _: os.getppid()).collect()
    finally:
        context.environment.clear()
        context.environment.update(before)
    with_sql = [row["daemon"] for row in spark.range(1).mapInArrow(name_daemon, "daemon long").collect()]

    assert set(with_sql) == set(without_sql)


@pytest.mark.parametrize(
    ("master", "allocation", "expected"),
    [("local[2]", "false", False), ("spark://host:7077", "false", True), ("yarn", "true", False)],
)
def test_only_a_cluster_has_executors_and_not_if_it_starts_them_for_tasks(
    master: str, allocation: str, expected: bool
) -> None:
    settings = SparkSettings(master=master, conf={"spark.dynamicAllocation.enabled": allocation})
    assert has_executors(settings) is expected
