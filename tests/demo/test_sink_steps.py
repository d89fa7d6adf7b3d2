"""The closing steps: a refused row becomes a dead letter and is repaired; a history is built from the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from threading import Event

import pytest

from cdc.catalog import Catalog
from cdc.config import TableSettings
from cdc.demo.pipeline_observer import LAKE
from cdc.demo.processes import DemoProcesses
from cdc.demo.query_runner import LakeQueries
from cdc.demo.shop_workload import Workload, make_shop
from cdc.demo.sink_steps import HISTORY, DeadLetterStep, HistorySinkStep, StepSequence
from cdc.demo.terminal import Terminal
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.workspace import Workspace, free_port
from cdc.service.pipeline_children import pipeline_children
from cdc.targets.published_record import Published
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ORDERS, PRICE, Row, batch, column
from tests.fixtures.postgres import rows_of
from tests.fixtures.waiting import until


@pytest.fixture(name="workspace")
def _workspace(tmp_path: Path, database: str) -> Workspace:
    """The demo's definition over a shop of its own."""
    make_shop(database)
    workspace = Workspace(tmp_path)
    workspace.define(database, free_port(8300), ())
    return workspace


@pytest.fixture(name="running")
def _running(workspace: Workspace) -> Iterator[Workspace]:
    with DemoProcesses(workspace, pipeline_children(str(workspace.definition), ("reader", "apply"))):
        yield workspace


@pytest.fixture(name="catalog")
def _catalog(workspace: Workspace) -> Iterator[Catalog]:
    with Catalog.open(workspace.catalog_url) as catalog:
        yield catalog


def text(workspace: Workspace) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted(workspace.state.glob("*.out")))


@pytest.mark.slow
def test_a_broken_row_is_parked_retried_and_repaired_and_a_history_is_built_from_the_log(
    running: Workspace, database: str, catalog: Catalog
) -> None:
    lake, out = LakeQueries(running, LAKE), StringIO()
    until(lambda: any(s.sink == LAKE and s.position for s in catalog.sinks.ls("shop")), lambda: text(running))
    workload = Workload(database)
    workload.run(300)
    workload.stop()
    with HistorySinkStep(lake, Terminal(out), database, catalog) as history:
        parked, retried = DeadLetterStep(lake, Terminal(out), database, catalog).run()
        (versions,) = history.run()

    assert parked.equal, f"{out.getvalue()}\n{text(running)}"
    assert parked.facts["code"] == "CDC-3001"
    assert retried.equal, f"{out.getvalue()}\n{text(running)}"
    assert retried.facts["outcome"] == "parked"
    assert versions.equal, f"{out.getvalue()}\n{text(running)}"
    edited = rows_of(database, "SELECT count(*) FROM shop.products")[0][0]
    assert versions.rows > edited  # a price was changed, and what it was before is still there
    assert catalog.dead_letters.ls("shop") == []


def test_without_an_apply_process_both_parts_time_out_and_the_row_is_repaired(
    workspace: Workspace, database: str, catalog: Catalog
) -> None:
    out = StringIO()
    steps = DeadLetterStep(LakeQueries(workspace, LAKE), Terminal(out), database, catalog, wait_seconds=0.2).run()

    assert [step.equal for step in steps] == [False, False]
    assert "but this did not happen" in out.getvalue()
    assert rows_of(database, "SELECT count(*) FROM shop.orders WHERE total = 'NaN'") == [(0,)]


PRODUCTS = replace(ORDERS, name="products", columns=(ID, replace(PRICE, id=2), column(3, "stock", "integer", oid=23)))


def fill(workspace: Workspace, name: str, table: TableSettings, prices: list[str]) -> LakeQueries:
    """One product, whose price is each of these in turn."""
    sink = DeltaSink(DeltaSettings(name, f"{workspace.state}/{name}/{{schema}}/{{table}}", table=table))
    sink.open("log-1")
    for number, price in enumerate(prices):
        row = Row(("1",), 10 * number + 5, {1: "1", 2: price, 3: "7"})
        applied = sink.apply(batch([row], 10 * number, 10 * number + 10, PRODUCTS))
    sink.publish(Published(10 * len(prices), 1, {PRODUCTS.relation: replace(applied, state="streaming")}))
    return LakeQueries(workspace, name)


@pytest.mark.parametrize(("last", "equal"), [("3.00", True), ("4.00", False)])
def test_both_are_shown_and_unequal_where_the_open_version_is_not_the_row(
    tmp_path: Path, last: str, equal: bool
) -> None:
    workspace = Workspace(tmp_path)
    lake = fill(workspace, LAKE, TableSettings(), ["1.00", "2.00", "3.00"])
    past = fill(workspace, HISTORY, TableSettings(stored_as_scd_type=2), ["1.00", "2.00", last])
    with Catalog.open(workspace.catalog_url) as catalog:
        found = HistorySinkStep(lake, Terminal(StringIO()), "", catalog).compare_now(past)

    assert found.equal is equal
    assert f"SCD1 3.00 · SCD2 1.00 → 2.00 → {last}; 1 rows, 3 versions, 1 of them open" in found.text
    assert ("NOT EQUAL" in found.text) is not equal


def test_a_stopped_demo_begins_neither_a_backfill_nor_a_replay(tmp_path: Path) -> None:
    out, stop = StringIO(), Event()
    stop.set()
    queries = LakeQueries(Workspace(tmp_path), "lake")
    steps = StepSequence(TimeTravelStep(queries, Terminal(out), None, altered=False), stop).run()

    assert [(step.name, step.equal) for step in steps] == [("cut", False)]
    assert "backfill" not in out.getvalue()
    assert not (tmp_path / "tour.out").exists()
