"""Views in the real processes: reader, apply process with Spark, sinks of views, kills, and `cdc verify`."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cdc.catalog import Catalog
from cdc.catalog.view_summary import ViewSummary, view_summaries
from cdc.config import load_definition
from cdc.config.views import NAME_OF_VIEWS
from cdc.demo.shop_workload import Workload
from cdc.log.reader import LogReader
from cdc.position import Position
from tests.faults.test_kill_reader import KILLED, prepare
from tests.fixtures.forked import run
from tests.fixtures.pipeline import Pipeline

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]

TOTALS = (
    "SELECT o.id AS order_id, c.name AS customer, o.status, count(i.line) AS items, sum(i.quantity * i.price) AS total"
    " FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id"
    " LEFT JOIN shop.order_items i ON i.order_id = o.id GROUP BY o.id, c.name, o.status"
)
STATUSES = "SELECT status, count(*) AS orders, sum(total) AS total FROM shop.orders GROUP BY status"


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Workload]]:
    prepare(pipeline)
    folder = pipeline.folder
    sinks = [
        f"{{type: delta, name: lake, path: '{folder}/lake/{{schema}}/{{table}}'}}",
        f"{{type: delta, name: marts, path: '{folder}/marts/{{schema}}/{{table}}', views: ['shop.v_*']}}",
        f"{{type: search, name: find, path: '{folder}/find', views: [shop.v_totals]}}",
    ]
    pipeline.write(sinks=f"[{', '.join(sinks)}]")
    views = [("shop.v_totals", "order_id", TOTALS), ("shop.v_statuses", "status", STATUSES)]
    text = "".join(f"\n- {{name: {name}, key: [{key}], sql: '{sql}'}}" for name, key, sql in views)
    pipeline.definition.write_text(f"{pipeline.definition.read_text()}exclude: ['shop.v_*']\nviews:{text}\n")
    workload = Workload(pipeline.dsn, rate=25.0, seed=11)
    yield pipeline, workload
    workload.stop()


def position_of_views(pipeline: Pipeline) -> Position:
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        found = [sink.position for sink in catalog.sinks.ls(pipeline.name) if sink.sink in {"marts", "find"}]
    return Position(min(found, default=0) if len(found) == 2 else 0)


def summaries(pipeline: Pipeline) -> list[ViewSummary]:
    definition = load_definition(pipeline.definition, {"CDC_TEST_DSN": pipeline.dsn})
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        return view_summaries(definition, catalog)


def assert_equal(pipeline: Pipeline) -> None:
    """Every view equals its SQL, and every sink its log or its source."""
    pipeline.settle()
    durable = pipeline.durable()

    def have_arrived() -> bool:
        views = [Position.parse(view.position or "0/0") for view in summaries(pipeline)]
        return min(position_of_views(pipeline), *views) >= durable

    pipeline.wait(have_arrived, "the views and their sinks at the end of the log", seconds=180)
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
    tables = envelope["result"]["tables"]  # type: ignore[index]
    compared = {(table["sink"], table["topic"]) for table in tables if table["compared"]}
    wanted = {(sink, "shop.v_totals") for sink in (NAME_OF_VIEWS, "marts", "find")}
    assert wanted <= compared


@pytest.mark.timeout(3_000)
def test_views_follow_their_tables_over_kills_of_both_processes(shop: tuple[Pipeline, Workload]) -> None:
    pipeline, workload = shop
    reader = pipeline.reader()
    pipeline.wait_for_copy()
    for failpoint in ("view_rows_added:1", "views_staged:1", "views_committed:1"):
        assert pipeline.apply(failpoint).wait(400) == KILLED, f"{failpoint}\n{pipeline.output()}"
    workload.start()
    for failpoint in ("view_rows_added:2", "views_staged:3", "views_committed:2"):
        assert pipeline.apply(failpoint).wait(400) == KILLED, f"{failpoint}\n{pipeline.output()}"
    apply = pipeline.apply()
    pipeline.wait_for_more(workload, 100)
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    pipeline.reader()
    pipeline.wait_for_more(workload, 100)
    apply.send_signal(signal.SIGKILL)
    apply.wait()
    pipeline.apply()
    pipeline.wait_for_more(workload, 100)
    workload.stop()
    assert_equal(pipeline)
    for sink in ("find", "marts"):
        done = run(
            "pipelines",
            "replay",
            "-c",
            pipeline.definition,
            sink,
            environment={"CDC_TEST_DSN": pipeline.dsn},
            timeout=300,
        )
        assert done.status == 0, done.errors
    assert_equal(pipeline)

    found = summaries(pipeline)
    assert all(view.state == "streaming" and sum(view.computations.values()) for view in found), found
    log = LogReader(pipeline.folder / "log/derived")
    rows = [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]
    assert len({(row["position"], row["ordinal"]) for row in rows}) == len(rows)
