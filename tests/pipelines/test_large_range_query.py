"""The streaming query: it applies ranges that need Spark, stops when it is idle, and starts again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.errors import SinkError
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.engine_decision import EngineLimits
from pipelines.large_range_query import LargeRangeQuery
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_lifecycle import WITH_QUERY, SinkRunner, State
from pipelines.sink_loop import SinkLoop
from pipelines.sink_parts import SinkParts
from tests.fixtures.waiting import until
from tests.log.rows import table
from tests.pipelines.shop_pipeline import END, FIGURES, ShopPipeline, change, make_shop, repeated
from tests.pipelines.spark_starts import spark_with

FEW = 100
"""Rows that the driver folds at most here; Spark takes long for as many as it folds otherwise."""


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


def append_large(shop: ShopPipeline, position: int) -> None:
    """Add a transaction of one row more than the driver folds, each with a partial image."""
    rows = repeated(change(position, 0, 1, None, op="u", after=[(1, "1")], partial=True), FEW)
    shop.append(position, pa.concat_tables([rows, table(change(position, FEW, 1, f"o{position}", op="u"))]))


def note_of(shop: ShopPipeline, key: int) -> str:
    """The note of an order in the lake."""
    return next(str(row["note"]) for row in shop.lake()["shop.orders"] if row["id"] == key)


@contextmanager
def runner_with(shop: ShopPipeline, spark: SparkSession, idle: float) -> Iterator[SinkRunner]:
    """The runner of the lake with a session, which folds FEW rows without it."""
    with Catalog.open(shop.definition.catalog.url) as catalog:
        cuts, pauses = CutRequests(catalog, "shop"), ReplayPauses(catalog, "shop")
        started = spark_with(spark)
        parts = SinkParts(
            cuts, pauses, FIGURES, started, limits=EngineLimits(small_rows=FEW, partial_rows=FEW), query_idle=idle
        )
        runner = SinkRunner(shop.definition, shop.definition.sinks[0], parts)
        try:
            yield runner
        finally:
            runner.stop()


def test_a_query_runs_only_while_ranges_need_it(shop: ShopPipeline, spark: SparkSession) -> None:
    states = set[State]()
    with runner_with(shop, spark, idle=0.5) as runner:

        def apply_to(position: int) -> None:
            def step() -> bool:
                runner.step()
                states.add(runner.state)
                return runner.has_applied(Position(position))

            until(step, f"{position} is applied")

        def stops() -> bool:
            runner.step()
            return runner.state not in WITH_QUERY

        apply_to(END)
        assert not states & WITH_QUERY
        for number in (1, 2):
            states.clear()
            large, small = END + 200 * number - 100, END + 200 * number
            append_large(shop, large)
            apply_to(large)
            assert states >= WITH_QUERY
            shop.append(small, [change(small, 0, 2, f"o{small}", op="u")])
            apply_to(small)
            assert [note_of(shop, key) for key in (1, 2)] == [f"o{large}", f"o{small}"]
            until(stops, "the query stops")


@contextmanager
def loop_of(shop: ShopPipeline) -> Iterator[SinkLoop]:
    """The loop of the lake, for which every range is large."""
    sink = shop.definition.sinks[0]
    with Catalog.open(shop.definition.catalog.url) as catalog:
        target, fold = build_sink(sink), RangeFolder(LogReader(shop.definition.log.path), "lake", sink.tables)
        fold.limits = EngineLimits(small_rows=0, here_bytes=0)
        loop = SinkLoop(target, fold, CutRequests(catalog, "shop"), SinkFigures("shop", "lake", FIGURES))
        loop.open()
        try:
            yield loop
        finally:
            loop.drain()
            target.close()


def test_stopping_waits_for_the_running_batch_and_no_batch_follows(shop: ShopPipeline, spark: SparkSession) -> None:
    began = Event()
    with loop_of(shop) as loop:
        query = LargeRangeQuery(loop, began.set, lambda: None)
        assert not loop.advance()
        with loop.between_batches():  # the first batch waits for this
            query.start(spark, shop.definition, shop.definition.sinks[0], (10, 1 << 20))
            until(began.is_set, "the first batch begins")
        query.stop()
        assert not list(Path(shop.definition.spark.checkpoint.removeprefix("file://")).glob("lake-*"))
        assert loop.position < END


def test_the_error_of_a_batch_is_raised_as_it_was(shop: ShopPipeline, spark: SparkSession) -> None:
    def fail() -> None:
        raise SinkError("the disk is on fire")

    with loop_of(shop) as loop:
        query = LargeRangeQuery(loop, lambda: None, fail)
        query.start(spark, shop.definition, shop.definition.sinks[0], (10, 1 << 20))
        until(lambda: query.has_ended, "the query ends")
        with pytest.raises(SinkError, match="the disk is on fire"):
            query.raise_error("lake")
        query.stop()
