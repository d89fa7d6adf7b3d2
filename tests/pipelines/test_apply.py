"""The apply loop: batches of one sink over a log on disk, cut at requested positions and published as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.catalog import Catalog, CommandState
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.apply import SinkLoop
from pipelines.fold_range import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.progress import SinkFigures
from pipelines.sink_factory import build_sink
from tests.pipelines.replayed import COPY, END, FIGURES, Ground, made


@pytest.fixture(name="ground")
def _ground(tmp_path: Path) -> Ground:
    return made(tmp_path)


@contextmanager
def opened_loop(ground: Ground, catalog: Catalog) -> Iterator[SinkLoop]:
    """The loop of the Delta sink, opened, until the block ends."""
    definition = ground.definition.sinks[0]
    sink = build_sink(definition)
    fold = RangeFolder(LogReader(ground.definition.log.path), definition.name, definition.tables)
    loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", definition.name, FIGURES))
    loop.open()
    try:
        yield loop
    finally:
        loop.drain()
        sink.close()


@pytest.fixture(name="catalog")
def _catalog(ground: Ground) -> Iterator[Catalog]:
    with Catalog.open(ground.definition.catalog.url) as catalog:
        yield catalog


def test_a_batch_ends_at_a_requested_cut_and_the_rest_follows(ground: Ground, catalog: Catalog) -> None:
    command = catalog.commands.post("shop", "cut", {"sink": "lake", "position": 1_200})
    with opened_loop(ground, catalog) as loop:
        loop(None, Position(END))
        assert loop.position == END
    answered = catalog.commands.get(command)
    assert answered is not None
    assert answered.state is CommandState.DONE
    assert (answered.result or {})["record"]["position"] == 1_200


def test_a_cut_before_the_position_of_the_sink_is_refused(ground: Ground, catalog: Catalog) -> None:
    with opened_loop(ground, catalog) as loop:
        loop(None, Position(1_200))
        command = catalog.commands.post("shop", "cut", {"sink": "lake", "position": COPY})
        loop(None, Position(END))
    refused = catalog.commands.get(command)
    assert refused is not None
    assert (refused.state, refused.result) == (CommandState.FAILED, {"reason": "passed"})


def test_a_loop_begins_at_the_published_position_and_reads_nothing_twice(ground: Ground, catalog: Catalog) -> None:
    ground.drive("lake", 1_200)
    before = ground.lake()
    with opened_loop(ground, catalog) as loop:
        assert (loop.position, loop.consumed_position) == (1_200, 1_200)
        loop(None, Position(1_100))
        assert loop.position == 1_200
    assert ground.lake() == before


def test_a_drained_loop_applies_nothing(ground: Ground, catalog: Catalog) -> None:
    with opened_loop(ground, catalog) as loop:
        loop(None, Position(COPY))
        loop.drain()
        loop(None, Position(END))
        assert loop.position == COPY
