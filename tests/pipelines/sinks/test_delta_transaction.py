"""The `txn` of Spark's writes: Delta takes a number, and a position prints itself as Postgres prints one."""

from __future__ import annotations

from pyspark.sql import SparkSession

from cdc.position import Position
from pipelines.sinks.delta.spark_target import transaction


def test_a_position_is_a_number_to_delta(spark: SparkSession) -> None:
    with transaction(spark, "app", Position(0x1_0000_0A00)):
        assert spark.conf.get("spark.databricks.delta.write.txnVersion") == str(0x1_0000_0A00)
