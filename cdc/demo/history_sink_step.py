"""History step: a new sink with every version of the products (SCD type 2), which is built from the log alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, Self

from cdc.catalog import Catalog
from cdc.demo import terminal
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.processes import DemoProcesses, pipelines_command
from cdc.demo.shop_workload import write_marker
from cdc.demo.step_results import Step, StepResult, Wait, run_step
from cdc.demo.terminal import Terminal
from cdc.service.supervisor import Child
from cdc.target_names import END_COLUMN, FROM_COLUMN, START_COLUMN, TO_COLUMN

HISTORY: Final = "history"
BUILD_SECONDS: Final = 120.0
"""Seconds for the start of a second Spark session on two busy cores and its first batch."""
MOST_PRICES: Final = 3
"""Number of prices to print for the product."""
_NOW: Final = "SELECT id, price, stock FROM shop.products ORDER BY id"
_OPEN: Final = f'SELECT id, price, stock FROM shop.products WHERE "{END_COLUMN}" IS NULL ORDER BY id'
_COUNTED: Final = "SELECT id, count(*) AS n FROM shop.products GROUP BY id ORDER BY n DESC, id"
_PRICES: Final = f'SELECT price FROM shop.products WHERE id = {{}} ORDER BY "{START_COLUMN}"'


@dataclass(slots=True)
class HistorySinkStep:
    """The history sink; inside the context a second apply process fills it."""

    queries: LakeQueries
    """Queries of the lake, which has the latest state."""
    screen: Terminal
    dsn: str
    """Connection string of the shop."""
    catalog: Catalog
    _children: DemoProcesses = field(init=False)

    def __post_init__(self) -> None:
        workspace = self.queries.workspace
        command = pipelines_command("apply", workspace.definition, "--sink", HISTORY)
        self._children = DemoProcesses(workspace, [Child(HISTORY, tuple(command))])

    def __enter__(self) -> Self:
        self.queries.workspace.add_history()
        self._children.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._children.kill()  # the step is over, and killing an apply process is safe at any time

    def run(self) -> list[Step]:
        """Build the sink and compare it with the lake."""
        self.screen.doing(HISTORY, "a new sink: products as SCD type 2, from the log alone, in a second Spark session")
        return [run_step(self.screen, HISTORY, self.compare)]

    def compare(self) -> StepResult:
        """Wait until both sinks have the whole log; then compare the latest state with the open versions of a table."""
        last = write_marker(self.dsn, "closing")
        history = LakeQueries(self.queries.workspace, HISTORY)
        wait = Wait(self.screen, HISTORY, BUILD_SECONDS)
        wait.until(
            f"lake and {HISTORY} have all of the log",
            lambda: self.queries.has_reached(self.catalog, last) and history.has_reached(self.catalog, last),
        )
        return self.compare_now(history)

    def compare_now(self, history: LakeQueries) -> StepResult:
        """Compare the current rows of the two sinks, which must be equal at the same position."""
        now, open_now = self.queries.rows(_NOW), history.rows(_OPEN)
        counted = history.rows(_COUNTED)
        product, versions = counted[0]
        latest = next(price for key, price, _ in now if key == product)
        prices = [price for (price,) in history.rows(_PRICES.format(product))]
        text = (
            f"product {product}: SCD1 {_price_list([latest])} · SCD2 {_price_list(prices)}; "
            f"{len(now)} rows, {sum(n for _, n in counted)} versions, {len(open_now)} of them open"
            f"{', the same' if now == open_now else ': NOT EQUAL'}"
        )
        query = f"select price, {FROM_COLUMN}, {TO_COLUMN} from shop.products where id = {product} order by 2"
        hint = terminal.cdc_command(f'query "{query}" --sink {HISTORY}', self.queries.workspace.definition)
        facts = {"product": product, "versions": versions, "prices": [str(price) for price in prices]}
        return StepResult(text, hint, now == open_now and bool(now), sum(n for _, n in counted), facts)


def _price_list(prices: list[Decimal]) -> str:
    shown = prices[-MOST_PRICES:]
    return " → ".join((["…"] if len(prices) > len(shown) else []) + [f"{price:,}" for price in shown])
