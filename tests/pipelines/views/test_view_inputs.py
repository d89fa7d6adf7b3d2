"""Rows of the inputs of views in Spark, at one or two cuts."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.errors import DeltaJarMissing
from cdc.log.computed_views import InputVersion
from pipelines.views.needed_rows import RowsOfCuts
from pipelines.views.view_inputs import InputRemoved, ViewInputs
from tests.fixtures.one_table_lake import OneTableLake


def test_rows_that_the_driver_has_read_are_divided_into_cuts(spark: SparkSession, tmp_path: Path) -> None:
    inputs = ViewInputs(spark.newSession(), OneTableLake(tmp_path).definition)
    both, earlier, later, none = (pa.table({"id": pa.array(ids, pa.int64())}) for ids in ([1, 2], [3], [4, 5], []))
    before, after, are_few = inputs.register_cuts(
        {"shop.a": RowsOfCuts(both, earlier, later), "shop.b": RowsOfCuts(none, earlier, none)}
    )
    found = {
        name: [row.id for row in inputs.session.table(name).collect()] for name in (*before.values(), *after.values())
    }

    assert (found[before["shop.a"]], found[after["shop.a"]]) == ([1, 2, 3], [1, 2, 4, 5])
    assert (found[before["shop.b"]], found[after["shop.b"]]) == ([3], [])
    assert inputs.session.table(before["shop.a"]).columns == ["id"]
    assert are_few


def test_a_table_in_a_bucket_that_spark_cannot_reach_is_refused_with_a_remedy(
    spark: SparkSession, tmp_path: Path
) -> None:
    inputs = ViewInputs(spark.newSession(), OneTableLake(tmp_path).definition)
    with pytest.raises(DeltaJarMissing, match="no Hadoop file system for target 's3://lake/shop/orders'") as raised:
        inputs.register({"shop.orders": InputVersion("s3://lake/shop/orders", 1, 1)}, "a")
    assert "hadoop-aws" in raised.value.fix


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_rows_of_each_version_are_read_without_the_columns_of_the_sink(tmp_path: Path, spark: SparkSession) -> None:
    lake = OneTableLake(tmp_path)
    lake.publish(20, 40)
    target = str(tmp_path / "lake/shop/orders")
    inputs = ViewInputs(spark.newSession(), lake.definition)
    before = inputs.register({"shop.orders": InputVersion(target, 1, 1)}, "a")
    after = inputs.register({"shop.orders": InputVersion(target, 2, 1)}, "b")
    with pytest.raises(InputRemoved, match=r"version 99 of table .shop\.orders."):
        inputs.register({"shop.orders": InputVersion(target, 99, 1)}, "c")
    inputs.register_rows(after["shop.orders"], pa.table({"id": [40, 60]}), "some")
    inputs.register_rows(after["shop.orders"], pa.table({"id": list(range(30, 1_000))}), "others")

    assert [row.id for row in inputs.session.table(before["shop.orders"]).collect()] == [20]
    assert not {"_position", "_ordinal"} & {*inputs.session.table(after["shop.orders"]).columns}
    assert [row.id for name in ("some", "others") for row in inputs.session.table(name).collect()] == [40, 40]
    assert inputs.session.conf.get("spark.sql.session.timeZone") == "UTC"
