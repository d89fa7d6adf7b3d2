"""Rebuild: however a table is built, on the driver, by executors or in parts, it is the same table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config import SearchSinkDefinition
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.published_record import TargetState
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext, group_tables
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.runtime.spark_session import has_delta
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
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


def server_sink(server: SharedOpenSearch, name: str, **access: Any) -> SearchSinkDefinition:
    return search_sink(replace(server, prefix=f"{server.prefix}{name}-"), **access)


def documents(sink: SearchSinkDefinition, topic: str) -> dict[Any, Any]:
    return {row.key: (row.source, row.position) for row in SearchServerReader.open(sink).documents(topic)}


@pytest.mark.slow
def test_executors_build_the_index_that_the_driver_builds(
    spark: SparkSession, shop: ShopPipeline, opensearch: SharedOpenSearch
) -> None:
    by_driver, by_executors = (server_sink(opensearch, name) for name in ("a", "b"))
    rebuilt(shop, SearchServerSink(by_driver), ("shop.*",))
    rebuilt(shop, SearchServerSink(by_executors), ("shop.*",), spark, frames=True)

    for topic in ("shop.orders", "shop.items"):
        assert documents(by_executors, topic) == documents(by_driver, topic)
    assert documents(by_executors, "shop.items").keys() == {("7",), ("8",)}


@pytest.mark.slow
def test_a_document_that_the_server_refuses_is_parked_alone_also_on_executors(
    spark: SparkSession, shop: ShopPipeline, opensearch: SharedOpenSearch
) -> None:
    shop.append(1_500, [change(1_500, 0, 9, "x" * 40_000, op="u", of=ITEMS)])
    sink = server_sink(opensearch, "a", field_types={"note": "keyword"})  # a term has at most 32,766 bytes

    built = rebuilt(shop, SearchServerSink(sink), ("shop.items",), spark, frames=True)

    assert built.tables[ITEMS].parked == (("9",),)
    assert built.tables[ITEMS].state == TargetState.STREAMING
    assert ("9",) not in documents(sink, "shop.items")
    assert ("8",) in documents(sink, "shop.items")


def test_small_tables_share_a_group_and_a_large_one_is_alone(shop: ShopPipeline) -> None:
    log = LogReader(shop.folder / "log")
    orders, items = read_contents(log, Position(END), sink="lake", globs=("shop.*",))
    assert (orders.relation, orders.rows, items.rows) == (ORDERS, 57, 23)
    assert group_tables([orders, items], 80) == [[orders, items]]
    assert group_tables([orders, items], 79) == [[orders], [items]]
    assert group_tables([orders, items], 10) == [[orders], [items]]
