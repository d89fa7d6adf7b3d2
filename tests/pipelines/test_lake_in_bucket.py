"""A Delta sink whose tables lie in a bucket, which delta-rs reaches by the variables that its own tools know."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config import WriterChoice, load_definition
from cdc.errors import DeltaJarMissing
from cdc.targets.lake_reader import Lake
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from pipelines.sink_kinds import build_sink
from pipelines.sinks.delta.spark_target import has_file_system
from tests.fixtures.s3 import KEY, KEY_ID, S3
from tests.pipelines.shop_pipeline import END, Rows, ShopPipeline, applied_shop, delta_rows, make_shop


@pytest.fixture(name="beside")
def _beside() -> ShopPipeline:
    """The same history, applied to a directory."""
    return applied_shop()


@pytest.fixture(name="shop")
def _shop(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> ShopPipeline:
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{s3.port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    for name, value in (said | {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": KEY}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    shop = make_shop(tmp_path / "bucket")
    path = shop.folder / "shop.yaml"
    path.write_text(path.read_text().replace(f"{shop.folder}/lake", str(s3.root())))
    shop.definition = load_definition(path)
    return shop


def lake(shop: ShopPipeline) -> Rows:
    records = Lake.open(shop.definition.sinks[0].path).tables()
    return {record.topic: delta_rows(record.target, record.version) for record in records}


@pytest.mark.slow
def test_a_lake_in_a_bucket_is_the_one_in_a_directory(shop: ShopPipeline, beside: ShopPipeline) -> None:
    shop.drive("lake", upto=END - 100)
    shop.drive("lake")

    assert lake(shop) == beside.lake()
    assert lake(shop)["shop.orders"]


def test_a_lake_in_a_bucket_is_built_anew_in_its_place(shop: ShopPipeline, beside: ShopPipeline) -> None:
    shop.drive("lake", upto=END - 100)
    report = replay(shop.definition, ReplayOptions(sink="lake"), lambda _text: None)

    assert report.ok, report.summary
    assert lake(shop) == beside.lake()


@pytest.mark.usefixtures("with_delta")
def test_spark_writes_to_no_store_that_it_cannot_reach(shop: ShopPipeline, spark: SparkSession) -> None:
    assert has_file_system(spark, "/mnt/lake/{schema}/{table}")
    assert has_file_system(spark, "file:///mnt/lake")
    assert not has_file_system(spark, shop.definition.sinks[0].path)
    wanted = shop.definition.sinks[0].model_copy(update={"writer": WriterChoice.SPARK})
    sink = build_sink(wanted)
    sink.attach(spark)

    with pytest.raises(DeltaJarMissing, match="has no Hadoop file system for path 's3://"):
        sink.open("a log")
