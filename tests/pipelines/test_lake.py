"""All tables of a sink in Spark as they were together: pipelines/lake.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config import SinkRule
from cdc.errors import CutUnavailable
from cdc.position import Position
from cdc.targets.published_record import Published
from pipelines import lake
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, put

ITEMS = replace(ORDERS, relation=2, oid=2, name="items")
STOCK = replace(ORDERS, relation=3, oid=3, schema="stock", name="items")


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> str:
    """Cuts at 20 and 40 of two tables; a third one is being copied."""
    path = f"{tmp_path}/{{schema}}/{{table}}"
    sink = DeltaSink(DeltaSettings("lake", path))
    sink.open("log-1")
    for after, upto in ((0, 20), (20, 40)):
        begun = None if after else 1
        records = [
            sink.apply(batch([put(upto, "o", upto)], after, upto, ORDERS, generation=begun)),
            sink.apply(batch([put(upto, "i", upto)], after, upto, ITEMS, generation=begun)),
            sink.apply(batch([put(upto, "s", upto)], after, upto, STOCK)),
        ]
        sink.publish(Published(upto, upto, {record.relation: record for record in records}))
    return path


@pytest.mark.slow
def test_frames_and_views_show_every_table_of_one_cut_and_none_that_does_not_belong_to_it(
    spark: SparkSession, path: str
) -> None:
    past = lake.at(spark, path, Position(25))
    assert {topic: [row.id for row in frame.collect()] for topic, frame in past.items()} == {
        "shop.items": [20],
        "shop.orders": [20],
    }
    names = lake.views(spark, path)
    assert names == {"shop.items": "shop__items", "shop.orders": "orders"}
    found = spark.sql("select count(*) from orders join shop__items using (id)").collect()
    assert [tuple(row) for row in found] == [(2,)]
    assert {table.topic: table.state for table in lake.cut(path, "0/14").tables.values()}[
        "stock.items"
    ] == "snapshotting"
    with pytest.raises(CutUnavailable):
        lake.at(spark, path, "0/13")


@pytest.mark.slow
def test_a_target_that_several_tables_share_is_there_by_table_and_as_a_whole(spark: SparkSession, tmp_path: Path):
    path = f"{tmp_path}/{{schema}}/{{table}}"
    rule = SinkRule.model_validate({"match": "shop.*", "path": f"{tmp_path}/shop/both", "merge_tables": True})
    sink = DeltaSink(DeltaSettings("lake", path, rules=(rule,)))
    sink.open("log-1")
    records = {t.relation: sink.apply(batch([put(1, t.name, 10)], 0, 20, t, generation=1)) for t in (ORDERS, ITEMS)}
    sink.publish(Published(20, 20, records))
    sink.apply(batch([put(2, "ahead", 30)], 20, 40, ITEMS))

    assert lake.views(spark, path) == {"both": "both", "shop.items": "items", "shop.orders": "orders"}
    for view, items in {"both": ["items", "orders"], "items": ["items"], "orders": ["orders"]}.items():
        assert [row.item for row in spark.sql(f"select item from {view} order by 1").collect()] == items

    opened = DeltaSink(DeltaSettings("lake", path, rules=(rule,))).open("log-1")
    assert opened is not None
    assert lake.at(spark, path, replace(opened, position=20)).keys() == {"shop.orders"}
    assert [row.id for row in lake.at(spark, path, opened)["shop.orders"].collect()] == [1]
