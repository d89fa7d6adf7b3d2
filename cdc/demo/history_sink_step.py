"""History: a sink that comes last and is made of the log alone: what every product once cost, as SCD type 2."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, Self

from cdc.catalog import Catalog
from cdc.demo import shell_commands
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.processes import DemoProcesses, command
from cdc.demo.step import Step, StepResult, Wait, taken
from cdc.demo.terminal import Terminal
from cdc.demo.wal_marker import mark
from cdc.naming import END_COLUMN, FROM_COLUMN, START_COLUMN, TO_COLUMN
from cdc.service.supervisor import Child

HISTORY: Final = "history"
BUILT_WITHIN: Final = 120.0
"""Seconds for a Spark session of its own on two busy cores and its first batch."""
MOST_PRICES: Final = 3
"""Of the product that is shown."""
_NOW: Final = "SELECT id, price, stock FROM shop.products ORDER BY id"
_OPEN: Final = f'SELECT id, price, stock FROM shop.products WHERE "{END_COLUMN}" IS NULL ORDER BY id'
_COUNTED: Final = "SELECT id, count(*) AS n FROM shop.products GROUP BY id ORDER BY n DESC, id"
_PRICES: Final = f'SELECT price FROM shop.products WHERE id = {{}} ORDER BY "{START_COLUMN}"'


@dataclass(slots=True)
class HistorySinkStep:
    """The third sink, filled by an apply process of its own inside the context, beside the one that goes on."""

    shelf: LakeQueries
    """Of the lake, whose rows are the latest state."""
    screen: Terminal
    dsn: str
    """Of the shop."""
    catalog: Catalog
    _children: DemoProcesses = field(init=False)

    def __post_init__(self) -> None:
        ground = self.shelf.ground
        filled = command("apply", ground.definition, "--sink", HISTORY)
        self._children = DemoProcesses(ground, [Child(HISTORY, tuple(filled))])

    def __enter__(self) -> Self:
        self.shelf.ground.add_history()
        self._children.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._children.kill()  # it has done its work, and a sink may be killed at any moment

    def go(self) -> list[Step]:
        """Show it beside the lake."""
        self.screen.doing(
            HISTORY, "a sink that was not there: products as SCD type 2, from the log alone, in a session of its own"
        )
        return [taken(self.screen, HISTORY, self.compare)]

    def compare(self) -> StepResult:
        """Latest state and versions of one table side by side: what is open is what is there now."""
        last = mark(self.dsn, "closing")
        past = LakeQueries(self.shelf.ground, HISTORY)
        wait = Wait(self.screen, HISTORY, BUILT_WITHIN)
        wait.until(
            f"lake and {HISTORY} have all of the log",
            lambda: self.shelf.has(self.catalog, last) and past.has(self.catalog, last),
        )
        return self.side_by_side(past)

    def side_by_side(self, past: LakeQueries) -> StepResult:
        """What the two hold now; where both were seen at the same position, unequal means that one is wrong."""
        now, open_now = self.shelf.rows(_NOW), past.rows(_OPEN)
        counted = past.rows(_COUNTED)
        product, versions = counted[0]
        latest = next(price for key, price, _ in now if key == product)
        prices = [price for (price,) in past.rows(_PRICES.format(product))]
        told = (
            f"product {product}: SCD1 {_said([latest])} · SCD2 {_said(prices)}; "
            f"{len(now)} rows, {sum(n for _, n in counted)} versions, {len(open_now)} of them open"
            f"{', the same' if now == open_now else ': NOT EQUAL'}"
        )
        asked = f"select price, {FROM_COLUMN}, {TO_COLUMN} from shop.products where id = {product} order by 2"
        hint = shell_commands.command(f'query "{asked}" --sink {HISTORY}', self.shelf.ground.definition)
        facts = {"product": product, "versions": versions, "prices": [str(price) for price in prices]}
        return StepResult(told, hint, now == open_now and bool(now), sum(n for _, n in counted), facts)


def _said(prices: list[Decimal]) -> str:
    shown = prices[-MOST_PRICES:]
    return " → ".join((["…"] if len(prices) > len(shown) else []) + [f"{price:,}" for price in shown])
