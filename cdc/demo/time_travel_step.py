"""Time travel step: reads all tables of the lake at one past position, while the workload continues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.demo import terminal
from cdc.demo.query_runner import LakeQueries
from cdc.demo.step_results import WAIT_SECONDS, Step, StepResult, Wait, run_step
from cdc.demo.terminal import Terminal
from cdc.errors import CutUnavailable
from cdc.position import Position
from cdc.targets.published_record import Published, TargetState

COLUMN: Final = "gift_note"
TOTALS: Final = "select sum(total) from shop.orders union all select sum(quantity * price) from shop.order_items"
"""Query that returns two equal numbers at every cut, because an order and its items share a transaction."""
_ORDERS: Final = "SELECT count(*) AS n, sum(total) AS total FROM shop.orders"
_ITEMS: Final = "SELECT count(*) AS n, sum(quantity * price) AS total FROM shop.order_items"
_NOW: Final = "SELECT count(*) FROM shop.orders"
_FILLED: Final = f"SELECT count({COLUMN}), count(*) FROM shop.orders"


@dataclass(frozen=True, slots=True)
class TimeTravelStep:
    """Steps of the demo that read the lake at past cuts."""

    queries: LakeQueries
    screen: Terminal
    before: Position | None
    """Position of the lake before the workload added the column; None if it is unknown."""
    altered: bool = True
    """True if the workload has added the column."""
    wait_seconds: float = WAIT_SECONDS
    """Maximum seconds to wait for the column in the lake."""

    def run(self) -> list[Step]:
        """Run the step `cut` and, if the workload added a column, the step `column`; return the completed steps."""
        cut = run_step(self.screen, "cut", self.cut)
        if not self.altered:
            self.screen.doing("column", "skipped: the workload ended before the schema change")
            return [cut]
        return [cut, run_step(self.screen, "column", self.column)]

    def column(self) -> StepResult:
        """Check that the lake has the added column now, and that a cut before the schema change does not have it."""
        wait = Wait(self.screen, "column", self.wait_seconds)
        wait.until(f"the lake's orders have {COLUMN}", lambda: COLUMN in self.queries.columns("shop.orders"))
        ((filled, orders),) = self.queries.rows(_FILLED)
        cut = self._cut_before_column()
        is_absent = cut is None or COLUMN not in self.queries.columns("shop.orders", cut)
        text = f"column {COLUMN} was added: in the lake {filled:,} of {orders:,} orders have a value"
        if cut is not None:
            text += f"; at {Position(cut.position)} the column {'did not exist' if is_absent else 'EXISTED ALREADY'}"
        hint = terminal.cdc_command(f'query "select {COLUMN} from shop.orders" --limit 5', self._definition)
        facts = {"column": COLUMN, "filled": filled, "absent_at": str(Position(cut.position)) if cut else None}
        return StepResult(text, hint, is_absent, orders, facts)

    def cut(self) -> StepResult:
        """Read every table at one past cut, and check that orders and items have the same total there."""
        cut = self._middle_cut()
        position = Position(cut.position)
        ((orders, total),), ((items, items_total),) = self.queries.rows(_ORDERS, cut), self.queries.rows(_ITEMS, cut)
        ((now,),) = self.queries.rows(_NOW)
        equal = total == items_total
        text = f"{len(cut.tables)} tables at {position}: {orders:,} orders with total {total:,}, "
        text += f"{items:,} items with {'the same' if equal else f'{items_total:,}: NOT EQUAL'}; now {now:,} orders"
        hint = terminal.cdc_command(f'query "{TOTALS}" --at {position}', self._definition)
        facts = {"position": str(position), "tables": len(cut.tables), "orders": orders, "items": items}
        return StepResult(text, hint, equal, orders + items, facts | {"sums": [str(total), str(items_total)]})

    def _cut_before_column(self) -> Published | None:
        """Return the cut at the position `before`, when the lake did not have the column.

        Return None if there is no such cut, or if a table of the cut was not streaming yet.
        """
        if self.before is None:
            return None
        try:
            found = self.queries.lake.cut(self.before)
        except CutUnavailable:
            return None
        return found if _is_whole(found) else None

    def _middle_cut(self) -> Published:
        """Return a cut at which every table was streaming.

        The search begins in the middle of the list of published cuts. The first half of the list is searched last.
        """
        lake = self.queries.lake
        kept = lake.cuts()
        for listed in [*kept[len(kept) // 2 :], *kept[: len(kept) // 2]]:
            found = lake.cut(Position(listed.position))
            if _is_whole(found):
                return found
        raise CutUnavailable(
            "the lake has no cut at which the copy of every table was complete",
            remedy="wait until the first copy is done, which 'cdc status' shows",
        )

    @property
    def _definition(self) -> Path:
        return self.queries.workspace.definition


def _is_whole(cut: Published) -> bool:
    return bool(cut.tables) and all(table.state == TargetState.STREAMING for table in cut.tables.values())
