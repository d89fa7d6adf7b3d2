"""A sink with tables and views: a query that names both reads them at one position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.errors import CutUnavailable, PositionNotReached
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.table_query import QueryAnswer, QueryRequest, queried_sink, query_tables
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.pipelines.views.shop_tables import TABLES
from tests.pipelines.views.view_pipeline import ViewPipeline

pytestmark = pytest.mark.usefixtures("with_delta")

PER_CUSTOMER = {
    "name": "shop.v_orders",
    "key": ["customer_id"],
    "sql": "SELECT customer_id, count(*) AS orders FROM shop.orders GROUP BY customer_id",
}
JOIN = (
    "SELECT count(*) AS rows, count(*) FILTER (WHERE v.orders <> o.orders OR v.orders IS NULL) AS different,"
    " sum(o.orders) AS orders FROM (SELECT customer_id, count(*) AS orders FROM shop.orders GROUP BY customer_id) o"
    " LEFT JOIN shop.v_orders v ON v.customer_id = o.customer_id"
)
TABLES_ALONE = "SELECT count(*) FROM orders"
VIEWS_ALONE = "SELECT sum(orders) FROM v_orders"


class Shop:
    """A pipeline whose lake has tables and a view of them."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        path = f"{folder}/lake/{{schema}}/{{table}}"
        views = f"- {{type: delta, name: lake_views, path: '{path}', views: ['shop.v_*'], views_of: lake}}\n"
        self.pipeline = ViewPipeline(folder, spark.newSession(), TABLES.values(), [PER_CUSTOMER], views)
        self._count = 0

    def add_order(self, customer: int) -> None:
        """Commit an order, and apply it to the tables."""
        self._count += 1
        self.pipeline.write(("shop.orders", "c", (str(self._count), str(customer), "new", "2026-01-01")))
        self.pipeline.publish()

    def follow(self) -> None:
        """Compute the views at the last cut of the tables, and apply them."""
        self.pipeline.compute()
        definition = self.pipeline.definition
        log = LogReader(definition.log.of_views)
        fold = RangeFolder(log, "lake_views", ("shop.v_*",))
        with closing(build_sink(definition.sinks[1])) as sink, Catalog.open(definition.catalog.url) as catalog:
            figures = SinkFigures("shop", "lake_views", metrics.Metrics())
            loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), figures)
            loop.open()
            loop(None, log.durable or Position(0))
            loop.drain()

    def ask(self, sql: str, **request: str | float) -> QueryAnswer:
        return query_tables(queried_sink(self.pipeline.definition, "lake"), QueryRequest(sql=sql, **request))  # type: ignore[arg-type]


@pytest.fixture(name="shop")
def _shop(tmp_path: Path, spark: SparkSession) -> Iterator[Shop]:
    shop = Shop(tmp_path / "shop", spark)
    with closing(shop.pipeline):
        yield shop


def test_a_query_of_tables_and_views_reads_both_at_one_position(shop: Shop) -> None:
    shop.add_order(1)
    before_the_view = str(Position(shop.pipeline.publish().position))
    shop.add_order(1)
    shop.follow()
    with pytest.raises(CutUnavailable, match="no kept cut in common"):
        shop.ask(JOIN, at=before_the_view)
    positions = []
    for customer in (1, 2, 2):
        shop.add_order(customer)
        shop.follow()
        positions.append(shop.ask(JOIN).to_json()["cut"]["position"])
    shop.add_order(3)

    assert shop.ask(TABLES_ALONE).rows == [[6]]
    assert shop.ask(VIEWS_ALONE).rows == [[5]]
    assert [shop.ask(JOIN, at=position).rows for position in positions] == [[[1, 0, 3]], [[2, 0, 4]], [[2, 0, 5]]]
    assert shop.ask(JOIN).rows == [[2, 0, 5]]
    assert shop.ask(JOIN, at="latest").rows == [[3, 1, 6]]  # each as it is now


def test_a_query_of_both_waits_for_the_views(shop: Shop) -> None:
    shop.add_order(1)
    shop.follow()
    shop.add_order(4)
    newest = str(Position(shop.pipeline.publish().position))
    assert shop.ask(TABLES_ALONE, min_position=newest, timeout=0).cut is not None
    with pytest.raises(PositionNotReached):
        shop.ask(JOIN, min_position=newest, timeout=0)
    shop.follow()

    assert shop.ask(JOIN, min_position=newest, timeout=0).rows[0][1] == 0
