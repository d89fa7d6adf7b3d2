"""A table that Spark folds in parts has the rows that the driver builds."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from cdc.stores.published import TargetState
from cdc.stores.search_index import SearchIndex
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.search.sink import SearchSink
from tests.pipelines.replayed import ITEMS, Ground
from tests.pipelines.replaying.rebuilt_tables import TABLES, copying, delta, rebuilt, tables_of


@pytest.mark.slow
def test_parts_build_what_the_driver_builds(spark: SparkSession, ground: Ground) -> None:
    right = tables_of(rebuilt(ground, delta(ground, "plain"), ("shop.*",)))
    assert tables_of(rebuilt(ground, delta(ground, "parts", Writer.DELTA_RS), ("shop.*",), spark)) == right


@pytest.mark.parametrize("globs", TABLES)
def test_an_index_is_built_in_parts(spark: SparkSession, ground: Ground, globs: tuple[str, ...]) -> None:
    rebuilt(ground, SearchSink("whole", ground.folder / "whole"), globs)
    built = rebuilt(ground, SearchSink("find", ground.folder / "find"), globs, spark)
    assert ground.found() == ground.found("whole")
    assert SearchIndex.open(ground.folder / "find").published == built


@pytest.mark.slow
def test_of_a_table_that_is_being_copied_parts_build_what_the_driver_builds(
    spark: SparkSession, ground: Ground
) -> None:
    copying(ground)
    right = tables_of(rebuilt(ground, delta(ground, "plain"), ("shop.items",)))
    built = rebuilt(ground, delta(ground, "parts", Writer.DELTA_RS), ("shop.items",), spark)
    assert tables_of(built) == right
    assert built.tables[ITEMS].state == TargetState.SNAPSHOTTING
