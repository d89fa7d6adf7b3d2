"""The data source `cdc`: frames of ranges of a log that LogWriter wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from cdc.change import LOG_SCHEMA
from cdc.errors import InvalidDefinition, MalformedLsn, MalformedPosition
from cdc.log.append import LogWriter
from cdc.position import Position
from cdc.table import exactly, matches
from pipelines.source import SCHEMA, LogPartition, LogStreamReader, Selection, rows_between, tables_option
from tests.log.rows import IDENTITY, LIMITS, info, row, table

PATIENCE = 120  # seconds for a query that ends by itself


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log with four commits: positions 10, 20 (two tables), 30, and an empty one at 40."""
    root = tmp_path / "a log"
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    elsewhere = {"relation": 2, "topic": "sales.items"}
    for rows in ([row(10), row(10, 1)], [row(20), row(20, 1, **elsewhere)], [row(30, 0, **elsewhere)]):
        commit(writer, rows[-1]["position"], *rows)
    commit(writer, 40)
    return root


def commit(writer: LogWriter, last: int, *rows: dict[str, Any]) -> None:
    writer.commit(writer.stage(table(*rows)) if rows else [], info(last))


def planner(root: Path, **options: str) -> LogStreamReader:
    return LogStreamReader(Selection.from_options({"path": str(root), **options}))


