"""An opened sink: the gate for first batches, and tables that lagged when it was opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import EngineChoice
from cdc.log.reader import LogReader
from cdc.targets.published_record import TargetState
from pipelines.engine_decision import EngineLimits
from pipelines.opened_sink import LONGEST, OpenedSink, batch_interval
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_parts import SinkParts
from pipelines.sinks.contract import SparkAwaited
from pipelines.spark_on_demand import SparkOnDemand
from tests.log.rows import table
from tests.pipelines.shop_pipeline import END, FIGURES, ITEMS, ORDERS, ShopPipeline, applied_shop, change, repeated
from tests.pipelines.spark_starts import spark_that_never_starts, spark_with

FEW = 100
"""Rows that the driver folds at most here; Spark takes long for as many as it folds otherwise."""


@pytest.fixture(name="shop")
def _shop() -> ShopPipeline:
    """A pipeline whose lake has all of the log, except for a change of an order."""
    return applied_shop()


def let_orders_lag(shop: ShopPipeline, rows: int) -> None:
    """Append a transaction with so many partial images of one order; publish a record in which the order lags."""
    images = repeated(change(END + 100, 0, 2, None, op="u", after=[(1, "2")], partial=True), rows)
    shop.append(END + 100, pa.concat_tables([images, table(change(END + 100, rows, 3, "caught up", op="u"))]))
    sink = build_sink(shop.definition.sinks[0])
    record = sink.open(LogReader(shop.definition.log.path).log_id)
    assert record is not None
    lagging = replace(record.tables[ORDERS], state=TargetState.FAILED.value, reason="CDC-3000 a value")
    others = {r: replace(table, position=END + 100) for r, table in record.tables.items()}
    sink.publish(replace(record, position=END + 100, tables={**others, ORDERS: lagging}))
    sink.close()


@contextmanager
def opened(shop: ShopPipeline, spark: SparkOnDemand, engine: EngineChoice = EngineChoice.AUTO) -> Iterator[OpenedSink]:
    settings = shop.definition.spark.model_copy(update={"engine": engine})
    definition = shop.definition.model_copy(update={"spark": settings})
    with Catalog.open(shop.definition.catalog.url) as catalog:
        cuts, pauses = CutRequests(catalog, "shop"), ReplayPauses(catalog, "shop")
        parts = SinkParts(cuts, pauses, FIGURES, spark, limits=EngineLimits(small_rows=FEW, partial_rows=FEW))
        found = OpenedSink(definition, definition.sinks[0], parts, SinkFigures("shop", "lake", FIGURES))
        try:
            yield found
        finally:
            found.close()


def note(shop: ShopPipeline) -> str:
    return next(str(row["note"]) for row in shop.lake()["shop.orders"] if row["id"] == 3)


def test_a_table_catches_up_without_spark_if_its_range_is_small(shop: ShopPipeline) -> None:
    let_orders_lag(shop, 10)
    spark = SparkOnDemand(lambda: pytest.fail("Spark was requested"))
    with opened(shop, spark) as sink:
        assert not sink.loop.has_caught_up
        sink.catch_up()

        assert sink.loop.has_caught_up
        assert note(shop) == "caught up"


def test_a_table_with_a_large_range_waits_for_spark_and_then_catches_up(
    shop: ShopPipeline, spark: SparkSession
) -> None:
    let_orders_lag(shop, FEW)
    with opened(shop, spark_that_never_starts()) as sink:
        with pytest.raises(SparkAwaited, match="too large"):
            sink.catch_up()
        sink.catch_up()
        assert not sink.loop.has_caught_up
        assert note(shop) != "caught up"
    with opened(shop, spark_with(spark)) as sink:
        sink.catch_up()
        assert sink.loop.has_caught_up
        assert note(shop) == "caught up"


def test_with_engine_here_a_table_with_a_large_range_stays_behind_alone(shop: ShopPipeline) -> None:
    let_orders_lag(shop, FEW)
    with opened(shop, SparkOnDemand(lambda: pytest.fail("Spark was requested")), EngineChoice.HERE) as sink:
        sink.catch_up()
        assert sink.loop.has_caught_up
        (behind,) = sink.loop.lagging_tables
        assert behind.topic == "shop.orders"
        assert (behind.reason or "").startswith("CDC-3043 ")
        shop.append(END + 200, table(change(END + 200, 0, 7, "goes on", of=ITEMS, op="u")))
        assert sink.loop.advance()
    assert next(row["note"] for row in shop.lake()["shop.items"] if row["id"] == 7) == "goes on"
    assert note(shop) != "caught up"


@pytest.mark.parametrize(
    ("shortest", "took", "tables", "interval"),
    [(0.2, 0.03, 7, 0.2), (0.2, 0.04, 2, 0.24), (0.2, 5.0, 7, 0.2 * LONGEST), (0.0, 5.0, 7, 0.0), (0.2, 5.0, 1, 0.2)],
    ids=["quick", "several tables", "very slow", "no interval", "one table"],
)
def test_a_batch_of_several_tables_takes_a_sixth_of_the_interval_within_bounds(
    shortest: float, took: float, tables: int, interval: float
) -> None:
    assert batch_interval(shortest, took, tables) == pytest.approx(interval)


def test_the_next_batch_waits_longer_after_a_batch_that_took_long(shop: ShopPipeline) -> None:
    shop.append(END + 100, table(change(END + 100, 0, 3, "later", op="u")))
    spark = shop.definition.spark.model_copy(update={"trigger": 1000.0})
    shop.definition = shop.definition.model_copy(update={"spark": spark})
    with opened(shop, spark_that_never_starts()) as sink:
        assert sink.loop.advance()
        assert sink.loop.batch_seconds > 0
        assert 900 < sink.seconds_to_batch <= 1000
        assert sink.loop.batch_tables == 1
        sink.loop.batch_seconds, sink.loop.batch_tables = 5000.0, 2
        assert 1000 < sink.seconds_to_batch <= 1000 * LONGEST
