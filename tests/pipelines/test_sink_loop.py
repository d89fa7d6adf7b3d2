"""The apply loop: batches of one sink over a log on disk, cut at requested positions and published as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.catalog import Catalog, CommandState
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.pipelines.shop_pipeline import COPY, END, FIGURES, ShopPipeline, make_shop


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path)


@contextmanager
def opened_loop(shop: ShopPipeline, catalog: Catalog) -> Iterator[SinkLoop]:
    """The loop of the Delta sink, opened, until the block ends."""
    definition = shop.definition.sinks[0]
    sink = build_sink(definition)
    fold = RangeFolder(LogReader(shop.definition.log.path), definition.name, definition.tables)
    loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", definition.name, FIGURES))
    loop.open()
    try:
        yield loop
    finally:
        loop.drain()
        sink.close()


@pytest.fixture(name="catalog")
def _catalog(shop: ShopPipeline) -> Iterator[Catalog]:
    with Catalog.open(shop.definition.catalog.url) as catalog:
        yield catalog


def test_a_batch_ends_at_a_requested_cut_and_the_rest_follows(shop: ShopPipeline, catalog: Catalog) -> None:
    command = catalog.commands.post("shop", "cut", {"sink": "lake", "position": 1_200})
    with opened_loop(shop, catalog) as loop:
        loop(None, Position(END))
        assert loop.position == END
    answered = catalog.commands.get(command)
    assert answered is not None
    assert answered.state is CommandState.DONE
    assert (answered.result or {})["record"]["position"] == 1_200


def test_a_cut_before_the_position_of_the_sink_is_refused(shop: ShopPipeline, catalog: Catalog) -> None:
    with opened_loop(shop, catalog) as loop:
        loop(None, Position(1_200))
        command = catalog.commands.post("shop", "cut", {"sink": "lake", "position": COPY})
        loop(None, Position(END))
    refused = catalog.commands.get(command)
    assert refused is not None
    assert (refused.state, refused.result) == (CommandState.FAILED, {"reason": "passed"})


def test_a_loop_begins_at_the_published_position_and_reads_nothing_twice(shop: ShopPipeline, catalog: Catalog) -> None:
    shop.drive("lake", 1_200)
    before = shop.lake()
    with opened_loop(shop, catalog) as loop:
        assert (loop.position, loop.consumed_position) == (1_200, 1_200)
        loop(None, Position(1_100))
        assert loop.position == 1_200
    assert shop.lake() == before


def test_a_drained_loop_applies_nothing(shop: ShopPipeline, catalog: Catalog) -> None:
    with opened_loop(shop, catalog) as loop:
        loop(None, Position(COPY))
        loop.drain()
        loop(None, Position(END))
        assert loop.position == COPY