def load(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    return spark.read.format("cdc").option("path", str(root)).options(**options).load()


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((r["position"], r["ordinal"]) for r in frame.collect())


def test_a_frame_holds_what_was_written(spark: SparkSession, root: Path) -> None:
    frame = load(spark, root)

    assert frame.schema.simpleString() == SCHEMA.simpleString()
    found = frame.toArrow().cast(LOG_SCHEMA).sort_by([("position", "ascending"), ("ordinal", "ascending")])
    assert found.slice(0, 2).equals(table(row(10), row(10, 1)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingPosition": "0/A", "endingPosition": "0/14"}, [(20, 0), (20, 1)]),
        ({"startingPosition": "0/14"}, [(30, 0)]),
        ({"endingPosition": "F/0", "tables": "shop.*"}, [(10, 0), (10, 1), (20, 0)]),
        ({"tables": "shop.none, sales.*"}, [(20, 1), (30, 0)]),
        ({"startingPosition": "latest"}, []),
    ],
    ids=["excludes its start, includes its end", "open end", "ends at what is durable", "globs", "nothing"],
)
def test_a_frame_is_the_range_and_the_tables_asked_for(
    spark: SparkSession, root: Path, options: dict[str, str], expected: list[tuple[int, int]]
) -> None:
    assert places(load(spark, root, **options)) == expected


def test_rows_between_two_positions_are_those_of_the_named_tables_alone(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    named: dict[str, Any] = {"relation": 2, "topic": "shop.a,b*"}
    commit(writer, 10, row(10, **named))
    commit(writer, 20, row(20, topic="shop.a"), row(20, 1, **named), row(20, 2, relation=3, topic="shop.a,bc"))
    commit(writer, 30, row(30, **named))

    def between(after: int, upto: int) -> list[tuple[int, int]]:
        globs = (exactly("shop.a,b*"),)
        return places(rows_between(spark, str(tmp_path / "log"), globs, Position(after), Position(upto)))

    assert between(10, 20) == [(20, 1)]
    assert between(0, 10) == [(10, 0)]


globs = st.lists(st.text("ab.*?[]!, ", min_size=1, max_size=8), min_size=1, max_size=3)


@given(globs, st.text("ab.[]!, ", max_size=8))
def test_globs_mean_the_same_after_they_were_an_option(globs: list[str], topic: str) -> None:
    selection = Selection.from_options({"path": "log", "tables": tables_option(globs)})

    assert len(selection.tables) == len(globs)
    assert matches(topic, selection.tables) == matches(topic, globs)


def test_a_boundary_ends_the_range_with_its_commit_time(spark: SparkSession, root: Path) -> None:
    frame = load(spark, root, boundaries="true").where("op = 'b'").toArrow()

    assert frame["position"].to_pylist() == [40]
    assert frame["committed_at"].cast(pa.int64()).to_pylist() == [1_700_000_000_000_040]


def test_a_stream_gives_every_row_once_and_goes_on_after_a_restart(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    batches: list[list[tuple[int, int]]] = []
    run(spark, root, tmp_path, lambda frame: batches.append(places(frame)))
    commit(LogWriter.open(root, IDENTITY, LIMITS), 50, row(50))
    run(spark, root, tmp_path, lambda frame: batches.append(places(frame)))

    assert batches == [[(10, 0), (10, 1)], [(20, 0), (20, 1)], [(30, 0), (40, 0)], [(50, 0), (50, 0)]]


def run(spark: SparkSession, root: Path, folder: Path, see: Callable[[DataFrame], None]) -> None:
    stream = spark.readStream.format("cdc").option("path", str(root)).option("boundaries", "true")
    rows = stream.option("maxRowsPerTrigger", "2").load().where("op <> 'b' OR position >= 40")
    query = rows.writeStream.foreachBatch(lambda frame, _: see(frame)).option("checkpointLocation", str(folder / "cp"))
    assert query.trigger(availableNow=True).start().awaitTermination(PATIENCE)


def test_an_idle_planner_returns_its_start(root: Path) -> None:
    assert planner(root).latestOffset({"position": 40}, ReadAllAvailable()) == {"position": 40}


def test_a_heartbeat_makes_a_batch_only_for_those_who_see_boundaries(root: Path) -> None:
    start = {"position": 30}

    assert planner(root).latestOffset(start, ReadAllAvailable()) == start
    assert planner(root, boundaries="true").latestOffset(start, ReadAllAvailable()) == {"position": 40}


def test_admission_never_splits_a_transaction(root: Path) -> None:
    ends = [planner(root).latestOffset({"position": at}, ReadMaxRows(1))["position"] for at in (0, 10, 20)]

    assert ends == [10, 20, 40]


def test_the_option_is_the_limit_that_spark_is_told(root: Path) -> None:
    assert planner(root).getDefaultReadLimit() == ReadAllAvailable()
    assert planner(root, maxRowsPerTrigger="7").getDefaultReadLimit() == ReadMaxRows(7)


def test_a_query_that_takes_what_is_there_stops_at_what_was_there(root: Path) -> None:
    reader = planner(root)
    reader.prepareForTriggerAvailableNow()
    commit(LogWriter.open(root, IDENTITY, LIMITS), 50, row(50))

    assert reader.latestOffset({"position": 20}, ReadAllAvailable()) == {"position": 40}
    assert reader.latestOffset({"position": 40}, ReadAllAvailable()) == {"position": 40}


def test_a_small_range_is_one_task_that_reads_its_files_in_order(root: Path) -> None:
    (part,) = planner(root).partitions({"position": 0}, {"position": 40})

    assert isinstance(part, LogPartition)
    assert [file.first for file in part.files] == [10, 20, 30]


def test_a_planner_starts_where_it_is_told(root: Path) -> None:
    starts = [planner(root, startingPosition=p).initialOffset() for p in ("earliest", "latest", "1:0/2")]

    assert starts == [{"position": 0}, {"position": 40}, {"position": int(Position.of(2, 1))}]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, InvalidDefinition),
        ({"path": "x", "maxRowsPerTrigger": "0"}, InvalidDefinition),
        ({"path": "x", "maxRowsPerTrigger": "many"}, InvalidDefinition),
        ({"path": "x", "boundaries": "yes"}, InvalidDefinition),
        ({"path": "x", "startingPosition": "12"}, MalformedLsn),
        ({"path": "x", "endingPosition": "earliest"}, MalformedLsn),
        ({"path": "x", "startingPosition": "x:0/1"}, MalformedPosition),
    ],
)
def test_wrong_options_are_told_where_the_frame_is_made(options: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        Selection.from_options(options)
