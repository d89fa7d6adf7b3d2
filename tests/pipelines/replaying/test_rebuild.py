"""Rebuild: however a table is built, on the driver, by executors or in parts, it is the same table."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.stores.published_record import TargetState
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext, group_tables
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.runtime.spark_session import has_delta
from tests.pipelines.replaying.rebuilt_tables import copying, delta, rebuilt, tables_of
from tests.pipelines.shop_pipeline import END, ITEMS, ORDERS, ShopPipeline, applied_shop, change


def test_the_driver_builds_what_applying_builds() -> None:
    shop = applied_shop()
    assert tables_of(rebuilt(shop, delta(shop, "other"), ("shop.*",))) == shop.lake()


def test_of_a_table_that_is_being_copied_what_is_there_is_built(shop: ShopPipeline) -> None:
    copying(shop)
    shop.drive("lake", 1_600)
    built = rebuilt(shop, delta(shop, "other"), ("shop.*",))
    assert tables_of(built) == shop.lake()
    assert [row["id"] for row in tables_of(built)["shop.items"]] == [7, 8, *range(80, 91)]
    states = {relation: record.state for relation, record in built.tables.items()}
    assert states == {ORDERS: TargetState.STREAMING, ITEMS: TargetState.SNAPSHOTTING}


@pytest.mark.slow
def test_a_value_that_does_not_fit_is_parked_alone_also_on_executors(spark: SparkSession, shop: ShopPipeline) -> None:
    shop.append(1_500, [change(1_500, 0, 9, "x", after=[(1, "not a number"), (2, "x")], op="u")])
    log = LogReader(shop.folder / "log")
    tables = read_contents(log, Position(1_500), sink="lake", globs=("shop.*",))
    sink = delta(shop, "lake")
    sink.open(log.log_id)
    means = RebuildContext(spark=lambda: spark, executors_can_write=lambda: has_delta(spark), large=30, part=20)
    built = Rebuild(LogSource(log, "lake", ("shop.*",)), sink, means)(tables, Position(1_500))
    assert {record.state for record in built.tables.values()} == {TargetState.STREAMING}
    assert {relation: record.parked for relation, record in built.tables.items()} == {ORDERS: (("9",),), ITEMS: ()}
    assert 9 not in {row["id"] for row in tables_of(built)["shop.orders"]}


def test_small_tables_share_a_group_and_a_large_one_is_alone(shop: ShopPipeline) -> None:
    log = LogReader(shop.folder / "log")
    orders, items = read_contents(log, Position(END), sink="lake", globs=("shop.*",))
    assert (orders.relation, orders.rows, items.rows) == (ORDERS, 57, 23)
    assert group_tables([orders, items], 80) == [[orders, items]]
    assert group_tables([orders, items], 79) == [[orders], [items]]
    assert group_tables([orders, items], 10) == [[orders], [items]]
