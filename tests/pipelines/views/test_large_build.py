"""Builds by executors: the same rows as those of the driver, in files that go away, with a key that is checked."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.errors import ValueNotRepresentable, ViewKeyNotUnique
from cdc.log.computed_views import InputVersion
from cdc.table import TableSchema
from pipelines.views.changed_rows import ROWS
from pipelines.views.kept_rows import view_rows
from pipelines.views.large_build import LargeBuild, have_rows
from pipelines.views.log_of_views import BUILDS, LogOfViews
from pipelines.views.view_columns import result_rows, view_schema
from tests.fixtures.one_table_lake import OneTableLake
from tests.log.rows import IDENTITY, LIMITS

SELECT = (
    "SELECT id, timestamp_seconds(id) AS at, named_struct('n', id, 'text', 'é') AS part,"
    " CAST(id AS DECIMAL(20, 3)) AS d FROM range(0, 5000, 1, 3)"
)


def schema_of(spark: SparkSession, sql: str) -> TableSchema:
    return view_schema(1, "shop.v", ["id"], result_rows(spark.sql(sql).limit(0)).schema)


def keyed(rows: pa.Table) -> dict[str, object]:
    return {row["key"][0]: row["after"] for row in rows.to_pylist()}


@pytest.mark.parametrize("floor", [None, 4_000_000_000])
def test_executors_make_the_rows_that_the_driver_makes(spark: SparkSession, tmp_path: Path, floor: int | None) -> None:
    schema = view_schema(1, "shop.v", ["id", "at"], result_rows(spark.sql(SELECT).limit(0)).schema)
    expected = view_rows(result_rows(spark.sql(SELECT)), schema, floor)
    build = LargeBuild.of(spark.sql(SELECT), schema, floor, tmp_path)
    parts = list(build.take())

    assert {part.schema for part in parts} == {ROWS}
    assert len(parts) == 3  # one of each task
    assert keyed(pa.concat_tables(parts)) == keyed(expected)
    assert not build.folder.exists()


def test_a_key_of_two_rows_is_found_across_files(spark: SparkSession, tmp_path: Path) -> None:
    sql = f"{SELECT} UNION ALL {SELECT} WHERE id = 77"
    with pytest.raises(ViewKeyNotUnique, match=r"more than one row with the key \(id\) = \['77'\]"):
        LargeBuild.of(spark.sql(sql), schema_of(spark, sql), None, tmp_path)
    assert not list((tmp_path / BUILDS).iterdir())


def test_an_error_of_an_executor_has_its_code(spark: SparkSession, tmp_path: Path) -> None:
    sql = "SELECT id, char(CAST(id AS INT)) AS text FROM range(0, 3)"
    with pytest.raises(ValueNotRepresentable, match=r"column 'text' of view 'shop\.v'"):
        LargeBuild.of(spark.sql(sql), schema_of(spark, sql), None, tmp_path)
    assert not list((tmp_path / BUILDS).iterdir())


def test_an_empty_view_has_no_files(spark: SparkSession, tmp_path: Path) -> None:
    sql = f"SELECT * FROM ({SELECT}) WHERE id < 0"
    assert list(LargeBuild.of(spark.sql(sql), schema_of(spark, sql), None, tmp_path).take()) == []


def test_what_a_killed_process_left_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    build = LargeBuild.of(spark.sql(SELECT), schema_of(spark, SELECT), None, tmp_path)
    assert build.folder.exists()
    LogOfViews(tmp_path, IDENTITY, LIMITS)
    assert not (tmp_path / BUILDS).exists()


def test_inputs_are_counted_without_reading_them(tmp_path: Path) -> None:
    lake = OneTableLake(tmp_path)
    lake.publish(20, 40)
    inputs = [InputVersion(str(tmp_path / "lake/shop/orders"), version, 1) for version in (1, 2)]
    missing = [InputVersion(str(tmp_path / "nowhere"), 1, 1)]
    assert [have_rows(inputs, number) for number in (1, 3, 100)] == [True, True, False]
    assert have_rows(missing, 100)
