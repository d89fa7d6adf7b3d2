"""Builds by executors: the same rows as those of the driver, in files that go away, with a key that is checked."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc import failpoint
from cdc.errors import ValueNotRepresentable, ViewKeyNotUnique
from cdc.log.computed_views import ComputedFrom, InputVersion
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.sinks.delta.spark_target import frame_of
from pipelines.views.changed_rows import CHANGED_ROWS, all_new, differences
from pipelines.views.kept_rows import old_rows, view_rows
from pipelines.views.large_build import PART_ROWS, UNKNOWN_PARTS, LargeBuild, LargeBuilder, count_rows, number_of_parts
from pipelines.views.log_of_views import BUILDS, Cut, LogOfViews
from pipelines.views.view_columns import result_rows, view_schema
from tests.fixtures.one_table_lake import OneTableLake
from tests.log.rows import IDENTITY, LIMITS
from tests.pipelines.views.view_pipeline import SOURCE

EXAMPLES = int(os.environ.get("CDC_LARGE_VIEW_EXAMPLES", "2"))
"""Random rows whose differences both ways find."""
Notes = dict[int, str | None]
NOTED = view_schema(1, "shop.v", ["id"], pa.schema([("id", pa.int64()), ("note", pa.string())]))

SELECT = (
    "SELECT id, timestamp_seconds(id) AS at, named_struct('n', id, 'text', 'é') AS part,"
    " CAST(id AS DECIMAL(20, 3)) AS d FROM range(0, 5000, 1, 3)"
)


def schema_of(spark: SparkSession, sql: str) -> TableSchema:
    return view_schema(1, "shop.v", ["id"], result_rows(spark.sql(sql).limit(0)).schema)


def table_of(rows: Notes) -> pa.Table:
    return pa.table({"id": pa.array(rows, pa.int64()), "note": pa.array(rows.values(), pa.string())})


def builder(
    spark: SparkSession, log: LogOfViews, schema: TableSchema, floor: int | None = None, parts: int = 3
) -> LargeBuilder:
    return LargeBuilder(spark, schema, floor, log.now(), parts)


def taken(build: LargeBuild) -> list[dict[str, object]]:
    """The changes of a build by key; its files are gone afterwards."""
    parts = list(build.take())
    assert {part.schema for part in parts} <= {CHANGED_ROWS}
    assert not build.folder.exists()
    return by_key(pa.concat_tables([CHANGED_ROWS.empty_table(), *parts]))


def by_key(changes: pa.Table) -> list[dict[str, object]]:
    return sorted(changes.to_pylist(), key=lambda row: (row["key"], row["op"]))


def logged(log: LogOfViews, schema: TableSchema, position: int, changes: pa.Table) -> None:
    commit = log.begin(Cut(Position(position), 1_000))
    with commit.view(schema.topic):
        if schema.topic not in log.schemas():
            commit.add_version(schema)
        commit.add_rows(schema, changes)
    commit.commit(SOURCE, ComputedFrom(position, {}))


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> LogOfViews:
    return LogOfViews(tmp_path, IDENTITY, LIMITS)


@pytest.mark.parametrize("floor", [None, 4_000_000_000])
def test_executors_make_the_rows_that_the_driver_makes(spark: SparkSession, log: LogOfViews, floor: int | None) -> None:
    schema = view_schema(1, "shop.v", ["id", "at"], result_rows(spark.sql(SELECT).limit(0)).schema)
    expected = view_rows(result_rows(spark.sql(SELECT)), schema, floor)
    build = builder(spark, log, schema, floor).all_new(spark.sql(SELECT))

    assert len(build.names) == 3  # one of each part
    assert taken(build) == by_key(all_new(expected))


some_rows = st.dictionaries(st.integers(0, 20), st.none() | st.text('xy"', max_size=2), max_size=20)


@settings(max_examples=EXAMPLES, deadline=None)
@given(some_rows, some_rows, some_rows)
def test_executors_find_the_differences_that_the_driver_finds(
    spark: SparkSession, first: Notes, old: Notes, new: Notes
) -> None:
    frames = {name: frame_of(spark, table_of(rows)) for name, rows in (("old", old), ("new", new))}
    before, now, after = (view_rows(table_of(rows), NOTED, None) for rows in (first, old, new))
    expected = by_key(differences(now, after))
    with TemporaryDirectory() as folder:
        log = LogOfViews(Path(folder), IDENTITY, LIMITS)
        logged(log, NOTED, 10, all_new(before))
        logged(log, NOTED, 20, differences(before, now))
        build = builder(spark, log, NOTED)

        assert taken(build.differences(frames["old"], frames["new"])) == expected
        assert taken(build.differences_from_log(frames["new"])) == expected


def test_executors_remove_the_rows_that_became_old(spark: SparkSession, log: LogOfViews) -> None:
    floor = 4_990_000_000
    schema = view_schema(1, "shop.v", ["id", "at"], result_rows(spark.sql(SELECT).limit(0)).schema)
    rows = view_rows(result_rows(spark.sql(SELECT)), schema, None)
    logged(log, schema, 10, all_new(rows))

    expected = differences(old_rows(rows, schema, floor), rows.slice(0, 0))
    assert taken(builder(spark, log, schema).removed_from_log(floor)) == by_key(expected)
    assert expected.num_rows == 4_990


def test_a_key_of_two_rows_is_found_across_tasks(spark: SparkSession, log: LogOfViews, tmp_path: Path) -> None:
    sql = f"{SELECT} UNION ALL {SELECT} WHERE id = 77"
    with pytest.raises(ViewKeyNotUnique, match=r"more than one row with the key \(id\) = \['77'\]"):
        builder(spark, log, schema_of(spark, sql)).all_new(spark.sql(sql))
    assert not list((tmp_path / BUILDS).iterdir())


def test_an_error_of_an_executor_has_its_code(spark: SparkSession, log: LogOfViews, tmp_path: Path) -> None:
    sql = "SELECT id, char(CAST(id AS INT)) AS text FROM range(0, 3)"
    with pytest.raises(ValueNotRepresentable, match=r"column 'text' of view 'shop\.v'"):
        builder(spark, log, schema_of(spark, sql)).all_new(spark.sql(sql))
    assert not list((tmp_path / BUILDS).iterdir())


def test_an_empty_view_has_no_files(spark: SparkSession, log: LogOfViews) -> None:
    sql = f"SELECT * FROM ({SELECT}) WHERE id < 0"
    assert taken(builder(spark, log, schema_of(spark, sql)).all_new(spark.sql(sql))) == []


def test_what_a_killed_process_left_is_removed(
    spark: SparkSession, log: LogOfViews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, "view_files_written:1:abandon")
    with pytest.raises(failpoint.Abandoned):
        builder(spark, log, schema_of(spark, SELECT)).all_new(spark.sql(SELECT))
    assert list((tmp_path / BUILDS).iterdir())
    LogOfViews(tmp_path, IDENTITY, LIMITS)
    assert not (tmp_path / BUILDS).exists()


def test_inputs_are_counted_without_reading_them(tmp_path: Path) -> None:
    lake = OneTableLake(tmp_path)
    lake.publish(20, 40)
    inputs = [InputVersion(str(tmp_path / "lake/shop/orders"), version, 1) for version in (1, 2)]
    missing = [InputVersion(str(tmp_path / "nowhere"), 1, 1)]
    assert count_rows(inputs) == 3
    assert count_rows(missing) is None


def test_the_rows_of_inputs_and_log_say_into_how_many_parts_keys_are_divided(spark: SparkSession) -> None:
    cores = spark.sparkContext.defaultParallelism

    assert number_of_parts(spark, 10, 0) == number_of_parts(spark, PART_ROWS, 20) == cores
    assert number_of_parts(spark, 10 * PART_ROWS + 1, 0) == number_of_parts(spark, 10, 10 * PART_ROWS + 1) == 11
    assert number_of_parts(spark, None, 10**9) == UNKNOWN_PARTS
