"""Executors write a lake in a bucket for which Spark has no Hadoop file system; they are refused, and drivers die."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from cdc.errors import LakeInaccessible, MergeNeedsFileSystem
from cdc.failpoint import VARIABLE, Abandoned
from cdc.position import Position
from pipelines.sink_loop import SinkLoop
from tests.fixtures.s3 import S3, Relay
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import log_row
from tests.pipelines.sinks.delta.test_executor_merge import changes, first_copy, image, written
from tests.pipelines.test_both_ways import loop_in, parked_in, records_of, rows_of

pytestmark = pytest.mark.usefixtures("with_delta")

FOREIGN: Final = 99
"""Key of a row that another client writes."""
BY_EXECUTORS: Final = re.compile(r"part-[0-9a-f-]{36}\.parquet")
RULES: Final = {"latest state": "[]", "history": "[{match: shop.*, stored_as_scd_type: 2}]"}


def give_access(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, s3: S3, port: int | None = None) -> None:
    """Give this process access to the buckets, and executors as well, through a relay if its port is given."""
    for name, text in s3.variables().items():
        monkeypatch.setenv(name, text)
        monkeypatch.setitem(spark.sparkContext.environment, name, text)
    if port is not None:
        monkeypatch.setitem(spark.sparkContext.environment, "AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    """A first copy at position 100, changes at 200, of which some are partial images, and later changes at 300."""
    later = [written(log_row(1, (300, key), "d", key=[str(key)])) for key in range(20, 24)]
    later += [written(log_row(1, (300, key), "u", key=[str(key)], after=image(key, "8"))) for key in range(24, 30)]
    writer = log_writer(tmp_path / "log")
    for transaction in (first_copy(), changes(Random(1)), later):
        append(writer, [transaction])
    return tmp_path / "log"


def state_of(loop: SinkLoop) -> tuple[Any, ...]:
    """Rows and records; parked rows without the end of their batch, which a dead driver may have chosen."""
    return rows_of(loop), [replace(row, upto=0) for row in parked_in(loop)], records_of(loop)


def expected_after(folder: Path, log: Path, *ends: int, rules: str = "[]") -> tuple[Any, ...]:
    """What the apply process leaves that applies the same ranges to a directory."""
    with loop_in(folder / "here", log, None, rules=rules) as here:
        for end in ends:
            here(None, Position(end))
        return state_of(here)


def target_of(loop: SinkLoop) -> DeltaTable:
    (table,) = loop.record.tables.values()
    return DeltaTable(table.target)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_lake_in_a_bucket_is_written_by_executors_also_after_a_driver_that_died(
    spark: SparkSession, log: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    give_access(spark, monkeypatch, s3)
    lake = str(s3.root())
    with loop_in(log.parent / "lake", log, spark, rules=rules, lake=lake) as dying:
        dying(spark, Position(100))
        monkeypatch.setenv(VARIABLE, "before_publish:1:abandon")
        with pytest.raises(Abandoned):
            dying(spark, Position(200))
        monkeypatch.delenv(VARIABLE)
    with loop_in(log.parent / "lake", log, spark, rules=rules, lake=lake) as loop:
        loop(spark, Position(300))  # a longer range than that of the dead driver
        assert state_of(loop) == expected_after(log.parent, log, 100, 300, rules=rules)
        assert all(BY_EXECUTORS.search(file) for file in target_of(loop).file_uris())
        assert target_of(loop).history(1)[0].get("engineInfo") == "cdc"


def test_a_batch_that_needs_delta_s_merge_is_repeated_by_the_driver_where_spark_has_no_file_system(
    spark: SparkSession, log: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_access(spark, monkeypatch, s3)
    with loop_in(log.parent / "lake", log, spark, lake=str(s3.root())) as loop:
        loop(spark, Position(100))
        target = target_of(loop)
        columns = pa.schema(target.schema().to_arrow())
        foreign = dict.fromkeys(columns.names) | {"id": FOREIGN, "_position": 150, "_ordinal": 0}
        write_deltalake(target, pa.Table.from_pylist([foreign], columns), mode="append")
        with pytest.raises(MergeNeedsFileSystem, match="the driver writes the table from the next attempt on"):
            loop(spark, Position(200))
        assert loop.position == 100
        loop(spark, Position(200))
        rows = [row for row in rows_of(loop)["shop.table1"] if row["id"] != FOREIGN]
        assert len(rows) == len(rows_of(loop)["shop.table1"]) - 1
    assert rows == expected_after(log.parent, log, 100, 200)[0]["shop.table1"]


def test_executors_that_may_not_write_into_the_bucket_stop_the_batch_and_nothing_of_it_is_visible(
    spark: SparkSession, log: Path, s3: S3, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_access(spark, monkeypatch, s3, port=relay.port)
    refused = relay.fault("^PUT ", status=403, times=1_000)
    with loop_in(log.parent / "lake", log, spark, lake=str(s3.root())) as loop:
        with pytest.raises(LakeInaccessible, match="the object store denies access"):
            loop(spark, Position(100))
        assert refused.done
        assert loop.position == 0
        refused.times = 0
        loop(spark, Position(100))
        found = state_of(loop)
    assert found == expected_after(log.parent, log, 100)
