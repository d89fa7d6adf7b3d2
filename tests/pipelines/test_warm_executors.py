"""Executors are warmed by tasks that load the code of a batch, where there are executors before the first batch."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pipelines.runtime.spark_session import SparkSettings
from pipelines.warm_executors import has_executors, warm_executors
from tests.fixtures.waiting import until
from tests.pipelines.spark_queries import QueriesSince


def test_the_tasks_end_without_an_error(spark: SparkSession) -> None:
    queries = QueriesSince(spark)
    thread = warm_executors(spark)
    until(lambda: not thread.is_alive(), "the tasks end")
    assert [query.errorMessage().get() for query in queries.ended()] == [""]


@pytest.mark.parametrize(
    ("master", "allocation", "expected"),
    [("local[2]", "false", False), ("spark://host:7077", "false", True), ("yarn", "true", False)],
)
def test_only_a_cluster_has_executors_and_not_if_it_starts_them_for_tasks(
    master: str, allocation: str, expected: bool
) -> None:
    settings = SparkSettings(master=master, conf={"spark.dynamicAllocation.enabled": allocation})
    assert has_executors(settings) is expected
