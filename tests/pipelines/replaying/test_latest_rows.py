"""Spark builds the same rows of a table as the driver: folded in parts, and converted by executors."""

from __future__ import annotations

import re

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.errors import LakeInaccessible
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.published_record import TargetState
from cdc.targets.search_index_reader import SearchIndex
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink
from tests.fixtures.s3 import S3
from tests.pipelines.replaying.rebuilt_tables import TABLES, copying, delta, rebuilt, tables_of
from tests.pipelines.shop_pipeline import ITEMS, ShopPipeline, change


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("writer", [Writer.AUTO, Writer.SPARK])
@pytest.mark.parametrize("globs", TABLES)
def test_executors_build_what_the_driver_builds(
    spark: SparkSession, shop: ShopPipeline, globs: tuple[str, ...], writer: Writer
) -> None:
    right = tables_of(rebuilt(shop, delta(shop, "plain"), globs))
    sink = delta(shop, "large", writer)
    sink.attach(spark)
    built = rebuilt(shop, sink, globs, spark, frames=True)
    assert tables_of(built) == right
    assert {record.state for record in built.tables.values()} == {TargetState.STREAMING}


@pytest.mark.usefixtures("with_delta")
def test_executors_write_the_rows_of_a_table_into_a_bucket(
    spark: SparkSession, shop: ShopPipeline, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tables_of(rebuilt(shop, delta(shop, "plain"), ("shop.items",)))
    for name, text in s3.variables().items():
        monkeypatch.setenv(name, text)
        monkeypatch.setitem(spark.sparkContext.environment, name, text)
    sink = DeltaSink(DeltaSettings("lake", f"{s3.root()}/{{schema}}/{{table}}"))
    built = rebuilt(shop, sink, ("shop.items",), spark, frames=True)

    assert tables_of(built) == right
    (record,) = built.tables.values()
    files = DeltaTable(record.target).file_uris()
    assert len(files) > 1
    assert all(re.search(r"/part-[0-9a-f-]{36}\.parquet$", file) for file in files), "the driver wrote them"


@pytest.mark.usefixtures("with_delta")
def test_executors_without_access_to_a_bucket_are_reported(
    spark: SparkSession, shop: ShopPipeline, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in s3.variables().items():
        monkeypatch.setenv(name, text)
        if not name.endswith("KEY") and not name.endswith("KEY_ID"):
            monkeypatch.setitem(spark.sparkContext.environment, name, text)
    monkeypatch.setitem(spark.sparkContext.environment, "AWS_EC2_METADATA_DISABLED", "true")
    sink = DeltaSink(DeltaSettings("lake", f"{s3.root()}/{{schema}}/{{table}}"))

    with pytest.raises(LakeInaccessible, match="a target that an executor writes cannot be accessed"):
        rebuilt(shop, sink, ("shop.items",), spark, frames=True)


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_a_value_that_a_later_change_replaced_stops_nothing(spark: SparkSession, shop: ShopPipeline) -> None:
    shop.append(1_500, [change(1_500, 0, 9, "x", after=[(1, "not a number"), (2, "x")], op="u", of=ITEMS)])
    shop.append(1_600, [change(1_600, 0, 9, "right", op="u", of=ITEMS)])
    log = LogReader(shop.folder / "log")
    tables = read_contents(log, Position(1_600), sink="lake", globs=("shop.items",))
    sink = delta(shop, "lake")
    sink.open(log.log_id)
    means = RebuildContext(spark=lambda: spark, executors_can_write=lambda: True, large=10, part=20)
    built = Rebuild(LogSource(log, "lake", ("shop.*",)), sink, means)(tables, Position(1_600))
    assert [(row["id"], row["note"]) for row in tables_of(built)["shop.items"]] == [
        (7, "later"),
        (8, "too"),
        (9, "right"),
    ]


@pytest.mark.slow
def test_parts_build_what_the_driver_builds(spark: SparkSession, shop: ShopPipeline) -> None:
    right = tables_of(rebuilt(shop, delta(shop, "plain"), ("shop.*",)))
    assert tables_of(rebuilt(shop, delta(shop, "parts", Writer.COPY_ON_WRITE), ("shop.*",), spark)) == right


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
    built = rebuilt(shop, delta(shop, "parts", Writer.COPY_ON_WRITE), ("shop.items",), spark)
    assert tables_of(built) == right
    assert built.tables[ITEMS].state == TargetState.SNAPSHOTTING
