"""What the apply process asks the source for: rows of which it has only a part, once, and again if none came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from cdc import metrics
from cdc.catalog import Catalog, Command
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from pipelines.dead_letters.requests import AGAIN_AFTER, DeadLetterCommands
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.pipelines.shop_pipeline import ShopPipeline, applied_shop, change


@dataclass
class Desk:
    """A sink's loop over a log without a source, its orders, and the time."""

    ground: ShopPipeline
    catalog: Catalog
    loop: SinkLoop
    now: float = 0.0
    orders: DeadLetterCommands = field(init=False)

    def __post_init__(self) -> None:
        progress = SinkFigures("shop", "lake", metrics.Metrics())
        self.orders = DeadLetterCommands(self.ground.definition, self.catalog, progress, clock=lambda: self.now)

    def partial(self, position: int, key: int) -> None:
        """A change of a row that nobody has seen whole."""
        self.take(position, change(position, 0, key, None, op="u", after=[(1, str(key))], partial=True))

    def take(self, position: int, row: dict[str, Any]) -> None:
        self.ground.append(position, [row])
        self.loop(None, Position(position))

    def asked(self, after: float = 1.0) -> list[Command]:
        """Backfills, oldest first, once so many seconds have passed."""
        self.now += after
        self.orders.process(self.loop.quarantine)
        return self.catalog.commands.ls("shop", BACKFILL)[::-1]


@pytest.fixture(name="desk")
def _desk() -> Iterator[Desk]:
    ground = applied_shop()
    (wanted,) = (sink for sink in ground.definition.sinks if sink.name == "lake")
    with Catalog.open(ground.definition.catalog.url) as catalog, closing(build_sink(wanted)) as sink:
        fold = RangeFolder(LogReader(ground.definition.log.path), "lake", wanted.tables)
        loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", "lake", metrics.Metrics()))
        loop.open()
        yield Desk(ground, catalog, loop)
        loop.drain()


def test_a_row_of_which_there_is_a_part_is_asked_for_once_for_this_sink_alone(desk: Desk) -> None:
    assert desk.asked() == []
    desk.partial(1_500, 90)
    (asked,) = desk.asked()

    assert BackfillRequest.from_json(asked.payload) == BackfillRequest(("shop.orders",), sink="lake", keys=(("90",),))
    assert desk.asked() == [asked]


def test_further_rows_are_asked_for_when_the_backfill_before_has_ended(desk: Desk) -> None:
    desk.partial(1_500, 90)
    (first,) = desk.asked()
    desk.partial(1_600, 91)
    assert len(desk.asked()) == 1
    desk.catalog.commands.finish(first.id, {})

    assert desk.asked()[1].payload["keys"] == [["90"], ["91"]]


def test_a_row_that_did_not_come_is_asked_for_again_and_one_that_came_is_not(desk: Desk) -> None:
    desk.partial(1_500, 90)
    (first,) = desk.asked()
    desk.catalog.commands.finish(first.id, {}, ok=False)
    assert len(desk.asked()) == 1
    first, second = desk.asked(AGAIN_AFTER)
    desk.catalog.commands.finish(second.id, {})
    desk.take(1_700, change(1_700, 0, 90, "whole", op="r", address="lake"))

    assert desk.loop.quarantine.rows == []
    assert len(desk.asked(AGAIN_AFTER)) == 2


def test_a_table_that_is_in_another_backfill_is_waited_for(desk: Desk) -> None:
    other = desk.catalog.commands.post("shop", BACKFILL, BackfillRequest(("shop.*",), where="true").to_json())
    desk.partial(1_500, 90)
    assert len(desk.asked()) == 1
    assert len(desk.asked(AGAIN_AFTER)) == 1
    desk.catalog.commands.finish(other, {})

    assert len(desk.asked(AGAIN_AFTER)) == 2
