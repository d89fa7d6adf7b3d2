"""Past: the lake as it was at one position of before, while the shop goes on: all its tables, and their columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.demo import shell_commands
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.step import PATIENCE, Step, StepResult, Wait, taken
from cdc.demo.terminal import Terminal
from cdc.errors import CutUnavailable
from cdc.position import Position
from cdc.stores.published import Published, TargetState

COLUMN: Final = "gift_note"
TOTALS: Final = "select sum(total) from shop.orders union all select sum(quantity * price) from shop.order_items"
"""Twice the same number wherever both tables are read as of one commit, for each order is written with its items."""
_ORDERS: Final = "SELECT count(*) AS n, sum(total) AS total FROM shop.orders"
_ITEMS: Final = "SELECT count(*) AS n, sum(quantity * price) AS total FROM shop.order_items"
_NOW: Final = "SELECT count(*) FROM shop.orders"
_FILLED: Final = f"SELECT count({COLUMN}), count(*) FROM shop.orders"


@dataclass(frozen=True, slots=True)
class TimeTravelStep:
    """Shows what was; `before`: where the lake stood when orders had no gift_note yet."""

    shelf: LakeQueries
    screen: Terminal
    before: Position | None
    altered: bool = True
    """Whether the column came at all."""
    patience: float = PATIENCE
    """Seconds for the column to reach the lake."""

    def go(self) -> list[Step]:
        """Show both; a part that cannot be shown is told as one that failed."""
        cut = taken(self.screen, "cut", self.cut)
        if not self.altered:
            self.screen.doing("column", "left out: the load ended before the schema change came")
            return [cut]
        return [cut, taken(self.screen, "column", self.column)]

    def column(self) -> StepResult:
        """The column that came while the pipeline ran."""
        wait = Wait(self.screen, "column", self.patience)
        wait.until(f"the lake's orders have {COLUMN}", lambda: COLUMN in self.shelf.columns("shop.orders"))
        ((filled, orders),) = self.shelf.rows(_FILLED)
        early = self._early()
        lacked = early is None or COLUMN not in self.shelf.columns("shop.orders", early)
        told = f"{COLUMN} came while it ran: in the lake {filled:,} of {orders:,} orders have one"
        if early is not None:
            told += f"; at {Position(early.position)} there was {'no such column' if lacked else 'one already'}"
        hint = shell_commands.command(f'query "select {COLUMN} from shop.orders" --limit 5', self._definition)
        facts = {"column": COLUMN, "filled": filled, "absent_at": str(Position(early.position)) if early else None}
        return StepResult(told, hint, lacked, orders, facts)

    def cut(self) -> StepResult:
        """Every table at one position of before."""
        cut = self._amid()
        position = Position(cut.position)
        ((orders, total),), ((items, items_total),) = self.shelf.rows(_ORDERS, cut), self.shelf.rows(_ITEMS, cut)
        ((now,),) = self.shelf.rows(_NOW)
        equal = total == items_total
        told = f"{len(cut.tables)} tables as they all were at {position}: {orders:,} orders of {total:,} and "
        told += f"{items:,} items of {'as much' if equal else f'{items_total:,}: NOT EQUAL'}; now {now:,} orders"
        hint = shell_commands.command(f'query "{TOTALS}" --at {position}', self._definition)
        facts = {"position": str(position), "tables": len(cut.tables), "orders": orders, "items": items}
        return StepResult(told, hint, equal, orders + items, facts | {"sums": [str(total), str(items_total)]})

    def _early(self) -> Published | None:
        """The cut from before the column, if it is still kept and had every table."""
        if self.before is None:
            return None
        try:
            found = self.shelf.lake.cut(self.before)
        except CutUnavailable:
            return None
        return found if _is_whole(found) else None

    def _amid(self) -> Published:
        """The cut in the middle of those that are kept and have every table."""
        lake = self.shelf.lake
        kept = lake.cuts()
        for listed in [*kept[len(kept) // 2 :], *kept[: len(kept) // 2]]:
            found = lake.cut(Position(listed.position))
            if _is_whole(found):
                return found
        raise CutUnavailable("the lake keeps no cut with every table", remedy="wait for the first copy: 'cdc status'")

    @property
    def _definition(self) -> Path:
        return self.shelf.ground.definition


def _is_whole(cut: Published) -> bool:
    return bool(cut.tables) and all(table.state == TargetState.STREAMING for table in cut.tables.values())
