"""The data source `cdc`: frames of ranges of a log that LogWriter wrote."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from cdc.errors import InvalidDefinition
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import exact_glob
from pipelines.source.data_source import CdcDataSource, LogStreamReader, rows_between
from pipelines.source.options import SourceOptions
from pipelines.source.read_tasks import SCHEMA, Frame, LogPartition
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table
from tests.pipelines.source.frame_rows import frame_of, frame_rows, schema_row

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


@pytest.fixture
def typed(root: Path) -> Path:
    """The same log with a schema row of shop.orders."""
    commit(LogWriter.open(root, IDENTITY, LIMITS), 50, schema_row(50, schema_of(16384, "note")))
    return root


def commit(writer: LogWriter, last: int, *rows: dict[str, Any]) -> None:
    writer.commit(writer.stage(table(*rows)) if rows else [], info(last))


def planner(root: Path, **options: str) -> LogStreamReader:
    return LogStreamReader(Frame.of(SourceOptions.from_options({"path": str(root), **options})))


def load(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    return spark.read.format("cdc").option("path", str(root)).options(**options).load()


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((r["position"], r["ordinal"]) for r in frame.collect())


def test_a_frame_has_the_rows_of_the_log(spark: SparkSession, root: Path) -> None:
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
def test_a_frame_has_the_range_and_tables_of_its_options(
    root: Path, options: dict[str, str], expected: list[tuple[int, int]]
) -> None:
    found = frame_rows(frame_of(root, **options)).to_pylist()
    assert sorted((row["position"], row["ordinal"]) for row in found) == expected


BOUNDARY = {"position": 40, "committed_at": datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=40)}
"""Where the log ends, and when that was committed."""


def test_options_reach_the_source_through_spark(spark: SparkSession, root: Path) -> None:
    options = {"startingPosition": "0/A", "endingPosition": "F/0", "tables": "shop.none, sales.*", "boundaries": "true"}
    found = load(spark, root, **options).toArrow()
    (end,) = found.filter(pc.equal(found["op"], "b")).select(["position", "committed_at"]).to_pylist()
    assert end == BOUNDARY
    rows = found.filter(pc.not_equal(found["op"], "b")).select(["position", "ordinal"]).to_pylist()
    assert sorted((row["position"], row["ordinal"]) for row in rows) == [(20, 1), (30, 0)]


def test_rows_between_two_positions_are_those_of_the_named_tables(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    named: dict[str, Any] = {"relation": 2, "topic": "shop.a,b*"}
    commit(writer, 10, row(10, **named))
    commit(writer, 20, row(20, topic="shop.a"), row(20, 1, **named), row(20, 2, relation=3, topic="shop.a,bc"))
    commit(writer, 30, row(30, **named))

    def between(after: int, upto: int) -> list[tuple[int, int]]:
        globs = (exact_glob("shop.a,b*"),)
        return places(rows_between(spark, LogReader(tmp_path / "log"), globs, Position(after), Position(upto)))

    assert between(10, 20) == [(20, 1)]
    assert between(0, 10) == [(10, 0)]


def test_a_boundary_ends_the_range_with_its_commit_time(root: Path) -> None:
    rows = frame_rows(frame_of(root, boundaries="true"))
    (end,) = rows.filter(pc.equal(rows["op"], "b")).select(["position", "committed_at"]).to_pylist()

    assert end == BOUNDARY


def test_a_stream_has_every_row_once_and_continues_after_a_restart(
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


def test_a_heartbeat_makes_a_batch_only_with_the_option_boundaries(root: Path) -> None:
    start = {"position": 30}

    assert planner(root).latestOffset(start, ReadAllAvailable()) == start
    assert planner(root, boundaries="true").latestOffset(start, ReadAllAvailable()) == {"position": 40}


def test_admission_never_splits_a_transaction(root: Path) -> None:
    ends = [planner(root).latestOffset({"position": at}, ReadMaxRows(1))["position"] for at in (0, 10, 20)]

    assert ends == [10, 20, 40]


@pytest.mark.parametrize(("most", "end"), [(2, 10), (3, 10), (4, 40), (5, 40)])
def test_a_last_row_that_would_be_alone_belongs_to_the_batch_before_it(root: Path, most: int, end: int) -> None:
    """Positions 10, 20 and 30 have 2, 2 and 1 rows, and a quarter of `most` rows may be more."""
    assert planner(root).latestOffset({"position": 5}, ReadMaxRows(most)) == {"position": end}


def test_rows_that_wait_beyond_a_batch_and_its_share_do_not_make_it_larger(root: Path) -> None:
    commit(LogWriter.open(root, IDENTITY, LIMITS), 50, row(50))

    assert planner(root).latestOffset({"position": 5}, ReadMaxRows(4)) == {"position": 20}


def test_a_last_row_makes_no_batch_larger_than_its_bytes(root: Path) -> None:
    files = LogReader(root).files(Position(5), Position(20))
    most = str(sum(file.size for file in files) + 1)
    reader = planner(root, maxRowsPerTrigger="4", maxBytesPerTrigger=most)

    assert reader.latestOffset({"position": 5}, reader.getDefaultReadLimit()) == {"position": 20}


def test_max_rows_per_trigger_is_the_read_limit(root: Path) -> None:
    assert planner(root).getDefaultReadLimit() == ReadAllAvailable()
    assert planner(root, maxRowsPerTrigger="7").getDefaultReadLimit() == ReadMaxRows(7)


def test_max_bytes_per_trigger_ends_a_batch_before_its_rows_do(root: Path) -> None:
    def end(most: int) -> int:
        reader = planner(root, maxRowsPerTrigger="1000", maxBytesPerTrigger=str(most))
        return reader.latestOffset({"position": 10}, reader.getDefaultReadLimit())["position"]

    assert [end(1), end(1 << 20)] == [20, 40]


def test_available_now_ends_at_the_position_durable_at_its_start(root: Path) -> None:
    reader = planner(root)
    reader.prepareForTriggerAvailableNow()
    commit(LogWriter.open(root, IDENTITY, LIMITS), 50, row(50))

    assert reader.latestOffset({"position": 20}, ReadAllAvailable()) == {"position": 40}
    assert reader.latestOffset({"position": 40}, ReadAllAvailable()) == {"position": 40}


def test_a_small_range_is_one_task_that_reads_its_files_in_order(root: Path) -> None:
    (part,) = planner(root).partitions({"position": 0}, {"position": 40})

    assert isinstance(part, LogPartition)
    assert [file.first for file in part.files] == [10, 20, 30]


def test_a_stream_starts_at_the_starting_position(root: Path) -> None:
    starts = [planner(root, startingPosition=p).initialOffset() for p in ("earliest", "latest", "1:0/2")]

    assert starts == [{"position": 0}, {"position": 40}, {"position": int(Position.of(2, 1))}]


def test_starting_and_ending_times_are_included(root: Path) -> None:
    """The commits are 10, 20 and 30 microseconds after `began`."""
    began = "2023-11-14T22:13:20.0000"
    places = [
        [r["position"] for r in frame_rows(frame_of(root, **options)).to_pylist()]
        for options in (
            {"startingTimestamp": f"{began}20Z"},
            {"startingTimestamp": f"{began}21+00:00"},
            {"endingTimestamp": f"{began}20"},
            {"startingTimestamp": f"{began}11", "endingTimestamp": f"{began}29"},
            {"startingTimestamp": "2023-11-15"},
            {"startingPosition": "0/A", "endingTimestamp": "2023-11-15 01:00:00"},
        )
    ]
    assert places == [[20, 20, 30], [30], [10, 10, 20, 20], [20, 20], [], [20, 20, 30]]
    assert planner(root, startingTimestamp=f"{began}15").initialOffset() == {"position": 19}


def test_only_chosen_columns_are_read(root: Path) -> None:
    frame = frame_of(root, columns="op, position")
    assert frame.log_columns == ["op", "position"]
    assert frame_rows(frame).column_names == frame.columns.names == ["op", "position"]


def test_spark_pushes_filters_down(spark: SparkSession, typed: Path) -> None:
    frame = load(spark, typed, table="shop.orders", columns="_position, id")
    narrow = frame.where("_position = 20 AND id >= 0")

    assert [tuple(row) for row in narrow.collect()] == [(20, 0)]
    assert frame.where("_position > 20").rdd.getNumPartitions() <= 1
    assert load(spark, typed).where("topic = 'sales.items'").count() == 2


def test_a_table_has_its_own_columns_in_spark_batch_and_stream(
    spark: SparkSession, typed: Path, tmp_path: Path
) -> None:
    wanted = "struct<id:int,note:string,_op:string,_position:bigint,_ordinal:bigint,_committed_at:timestamp,"
    frame = load(spark, typed, table="shop.orders")
    assert frame.schema.simpleString() == f"{wanted}_unchanged:array<string>>"
    assert sorted(row["_position"] for row in frame.collect()) == [10, 10, 20]

    options = {"path": str(typed), "table": "shop.orders", "startingTimestamp": "2023-11-14T22:13:20.000020Z"}
    seen: list[tuple[Any, ...]] = []
    rows = spark.readStream.format("cdc").options(**options).load().select("id", "_op", "_position")
    query = rows.writeStream.foreachBatch(lambda batch, _: seen.extend(map(tuple, batch.collect())))
    query = query.option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True)
    assert query.start().awaitTermination(PATIENCE)
    assert seen == [(0, "c", 20)]


def test_load_reports_wrong_options(spark: SparkSession, root: Path) -> None:
    with pytest.raises(AnalysisException, match="option 'startingTimestamp'"):
        load(spark, root, startingTimestamp="noon")
    with pytest.raises(AnalysisException, match=r"no table 'shop\.none'"):
        load(spark, root, table="shop.none")
    with pytest.raises(AnalysisException, match="accepts no schema"):
        spark.read.format("cdc").schema("position long").load(str(root)).collect()


@pytest.mark.parametrize("option", [{"endingPosition": "0/A"}, {"endingTimestamp": "2023-11-15"}])
def test_a_stream_with_an_end_is_refused(root: Path, option: dict[str, str]) -> None:
    source = CdcDataSource({"path": str(root), **option})
    assert source.reader(source.schema()) is not None
    with pytest.raises(InvalidDefinition, match="endingPosition"):
        source.streamReader(source.schema())


@pytest.mark.slow  # the two tests above show that the source refuses it, and that an error of the source is raised
def test_spark_refuses_a_stream_with_an_end(spark: SparkSession, root: Path) -> None:
    ended = spark.readStream.format("cdc").option("endingPosition", "0/A").load(str(root)).writeStream.format("noop")
    with pytest.raises(StreamingQueryException, match="endingPosition"):
        ended.option("checkpointLocation", str(root / "cp")).start().awaitTermination(PATIENCE)
