"""The `cdc` source of a log in a bucket: the same rows, and no key in anything that Spark prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from cdc.bucket_files import BucketPath
from cdc.errors import InvalidDefinition
from cdc.log.compacted_table import read_compacted_state
from cdc.log.writer import LogWriter
from pipelines.compaction.compaction_steps import CompactionLimits, compact
from pipelines.source.data_source import register
from pipelines.source.options import SourceOptions
from tests.fixtures.s3 import KEY, KEY_ID, S3
from tests.log.rows import IDENTITY, LIMITS, info, row, table

EVERY = [(position, ordinal) for position in (10, 20, 30) for ordinal in (0, 1)]


@pytest.fixture(name="root")
def _root(s3: S3) -> BucketPath:
    """Three transactions of two rows."""
    root = s3.root()
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    for position in (10, 20, 30):
        writer.commit(writer.stage(table(row(position), row(position, 1))), info(position))
    return root


@pytest.fixture(name="storage")
def _storage(s3: S3, tmp_path: Path) -> str:
    """As an option of the source: its key by reference."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    reached = {"endpoint": f"http://127.0.0.1:{s3.port}", "allow_http": True, "region": "us-east-1"}
    return json.dumps(reached | {"access_key_id": KEY_ID, "secret_access_key": {"file": str(key)}})


def positions(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((r["position"], r["ordinal"]) for r in frame.select("position", "ordinal").collect())


def test_a_batch_reads_what_the_bucket_holds_and_its_plan_tells_no_key(
    spark: SparkSession, root: BucketPath, storage: str
) -> None:
    register(spark)
    batch = spark.read.format("cdc").option("path", str(root)).option("storage", storage).load()

    assert positions(batch) == EVERY
    assert KEY not in batch._jdf.queryExecution().toString()  # type: ignore[operator]  # it has no public name


@pytest.mark.slow
def test_a_stream_reads_what_the_bucket_holds(spark: SparkSession, root: BucketPath, storage: str) -> None:
    register(spark)
    stream = spark.readStream.format("cdc").option("path", str(root)).option("storage", storage).load()
    query = stream.writeStream.format("memory").queryName("bucket").trigger(availableNow=True).start()
    query.awaitTermination()

    assert positions(spark.table("bucket")) == EVERY


def test_a_log_in_a_bucket_is_compacted(root: BucketPath) -> None:
    done = compact(None, root, everything=True)
    held = read_compacted_state(root)

    assert (done.rows_in, done.rows_out) == (6, 2)
    assert held is not None
    assert sum(run.rows for run in held.runs) == 2


@pytest.mark.slow
def test_a_run_is_made_by_workers_in_the_bucket(spark: SparkSession, root: BucketPath) -> None:
    done = compact(spark, root, everything=True, limits=CompactionLimits(large=0, parts=2))

    assert (done.rows_in, done.rows_out) == (6, 2)


def test_what_is_shown_of_a_frame_holds_no_key(root: BucketPath, storage: str) -> None:
    options = SourceOptions.from_options({"path": str(root), "storage": storage})
    (file, *_) = options.open_log().every_file()

    assert dict(file.options)["aws_secret_access_key"] == KEY
    assert [text for text in (repr(options), repr(file), repr(root)) if KEY in text] == []


@pytest.mark.parametrize("said", ["no json", '{"secret_access_key": "labsecret"}', '{"colour": "red"}', "[]"])
def test_an_option_that_cannot_be_used_is_told_without_its_values(said: str) -> None:
    options = SourceOptions.from_options({"path": "s3://lake/log", "storage": said})
    with pytest.raises(InvalidDefinition, match="option 'storage'") as told:
        options.open_log()

    assert KEY not in str(told.value)
