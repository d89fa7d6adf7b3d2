"""A Delta sink whose tables lie in a bucket, which delta-rs reaches by the variables that its own tools know."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config import WriterChoice, load_definition
from cdc.errors import DeltaJarMissing
from cdc.stores.lake import Lake
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from pipelines.sink_factory import build_sink
from pipelines.sinks.delta.spark_writer import has_file_system
from tests.fixtures.s3 import KEY, KEY_ID, S3
from tests.pipelines.replayed import END, Ground, Rows, delta_rows, made


@pytest.fixture(name="beside")
def _beside(tmp_path: Path) -> Ground:
    """The same history, applied to a directory."""
    ground = made(tmp_path / "directory")
    ground.drive("lake")
    return ground


@pytest.fixture(name="ground")
def _ground(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> Ground:
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{s3.port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    for name, value in (said | {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": KEY}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    ground = made(tmp_path / "bucket")
    path = ground.folder / "shop.yaml"
    path.write_text(path.read_text().replace(f"{ground.folder}/lake", str(s3.root())))
    ground.definition = load_definition(path)
    return ground


def lake(ground: Ground) -> Rows:
    records = Lake.open(ground.definition.sinks[0].path).tables()
    return {record.topic: delta_rows(record.target, record.version) for record in records}


def test_a_lake_in_a_bucket_is_the_one_in_a_directory(ground: Ground, beside: Ground) -> None:
    ground.drive("lake", upto=END - 100)
    ground.drive("lake")

    assert lake(ground) == beside.lake()
    assert lake(ground)["shop.orders"]


def test_a_lake_in_a_bucket_is_built_anew_in_its_place(ground: Ground, beside: Ground) -> None:
    ground.drive("lake", upto=END - 100)
    report = replay(ground.definition, ReplayOptions(sink="lake"), lambda _text: None)

    assert report.ok, report.summary
    assert lake(ground) == beside.lake()


@pytest.mark.usefixtures("with_delta")
def test_spark_writes_to_no_store_that_it_cannot_reach(ground: Ground, spark: SparkSession) -> None:
    assert has_file_system(spark, "/mnt/lake/{schema}/{table}")
    assert has_file_system(spark, "file:///mnt/lake")
    assert not has_file_system(spark, ground.definition.sinks[0].path)
    wanted = ground.definition.sinks[0].model_copy(update={"writer": WriterChoice.SPARK})
    sink = build_sink(wanted)
    sink.attach(spark)

    with pytest.raises(DeltaJarMissing, match="needs a Hadoop file system for 's3://"):
        sink.open("a log")
