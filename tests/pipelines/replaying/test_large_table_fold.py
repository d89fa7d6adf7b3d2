"""A table that Spark folds in parts has the rows that the driver builds."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from cdc.stores.published_record import TargetState
from cdc.stores.search_index import SearchIndex
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.search.sink import SearchSink
from tests.pipelines.replaying.rebuilt_tables import TABLES, copying, delta, rebuilt, tables_of
from tests.pipelines.shop_pipeline import ITEMS, ShopPipeline


@pytest.mark.slow
def test_parts_build_what_the_driver_builds(spark: SparkSession, shop: ShopPipeline) -> None:
    right = tables_of(rebuilt(shop, delta(shop, "plain"), ("shop.*",)))
    assert tables_of(rebuilt(shop, delta(shop, "parts", Writer.DELTA_RS), ("shop.*",), spark)) == right


@pytest.mark.parametrize("globs", TABLES)
def test_an_index_is_built_in_parts(spark: SparkSession, shop: ShopPipeline, globs: tuple[str, ...]) -> None:
    rebuilt(shop, SearchSink("whole", shop.folder / "whole"), globs)
    built = rebuilt(shop, SearchSink("find", shop.folder / "find"), globs, spark)
    assert shop.found() == shop.found("whole")
    assert SearchIndex.open(shop.folder / "find").published == built


@pytest.mark.slow
def test_of_a_table_that_is_being_copied_parts_build_what_the_driver_builds(
    spark: SparkSession, shop: ShopPipeline
) -> None:
    copying(shop)
    right = tables_of(rebuilt(shop, delta(shop, "plain"), ("shop.items",)))
    built = rebuilt(shop, delta(shop, "parts", Writer.DELTA_RS), ("shop.items",), spark)
    assert tables_of(built) == right
    assert built.tables[ITEMS].state == TargetState.SNAPSHOTTING
