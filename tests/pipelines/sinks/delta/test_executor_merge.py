"""The merge by executors: the files of a first copy, and a driver that dies around the commit of what they wrote."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.errors import ExecutorPythonUnusable
from cdc.failpoint import VARIABLE, Abandoned
from cdc.position import Position
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import Row, log_row
from tests.pipelines.spark_queries import QueriesSince
from tests.pipelines.test_both_ways import loop_in, parked_in, records_of, rows_of, schema

pytestmark = pytest.mark.usefixtures("with_delta")
UNFIT = ("3", "7")
"""Keys of rows whose value does not fit in the first copy."""
DYING = {100: ("delta_executor_files", "before_publish"), 200: ("delta_executor_files", "delta_after_merge")}
"""End of a range → where drivers die that apply it: after executors wrote the files, after the commit, before publish.
"""


def written(row: Row) -> Row:
    return row | {"topic": "shop.table1"}


def image(key: int, text: str | None) -> dict[int, str | None]:
    return {1: str(key), 2: text, 3: "large", 4: None}


def first_copy() -> list[Row]:
    """A full copy of one table; two of its values do not fit."""
    rows = [log_row(1, (100, 0), "s", payload=schema(1).to_json())]
    for key in range(1, 40):
        text = "" if str(key) in UNFIT else str(key)
        rows.append(log_row(1, (100, key), "r", key=[str(key)], after=image(key, text)))
    rows.append(log_row(1, (100, 40), "g", payload=b"100"))
    return [written(row) for row in rows]


def changes(random: Random) -> list[Row]:
    """Updates, partial images, deletes and new rows; one partial image belongs to a parked row."""
    rows = [log_row(1, (200, 0), "u", key=["3"], after={1: "3", 2: "5"}, partial=True)]
    for ordinal, key in enumerate(random.sample(range(8, 60), 30), start=1):
        if key >= 40:
            rows.append(log_row(1, (200, ordinal), "c", key=[str(key)], after=image(key, "1")))
        elif random.random() < 0.3:
            rows.append(log_row(1, (200, ordinal), "d", key=[str(key)]))
        else:
            sent = {1: str(key), 2: random.choice(("", "77"))}
            rows.append(log_row(1, (200, ordinal), "u", key=[str(key)], after=sent, partial=True))
    return [written(row) for row in rows]


def test_each_part_of_a_first_copy_is_a_file_with_statistics_that_an_executor_wrote(
    spark: SparkSession, tmp_path: Path
) -> None:
    append(log_writer(tmp_path / "log"), [first_copy()])
    with loop_in(tmp_path / "lake", tmp_path / "log", spark) as loop:
        loop(spark, Position(100))
        (table,) = loop.record.tables.values()

    assert table.parked == tuple((key,) for key in UNFIT)
    (file,) = DeltaTable(table.target).get_add_actions(flatten=True).to_struct_array().to_pylist()
    assert (file["num_records"], file["min.id"], file["max.id"]) == (37, 1, 39)


def test_a_driver_that_dies_around_a_commit_of_executors_is_followed_by_one_that_ends_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = log_writer(tmp_path / "log")
    append(writer, [first_copy()])
    append(writer, [changes(Random(1))])
    with loop_in(tmp_path / "here", tmp_path / "log", None) as here:
        for end in (100, 200):
            here(None, Position(end))
        expected = rows_of(here), parked_in(here), records_of(here)

    for end, points in DYING.items():
        for point in points:
            monkeypatch.setenv(VARIABLE, f"{point}:1:abandon")
            with loop_in(tmp_path / "lake", tmp_path / "log", spark) as dying, pytest.raises(Abandoned):
                dying(spark, Position(end))
        monkeypatch.delenv(VARIABLE)
        with loop_in(tmp_path / "lake", tmp_path / "log", spark) as following:
            following(spark, Position(end))
            found = rows_of(following), parked_in(following), records_of(following)
    assert found == expected


JOIN = re.compile(r"^\(\d+\) (\w+Join)\b.*\nLeft keys \[\d+\]: \[(\w+)#", re.MULTILINE)


PARTITIONED = "[{match: shop.*, partition_by: [plain]}]"
"""A target in which Spark joins rows: the column of its partitions is in no data file."""


def joins_of_rows(queries: QueriesSince) -> set[str]:
    """The kinds of joins by a row's key; Delta also joins the names of files."""
    plans = [query.physicalPlanDescription() for query in queries.ended()]
    return {kind for plan in plans for kind, column in JOIN.findall(plan) if column in ("id", "_key0")}


def test_a_merge_broadcasts_no_side_of_a_join_because_the_driver_would_collect_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    writer = log_writer(tmp_path / "log")
    append(writer, [first_copy()])
    append(writer, [changes(Random(1))])
    queries = QueriesSince(spark)
    with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=PARTITIONED) as loop:
        for end in (100, 200):
            loop(spark, Position(end))

    assert joins_of_rows(queries) == {"SortMergeJoin"}


def test_old_rows_and_base_rows_are_found_without_a_join(spark: SparkSession, tmp_path: Path) -> None:
    writer = log_writer(tmp_path / "log")
    append(writer, [first_copy()])
    append(writer, [changes(Random(1))])
    queries = QueriesSince(spark)
    with loop_in(tmp_path / "lake", tmp_path / "log", spark) as loop:
        for end in (100, 200):
            loop(spark, Position(end))

    assert joins_of_rows(queries) == set()


def test_a_batch_waits_for_executors_that_cannot_import_the_function_of_a_rule(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_on_the_driver.py").write_text("def same(rows):\n    return rows\n")
    monkeypatch.syspath_prepend(tmp_path)
    append(log_writer(tmp_path / "log"), [first_copy()[:3]])
    rules = "[{match: shop.*, transform: {python: 'only_on_the_driver:same'}}]"
    with (
        loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=rules) as loop,
        pytest.raises(ExecutorPythonUnusable, match="function 'only_on_the_driver:same' cannot be imported"),
    ):
        loop(spark, Position(100))
