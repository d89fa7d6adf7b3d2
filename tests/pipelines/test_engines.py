"""The engines of a running sink: who applies its batches under each setting, with and without cores, and the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import AWAITS_SPARK, NO_CORE, Catalog
from cdc.config import DeltaSinkDefinition, EngineChoice
from cdc.errors import BatchTooLarge, SinkError
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.engine_decision import Cores, Engine, EngineLimits
from pipelines.executor_cores import ExecutorCores
from pipelines.large_range_query import LargeRangeQuery
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_lifecycle import WITH_QUERY, SinkRunner, State
from pipelines.sink_loop import SinkLoop
from pipelines.sink_parts import SinkParts
from pipelines.sinks.contract import TableBatch, TableRecord
from pipelines.sinks.delta.kind import delta_settings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.spark_on_demand import SparkOnDemand
from tests.fixtures.waiting import until
from tests.pipelines.local_cluster import ClusterCores, occupied
from tests.pipelines.shop_pipeline import COPY, END, ShopPipeline, applied_shop, change
from tests.pipelines.spark_starts import spark_that_never_starts, spark_with

BACKLOG = 30
"""Rows above which a backlog is for the cluster here."""
SMALL_BATCHES = EngineLimits(slice_rows=5, small_rows=5, spark_rows=BACKLOG)


@pytest.fixture(name="shop")
def _shop() -> ShopPipeline:
    """The pipeline whose lake has the first copy."""
    return applied_shop(upto=COPY)


class Run:
    """A runner of the lake, stepped by the test, and what it counted."""

    def __init__(self, runner: SinkRunner, figures: metrics.Metrics) -> None:
        self.runner, self._figures = runner, figures
        self.reasons = set[str | None]()

    def step(self) -> State:
        self.runner.step()
        sink = self.runner.progress.to_sink()
        self.reasons.add(None if sink is None else sink.reason)
        return self.runner.state

    def apply_to(self, position: int) -> None:
        def is_applied() -> bool:
            self.step()
            return self.runner.has_applied(Position(position))

        until(is_applied, lambda: f"{position} is applied: {self.runner.state}, {self.reasons}")

    @property
    def batches(self) -> tuple[int, int]:
        """How many batches the apply process applied, and how many Spark."""
        here, spark = (
            int(self._figures.value(metrics.ENGINE_BATCHES, "shop", "lake", engine) or 0)
            for engine in (Engine.HERE, Engine.SPARK)
        )
        return here, spark

    def expect_batches(self, *, here: int, spark: int) -> None:
        """Wait until the batches are counted: that happens after their position is published."""
        until(lambda: self.batches == (here, spark), lambda: f"{here} and {spark} batches, not {self.batches}")

    @property
    def is_last_in_spark(self) -> bool:
        return self._figures.value(metrics.SINK_IN_SPARK, "shop", "lake") == 1.0


@contextmanager
def running(
    shop: ShopPipeline,
    engine: EngineChoice,
    spark: SparkOnDemand,
    *,
    limits: EngineLimits | None = None,
    cores: ExecutorCores | None = None,
) -> Iterator[Run]:
    """Run the lake; cores: those of a cluster."""
    settings = shop.definition.spark.model_copy(update={"engine": engine})
    definition, figures = shop.definition.model_copy(update={"spark": settings}), metrics.Metrics()
    with Catalog.open(definition.catalog.url) as catalog:
        parts = SinkParts(
            CutRequests(catalog, "shop"),
            ReplayPauses(catalog, "shop"),
            figures,
            spark,
            limits=limits or EngineLimits(),
            query_idle=0.0,
            cores=cores,
            core_wait=0.0,
        )
        runner = SinkRunner(definition, definition.sinks[0], parts)
        try:
            yield Run(runner, figures)
        finally:
            runner.stop()


def append_backlog(shop: ShopPipeline, first: int) -> int:
    """Add transactions of one row each, more than BACKLOG; return the position of the last."""
    last = first + BACKLOG
    for position in range(first, last + 1):
        shop.append(position, [change(position, 0, position % 7, f"o{position}", op="u")])
    return last


def test_with_engine_spark_every_batch_goes_through_the_query_which_stays_on(
    shop: ShopPipeline, spark: SparkSession
) -> None:
    expected = applied_shop().lake()
    with running(shop, EngineChoice.SPARK, spark_with(spark)) as run:
        run.apply_to(END)
        assert shop.lake() == expected
        run.expect_batches(here=0, spark=1)
        shop.append(END + 1, [change(END + 1, 0, 1, "one row", op="u")])
        run.apply_to(END + 1)
        run.expect_batches(here=0, spark=2)
        assert run.is_last_in_spark
        assert run.step() in WITH_QUERY  # although an idle one would stop at once


def test_with_engine_spark_nothing_is_applied_before_spark_has_started(shop: ShopPipeline) -> None:
    with running(shop, EngineChoice.SPARK, spark_that_never_starts()) as run:
        for _ in range(3):
            assert run.step() in {State.DIRECT, State.AWAITING_SPARK}
        assert AWAITS_SPARK in run.reasons
        assert not run.runner.has_applied(Position(COPY + 1))


def test_with_engine_here_a_transaction_that_does_not_fit_stops_the_sink_before_it_begins(shop: ShopPipeline) -> None:
    large = END + 100
    shop.append(large, [change(large, n, n, "large", op="u") for n in range(200)])
    limits = EngineLimits(small_rows=150, here_bytes=0)
    with running(shop, EngineChoice.HERE, spark_that_never_starts(), limits=limits) as run:
        until(lambda: run.step() is State.HALTED, "the sink stops")
        assert isinstance(run.runner.final_error, BatchTooLarge)
        assert any(reason and reason.startswith("CDC-3043 range") and "auto" in reason for reason in run.reasons)
        assert run.batches[1] == 0
    assert shop.lake() == applied_shop().lake()


def test_auto_gives_a_cluster_a_backlog_as_one_micro_batch_and_small_ranges_stay_here(
    shop: ShopPipeline, spark: SparkSession
) -> None:
    started = spark_with(spark)
    cores = ClusterCores(started, "spark://elsewhere:7077")
    with running(shop, EngineChoice.AUTO, started, limits=SMALL_BATCHES, cores=cores) as run:
        run.apply_to(END)
        until(lambda: run.step() is State.DIRECT, "no query runs, whose batch would be counted later")
        here, spark_batches = run.batches
        last = append_backlog(shop, END + 1)
        run.apply_to(last)
        run.expect_batches(here=here, spark=spark_batches + 1)
        shop.append(last + 1, [change(last + 1, 0, 1, "small", op="u")])
        run.apply_to(last + 1)
        run.expect_batches(here=here + 1, spark=spark_batches + 1)
        assert not run.is_last_in_spark
    orders = {row["id"]: row["note"] for row in shop.lake()["shop.orders"]}
    assert orders[1] == "small"
    assert {orders[n] for n in (0, 2, 3, 4, 5, 6)} == {f"o{n}" for n in range(last - 6, last + 1) if n % 7 != 1}


def test_without_a_free_core_slices_are_taken_here_and_the_status_says_so_until_there_is_one(
    shop: ShopPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    started = spark_with(spark)
    cores = ClusterCores(started, "yarn")
    with running(shop, EngineChoice.AUTO, started, limits=SMALL_BATCHES, cores=cores) as run:
        with occupied(spark, tmp_path):
            run.apply_to(END)
            middle = append_backlog(shop, END + 1)
            run.apply_to(middle)
            assert run.batches[0] > 0
            assert run.batches[1] == 0
            assert f"{NO_CORE}; the apply process takes small batches" in run.reasons
        until(lambda: cores.now() == Cores(is_cluster=True, free=2), "the cores are free")
        last = append_backlog(shop, middle + 1)
        run.reasons.clear()
        run.apply_to(last)
        until(lambda: run.batches[1] == 1, "the batch of Spark is counted")
        run.step()
        assert run.reasons <= {None, AWAITS_SPARK}
    assert {row["note"] for row in shop.lake()["shop.orders"] if row["id"] < 7} == {
        f"o{n}" for n in range(last - 6, last + 1)
    }


def test_a_sink_is_closed_while_its_micro_batch_waits_for_a_core(
    shop: ShopPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    started = spark_with(spark)
    with (
        running(shop, EngineChoice.SPARK, started, cores=ClusterCores(started, "yarn")) as run,
        occupied(spark, tmp_path),
    ):
        until(lambda: run.step() is State.AWAITING_BATCH, "the query has started")
        until(lambda: len(spark.sparkContext.statusTracker().getActiveJobsIds()) == 2, "the micro-batch waits")
        run.reasons.clear()
        until(lambda: run.step() and f"{AWAITS_SPARK}: {NO_CORE}" in run.reasons, "the status says so")
        assert run.step() is State.AWAITING_BATCH
        assert None not in run.reasons
        run.runner.stop()
        assert run.runner.state is State.CLOSED
        assert run.batches[1] == 0


class MortalLake(DeltaSink):
    """A Delta sink whose driver dies, while it is doomed, after the first merge of a batch of two tables."""

    doomed = False
    query: LargeRangeQuery

    def apply(self, batch: TableBatch) -> TableRecord:
        record = super().apply(batch)
        assert self.query.idle_seconds == 0  # else the runner would stop the query after every long micro-batch
        if self.doomed:
            raise SinkError("the driver is gone")
        return record


@contextmanager
def query_over(shop: ShopPipeline, spark: SparkSession, *, doomed: bool) -> Iterator[tuple[LargeRangeQuery, SinkLoop]]:
    """A streaming query that begins at the published record, as after a start of the process."""
    settings = shop.definition.sinks[0]
    assert isinstance(settings, DeltaSinkDefinition)
    fold = RangeFolder(LogReader(shop.definition.log.path), "lake", settings.tables)
    fold.choice = EngineChoice.SPARK
    sink = MortalLake(delta_settings(settings), spark)
    sink.doomed = doomed
    with Catalog.open(shop.definition.catalog.url) as catalog:
        loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", "lake", metrics.Metrics()))
        loop.open()
        query = sink.query = LargeRangeQuery(loop, lambda: None, lambda: None)
        query.start(spark, shop.definition, settings, EngineLimits().micro_batch(fold.choice, is_cluster=False))
        try:
            yield query, loop
        finally:
            query.stop()
            loop.drain()
            sink.close()


def test_a_micro_batch_that_dies_half_way_is_repeated_by_the_next_query(
    shop: ShopPipeline, spark: SparkSession
) -> None:
    with query_over(shop, spark, doomed=True) as (query, loop):
        until(lambda: query.has_ended, "the micro-batch dies")
        with pytest.raises(SinkError, match="the driver is gone"):
            query.raise_error("lake")
        assert loop.position == COPY
    with query_over(shop, spark, doomed=False) as (_, loop):
        until(lambda: loop.position == END, "the next query applies the same range")
        assert loop.last_engine is Engine.SPARK
    assert shop.lake() == applied_shop().lake()
