"""Which fold a range takes, and that the choice changes nothing but the time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.config import EngineChoice
from cdc.errors import BatchTooLarge
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.engine_decision import HERE_BYTES, SMALL, EngineLimits
from pipelines.range_folder import RangeFolder
from pipelines.sinks.contract import SparkAwaited
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.pipelines.cold_log import append, histories, interleaved, log_writer, transactions
from tests.pipelines.fold_model import SINK
from tests.pipelines.folding.test_executor_fold import sorted_rows
from tests.pipelines.shop_pipeline import COPY, END, make_shop, repeated

LARGE = Position(20)  # the range up to here has more than SMALL rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with a small commit at 10 and one of more than SMALL rows, of 100 keys, at 20."""
    root = tmp_path_factory.mktemp("folding") / "log"
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    elsewhere = {"relation": 2, "topic": "sales.items"}
    writer.commit(writer.stage(table(row(10), row(10, 1, **elsewhere))), info(10))
    many, place = repeated(row(LARGE), SMALL + 100), LOG_SCHEMA.get_field_index("key")
    keys = pa.array([[str(n % 100)] for n in range(SMALL + 100)], LOG_SCHEMA.field(place).type)
    writer.commit(writer.stage(many.set_column(place, LOG_SCHEMA.field(place), keys)), info(LARGE))
    return root


def folding(root: Path, here_bytes: int = 0) -> RangeFolder:
    found = RangeFolder(LogReader(root), "lake", ("shop.*",))
    found.limits = EngineLimits(here_bytes=here_bytes)
    return found


def latest(images: pa.Table) -> dict[str, int]:
    return {row["key"][0]: row["ordinal"] for row in images.to_pylist()}


def test_a_small_range_is_folded_without_a_frame_and_only_its_tables(root: Path) -> None:
    batch = folding(root)(None, Position(0), Position(10))

    assert batch.relations == [16384]
    assert batch.images["position"].to_pylist() == [10]


def test_a_large_range_waits_for_spark(root: Path) -> None:
    assert not folding(root).is_small(Position(10), LARGE)
    with pytest.raises(SparkAwaited, match="too large to fold"):
        folding(root)(None, Position(10), LARGE)


def test_a_large_range_is_folded_in_spark_within_its_ends(spark: SparkSession, root: Path) -> None:
    frame = spark.read.format("cdc").option("path", str(root)).option("tables", "shop.*").load()

    images = folding(root)(frame, Position(10), LARGE).images
    assert latest(images) == {str(n): SMALL + n for n in range(100)}
    here = folding(root, HERE_BYTES)(None, Position(10), LARGE).images
    assert here.num_rows == images.num_rows
    assert latest(here) == latest(images)


def test_rows_that_do_not_fit_the_driver_are_refused_before_they_come_to_it(spark: SparkSession, root: Path) -> None:
    fold = folding(root)
    fold.limits = EngineLimits(here_bytes=0, driver_bytes=1_000)
    stored = len(spark.sparkContext._jsc.getPersistentRDDs())
    with pytest.raises(BatchTooLarge, match="bytes of rows that executors do not write, mostly of table"):
        fold(spark, Position(10), LARGE)
    assert len(spark.sparkContext._jsc.getPersistentRDDs()) == stored

    fold.limits = EngineLimits(here_bytes=0, driver_bytes=10_000)
    assert fold(spark, Position(10), LARGE).images.num_rows == 100


def test_a_large_range_is_for_spark_if_too_many_rows_are_in_files_with_partial_images(root: Path) -> None:
    writer = LogWriter(root, LIMITS)
    writer.commit(writer.stage(table(*(row(21, n, op="u", partial=True) for n in range(9)))), info(21))
    fold = folding(root, HERE_BYTES)

    assert fold.is_small(Position(10), Position(21))
    fold.limits = EngineLimits(partial_rows=8)
    assert not fold.is_small(Position(10), Position(21))
    assert fold.is_small(Position(10), LARGE)


def is_kept(topic: str) -> bool:
    """Whether the sink keeps the history of a table, whose rows are of topic t.N and whose schema is of table N."""
    return int(topic.rpartition(".")[2].removeprefix("table")) % 2 == 1


@pytest.mark.parametrize("max_moves", [0, 1_000])
def test_a_range_in_which_partial_images_changed_keys_is_folded_as_the_driver_does(
    spark: SparkSession, tmp_path: Path, max_moves: int
) -> None:
    """With too many of these images, the range is not divided by key. The sink keeps the history of some tables."""
    sources = histories(3, 8)
    writer = log_writer(tmp_path)
    for rows in transactions(interleaved(sources)):
        append(writer, [rows])
    log = LogReader(tmp_path)
    upto = log.durable or Position(0)
    here = RangeFolder(log, SINK, ("t.*",), is_kept)(None, Position(0), upto)
    assert "c" in here.images["op"].to_pylist()

    by_executors = RangeFolder(log, SINK, ("t.*",), is_kept)
    by_executors.choice, by_executors.max_moves = EngineChoice.SPARK, max_moves
    batch = by_executors(spark, Position(0), upto)

    assert sorted_rows(batch.images) == sorted_rows(here.images)
    assert batch.controls == here.controls
    assert (batch.relations, batch.rows) == (here.relations, here.rows)


def test_a_micro_batch_is_divided_if_rows_of_any_table_come_to_the_driver(tmp_path: Path) -> None:
    shop = make_shop(tmp_path / "shop")

    def end(tables: str, *, on_driver: str = "") -> int:
        fold = RangeFolder(LogReader(shop.definition.log.path), "lake", (tables,), lambda topic: topic == "shop.items")
        fold.limits = EngineLimits(here_bytes=1)
        fold.takes_parts = lambda schema: schema.topic != on_driver
        return fold.end_of_micro_batch(Position(COPY), Position(END))

    assert end("shop.*") == END
    assert end("shop.*", on_driver="shop.items") == 1_100
    assert end("shop.orders", on_driver="shop.items") == END
