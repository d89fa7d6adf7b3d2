"""The merge of history by executors: drivers that die around its commits, and what the driver gets of the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from cdc.failpoint import VARIABLE, Abandoned
from cdc.position import Position
from pipelines.sink_loop import SinkLoop
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import Row, log_row
from tests.pipelines.sinks.delta.test_executor_merge import joins_of_rows
from tests.pipelines.spark_queries import QueriesSince
from tests.pipelines.test_both_ways import loop_in, parked_in, records_of, rows_of, schema
from tests.pipelines.test_history_both_ways import RULES

pytestmark = pytest.mark.usefixtures("with_delta")
TABLES = (1, 2, 3)
"""The relations whose history RULES keeps, each in another mode."""
REPLACING = (1, 3)
"""Those in which new rows replace rows."""
KEYLESS = 2
DYING = {100: ("delta_executor_files",), 200: ("delta_after_merge", "delta_after_ending")}
"""End of a range → where drivers die that apply it: between files and commit, around a truncate."""
FURTHER = {200: 300}
"""End of a range → end of the range in which the next driver repeats it."""


def image(key: int, text: str | None, large: str = "large") -> dict[int, str | None]:
    return {1: str(key), 2: text, 3: large, 4: None}


def changes_of(relation: int, random: Random) -> list[Row]:
    """A full copy, changes before and after a truncate, a second copy, and partial changes of its rows."""

    def at(place: tuple[int, int], op: str, key: int | None = None, **fields: object) -> Row:
        named = {} if key is None else {"key": [str(key)]}
        return log_row(relation, place, op, **named, **fields) | {"topic": f"shop.table{relation}"}

    rows = [at((100, 0), "s", payload=schema(relation).to_json())]
    rows += [at((100, key), "r", key, after=image(key, "1")) for key in range(1, 20)]
    rows += [at((100, 20), "g", payload=b"100")]
    rows += [at((150, key), "u", key, after={1: str(key), 2: "2"}, partial=True) for key in range(1, 10)]
    rows += [at((160, 0), "d", 3), at((160, 1), "u", 30, old_key=["3"], after={1: "30", 2: "3"}, partial=True)]
    rows += [at((170, 0), "t")]
    rows += [at((180, key), "c", key, after=image(key, str(random.randint(1, 9)))) for key in range(5, 15)]
    rows += [at((200, key), "u", key, after={1: str(key), 2: "77"}, partial=True) for key in range(8, 12)]
    rows += [at((250, key), "r", key, after=image(key, "8", "copied")) for key in range(5, 9)]
    rows += [at((260, 0), "g", payload=b"250")]
    return rows + [at((300, key), "u", key, after={1: str(key), 2: "9"}, partial=True) for key in range(5, 8)]


def write_log(root: Path) -> None:
    rows = [row for relation in TABLES for row in changes_of(relation, Random(relation))]
    rows = sorted(rows, key=lambda row: (row["position"], row["relation"], row["ordinal"]))
    # the ordinals of a transaction go on from table to table
    rows = [row | {"ordinal": row["relation"] * 100 + row["ordinal"]} for row in rows]
    writer, position = log_writer(root), 0
    for end in (100, 150, 170, 200, 300):
        append(writer, [[row for row in rows if position < row["position"] <= end]])
        position = end


def test_a_driver_that_dies_around_a_commit_of_history_is_followed_by_one_that_ends_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log")
    with loop_in(tmp_path / "here", tmp_path / "log", None, rules=RULES) as here:
        for end in (100, 300):
            here(None, Position(end))
        expected = rows_of(here), parked_in(here), records_of(here)

    for end, points in DYING.items():
        for point in points:
            monkeypatch.setenv(VARIABLE, f"{point}:1:abandon")
            with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=RULES) as dying, pytest.raises(Abandoned):
                dying(spark, Position(end))
        monkeypatch.delenv(VARIABLE)
        with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=RULES) as following:
            following(spark, Position(FURTHER.get(end, end)))
            found = rows_of(following), parked_in(following), records_of(following)
    assert found == expected


def targets_of(loop: SinkLoop) -> dict[int, DeltaTable]:
    return {table.relation: DeltaTable(table.target) for table in loop.record.tables.values()}


def test_replaced_rows_are_deleted_by_vectors_without_a_join_of_rows(spark: SparkSession, tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    queries = QueriesSince(spark)
    with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=RULES) as loop:
        loop(spark, Position(100))
        copied = {relation: set(target.file_uris()) for relation, target in targets_of(loop).items()}
        loop(spark, Position(150))
        targets = targets_of(loop)

    assert joins_of_rows(queries) == set()
    assert all(copied[relation] < set(targets[relation].file_uris()) for relation in TABLES)
    assert {targets[relation].history()[0].get("engineInfo") for relation in REPLACING} == {"cdc"}


def test_versions_of_another_client_are_compared_row_by_row(spark: SparkSession, tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=RULES) as loop:
        loop(spark, Position(100))
        target = targets_of(loop)[1]
        columns = pa.schema(target.schema().to_arrow())
        foreign = dict.fromkeys(columns.names) | {"id": 45, "_position": 1_000, "_ordinal": 0, "__START_AT": 1_000}
        write_deltalake(target, pa.Table.from_pylist([foreign], columns), mode="append")
        loop(spark, Position(150))
        rows = rows_of(loop)["shop.table1"]
        assert targets_of(loop)[1].history()[0].get("engineInfo") != "cdc"
    versions = [(row["id"], row["__START_AT"], row["__END_AT"]) for row in rows if row["id"] in (1, 45)]
    assert sorted(versions) == [(1, 100, 150), (1, 150, None), (45, 1_000, None)]


def test_no_change_of_a_table_with_history_is_sent_to_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    """The table of which every change is appended has no key."""
    random, writer = Random(5), log_writer(tmp_path / "log")
    schemas = {relation: schema(relation) for relation in TABLES}
    keyless = tuple(replace(column, key=None) for column in schemas[KEYLESS].columns)
    schemas[KEYLESS] = replace(schemas[KEYLESS], columns=keyless)
    written: list[tuple[int, int, int]] = []
    for position in (1_000, 2_000):
        rows = [
            log_row(relation, (position, relation), "s", payload=schemas[relation].to_json()) for relation in TABLES
        ]
        for n in range(10, 4_000):
            relation, text = random.choice(TABLES), f"{random.getrandbits(160):x}{position // 1_000}"
            key = None if relation == KEYLESS else [str(n % 1_000)]
            rows.append(log_row(relation, (position, n), "u", key=key, after=image(n % 1_000, "1", text)))
            written.append((relation, position, n % 1_000))
        append(writer, [[row | {"topic": f"shop.table{row['relation']}"} for row in rows]])
    conf = spark.sparkContext._jsc.sc().conf()
    with (
        loop_in(tmp_path / "driver", tmp_path / "log", spark, rules=RULES) as driver,
        loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=RULES) as loop,
    ):
        driver._fold.collected_rows = 1 << 30
        conf.set("spark.driver.maxResultSize", "100k")
        try:
            with pytest.raises(Py4JJavaError, match="maxResultSize"):
                driver(spark, Position(1_000))
            for position in (1_000, 2_000):
                loop(spark, Position(position))
        finally:
            conf.remove("spark.driver.maxResultSize")
        counts = {topic: len(rows) for topic, rows in rows_of(loop).items()}
    assert counts == {
        "shop.table1": len({(position, number) for relation, position, number in written if relation == 1}),
        "shop.table2": sum(relation == KEYLESS for relation, _, _ in written),
        "shop.table3": len({number for relation, _, number in written if relation == 3}),
    }
