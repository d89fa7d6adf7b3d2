"""Inputs of views at a cut: which are complete, and their rows in Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.stores.published_record import Published, TableRecord
from pipelines.views.log_of_views import InputVersion
from pipelines.views.view_inputs import ViewInputs, usable_inputs
from tests.fixtures.one_table_lake import OneTableLake


def record(topic: str, state: str = "streaming") -> TableRecord:
    return TableRecord(7, topic, "/lake/a", 20, 3, state, parked=(("1",),))


def test_an_input_is_usable_while_its_table_is_complete() -> None:
    published = Published(20, 0, {1: record("shop.a"), 2: record("shop.b", "snapshotting"), 3: record("shop.c")})

    assert usable_inputs(published, ["shop.a", "shop.b", "shop.d"]) == {
        "shop.a": InputVersion("/lake/a", 3, 7, (("1",),))
    }


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_rows_of_each_version_are_read_without_the_columns_of_the_sink(tmp_path: Path, spark: SparkSession) -> None:
    lake = OneTableLake(tmp_path)
    lake.publish(20, 40)
    target = str(tmp_path / "lake/shop/orders")
    inputs = ViewInputs(spark.newSession(), lake.definition)
    before = inputs.register({"shop.orders": InputVersion(target, 1, 1)}, "a")
    after = inputs.register({"shop.orders": InputVersion(target, 2, 1)}, "b")
    removed = inputs.register({"shop.orders": InputVersion(target, 99, 1)}, "c")
    inputs.register_rows(after["shop.orders"], pa.table({"id": [40, 60]}), "some")
    inputs.register_rows(after["shop.orders"], pa.table({"id": list(range(30, 1_000))}), "others")

    assert [row.id for row in inputs.session.table(before["shop.orders"]).collect()] == [20]
    assert not {"_position", "_ordinal"} & {*inputs.session.table(after["shop.orders"]).columns}
    assert [row.id for name in ("some", "others") for row in inputs.session.table(name).collect()] == [40, 40]
    assert removed == {}
    assert inputs.session.conf.get("spark.sql.session.timeZone") == "UTC"
