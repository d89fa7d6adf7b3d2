"""A row that the lake refuses is parked, retried and repaired, and a history is built from the log."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.demo.dead_letter_step import DeadLetterStep
from cdc.demo.history_sink_step import HistorySinkStep
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.pipeline_probe import LAKE
from cdc.demo.processes import DemoProcesses
from cdc.demo.shop_workload import Workload, make_shop
from cdc.demo.terminal import Terminal
from cdc.demo.workspace import Workspace, free_port
from cdc.service.supervisor import pipeline_children
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
