"""The history step fails unless the open versions equal the current rows."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.config import TableSettings
from cdc.demo.history_sink_step import HISTORY, HistorySinkStep
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.pipeline_probe import LAKE
from cdc.demo.terminal import Terminal
from cdc.demo.workspace import Workspace
from cdc.stores.published_record import Published
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ORDERS, PRICE, Row, batch, column

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
