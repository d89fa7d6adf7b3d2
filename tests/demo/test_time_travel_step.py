"""Time travel: sums of orders and items at a past cut, and a column that was added later, over a small lake."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from cdc.demo.query_runner import LakeQueries
from cdc.demo.terminal import Terminal
from cdc.demo.time_travel_step import COLUMN, TimeTravelStep
from cdc.demo.workspace import Workspace
from cdc.position import Position
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ORDERS, PRICE, Row, batch, column

TOTAL = replace(PRICE, id=2, name="total")
PLAIN = replace(ORDERS, columns=(ID, TOTAL))
NOTED = replace(ORDERS, columns=(ID, TOTAL, column(3, COLUMN)))
ITEMS = replace(
    ORDERS, relation=16385, oid=16385, name="order_items", columns=(ID, column(2, "quantity", "integer", oid=23), PRICE)
)


class Shop:
    """A lake of two tables, published by hand."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder)
        self._sink = DeltaSink(DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}"))
        self._sink.open("log-1")
        self._tables: dict[int, TableRecord] = {}
        self._position = 0

    def put(self, schema: TableSchema, *values: str | None) -> None:
        """One row, its key first."""
        after = dict(zip((c.id for c in schema.columns), values, strict=True))
        row = Row((str(values[0]),), self._position + 10, after)
        given = batch([row], self._position, self._position + 20, schema)
        self._tables[schema.relation] = self._sink.apply(given)
        self._position += 20

    def publish(self, state: str = "streaming") -> int:
        """All tables at the next position."""
        self._position += 20
        tables = {key: replace(table, position=self._position, state=state) for key, table in self._tables.items()}
        self._sink.publish(Published(self._position, self._position * 1_000_000, tables))
        return self._position

    def past(self, out: StringIO, before: int | None = None) -> TimeTravelStep:
        """Of this lake."""
        position = None if before is None else Position(before)
        return TimeTravelStep(LakeQueries(self.workspace, "lake"), Terminal(out), position, wait_seconds=0.2)


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path)
    shop.put(PLAIN, "1", "7.50")
    shop.put(ITEMS, "1", "3", "2.50")
    return shop


def test_at_one_cut_orders_and_items_come_to_the_same(shop: Shop) -> None:
    shop.publish()
    cut = shop.past(StringIO()).cut()

    assert cut.equal
    assert cut.facts["sums"] == ["7.50", "7.50"]
    assert (cut.facts["position"], cut.facts["tables"], cut.facts["orders"]) == ("0/3C", 2, 1)


def test_a_cut_between_an_order_and_its_items_is_not_equal(shop: Shop) -> None:
    shop.put(PLAIN, "2", "1.00")
    shop.publish()
    out = StringIO()
    cut, *_ = shop.past(out).run()

    assert not cut.equal
    assert "7.50: NOT EQUAL" in out.getvalue()


def test_a_past_cut_is_read_after_later_changes_of_the_lake(shop: Shop) -> None:
    shop.publish()
    shop.publish()
    shop.put(PLAIN, "2", "99.00")
    shop.publish()
    cut = shop.past(StringIO()).cut()

    assert cut.equal
    assert cut.text.endswith("now 2 orders")


def test_a_lake_without_a_complete_cut_fails_the_step(shop: Shop) -> None:
    shop.publish(state="snapshotting")
    cut, *_ = shop.past(StringIO()).run()

    assert not cut.equal
    assert "has no cut" in str(cut.facts["error"])


def test_the_column_is_there_and_at_the_cut_of_before_it_was_not(shop: Shop) -> None:
    before = shop.publish()
    shop.put(NOTED, "2", "0.00", "with love")
    shop.publish()
    found = shop.past(StringIO(), before).column()

    assert found.equal
    assert found.facts == {"column": COLUMN, "filled": 1, "absent_at": "0/3C"}
    assert "1 of 2 orders" in found.text


def test_a_column_that_was_there_before_it_came_is_wrong(shop: Shop) -> None:
    shop.put(NOTED, "2", "0.00", "with love")

    assert not shop.past(StringIO(), shop.publish()).column().equal


def test_a_column_that_never_came_is_left_out_and_not_waited_for(shop: Shop) -> None:
    shop.publish()
    out = StringIO()
    steps = replace(shop.past(out), altered=False).run()

    assert [step.name for step in steps] == ["cut"]
    assert "column     skipped" in out.getvalue()


def test_a_column_that_does_not_come_to_the_lake_fails_within_the_patience(shop: Shop) -> None:
    shop.publish()
    out = StringIO()
    _, late = shop.past(out).run()

    assert not late.equal
    assert f"but this did not happen: the lake's orders have {COLUMN}" in out.getvalue()
