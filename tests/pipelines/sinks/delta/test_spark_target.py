"""Spark writer: the `txn` of its commits, and targets with table features that only Spark writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.errors import DeltaJarMissing, TargetUnusable
from cdc.position import Position
from cdc.targets.published_record import TargetState
from cdc.targets.unsupported_table_features import unsupported_features
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.spark_target import can_write_delta, frame_of, require_delta, transaction
from tests.contracts.folded import ORDERS, batch, gone, part, put
from tests.pipelines.sinks.added_features import LOG, add_features, filled_sink


def test_a_position_is_a_number_to_delta(spark: SparkSession) -> None:
    with transaction(spark, "app", Position(0x1_0000_0A00)):
        assert spark.conf.get("spark.databricks.delta.write.txnVersion") == str(0x1_0000_0A00)


@pytest.mark.parametrize("sizes", [[0, 2], [2, 0, 1], [1, 2, 0], [0, 0, 3, 0, 1], [0]])
def test_a_frame_has_the_rows_of_all_chunks(spark: SparkSession, sizes: list[int]) -> None:
    parts, first = [], 0
    for size in sizes:
        parts.append(pa.table({"id": pa.array(range(first, first + size), pa.int64())}))
        first += size

    assert [row.id for row in frame_of(spark, pa.concat_tables(parts)).collect()] == [*range(first)]


def positions_of_commits(spark, folder: Path, name: str, ends: list[int]) -> list[int | None]:
    """The position in the `txn` of a target after each of its batches."""
    sink = DeltaSink(DeltaSettings(name, f"{folder}/{name}/{{schema}}/{{table}}", Writer.SPARK), spark)
    sink.open(LOG)
    stands = []
    for after, upto in zip([0, *ends], ends, strict=False):
        record = sink.apply(batch([put(1, name, upto)], after, upto))
        table = DeltaTable(record.target)
        identity = table.metadata().configuration["cdc.app_id"]
        stands.append(table.transaction_version(identity))
    return stands


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_each_commit_carries_the_position_of_its_own_sink(spark, tmp_path: Path) -> None:
    ends = {"near": [10, 20, 30, 40], "far": [1_010, 1_020, 1_030, 1_040]}
    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(positions_of_commits, spark, tmp_path, name, said) for name, said in ends.items()}

    assert {name: stands.result() for name, stands in found.items()} == ends


FEATURES = ("delta.enableRowTracking", "delta.enableInCommitTimestamps", "delta.enableTypeWidening")


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("feature", FEATURES)
def test_spark_writes_a_table_with_features_that_it_knows(spark, tmp_path: Path, feature: str) -> None:
    sink, uri = filled_sink(tmp_path, Writer.AUTO)
    spark.sql(f"ALTER TABLE delta.`{uri}` SET TBLPROPERTIES ('{feature}' = 'true')")
    assert unsupported_features(DeltaTable(uri))
    sink.attach(spark)
    sink.apply(batch([put(1, "A", 30), gone(2, 31), part(3, 32, {3: "7.00"}), put(4, "d", 33)], 20, 40))
    assert held(spark, uri) == {1: ("A", "1.00"), 3: ("c", "7.00"), 4: ("d", "1.00")}

    record = sink.apply(batch([put(5, "e", 52)], 40, 60, truncated=(51, 0)))
    assert held(spark, uri) == {5: ("e", "1.00")}
    record = sink.apply(batch([put(6, "f", 72)], 60, 80, generation=71))
    assert held(spark, uri) == {6: ("f", "1.00")}
    emptied = sink.apply(batch(None, 80, 100, truncated=(90, 0)))
    assert held(spark, uri) == {}
    assert (record.state, record.position, emptied.position) == (TargetState.STREAMING, 80, 100)
    target = sink.parts.targets.by_uri[uri]
    target.refresh()
    assert (target.applied, target.is_complete) == (100, True)


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_columns_of_a_table_that_spark_has_to_write_do_not_change(spark, tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path, Writer.AUTO)
    add_features(uri, ["inCommitTimestamp"])
    sink.attach(spark)
    wider = replace(ORDERS, columns=(*ORDERS.columns, replace(ORDERS.columns[1], id=9, name="more")))
    with pytest.raises(TargetUnusable, match=r"its columns cannot change \(column 'more' was added\)"):
        sink.apply(batch([put(4, "d", 30)], 20, 40, wider))


def held(spark, uri: str) -> dict[int, tuple[str, str]]:
    rows = spark.read.format("delta").load(uri).collect()
    return {row["id"]: (row["item"], str(row["price"])) for row in rows}


def test_without_a_session_nothing_is_written_by_spark() -> None:
    assert not can_write_delta(None)
    with pytest.raises(DeltaJarMissing, match="its session has no Delta jar"):
        require_delta(None)
