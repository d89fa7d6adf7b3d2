"""Starts of a Spark session, as the runners of sinks get them."""

from __future__ import annotations

from concurrent.futures import Future

from pyspark.sql import SparkSession

from pipelines.spark_on_demand import SparkOnDemand


def spark_that_never_starts() -> SparkOnDemand:
    """A start that begins when it is requested, and does not end."""
    return SparkOnDemand(Future)


def spark_with(session: SparkSession | None) -> SparkOnDemand:
    """A start that has ended with this session; None: one that never ends."""
    if session is None:
        return spark_that_never_starts()
    started: Future[SparkSession] = Future()
    started.set_result(session)
    spark = SparkOnDemand(lambda: started)
    spark.request("a test has it")
    return spark
