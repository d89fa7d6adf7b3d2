"""Registered: a sink's word beside the log, said when it is time, and never a reason to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log import consumers
from cdc.log.consumers import FOLDER, Consumer
from cdc.position import Position
from pipelines.runtime.consumer_registration import sink_registration, target_uuid
from tests.pipelines.shop_pipeline import ShopPipeline, make_shop


@pytest.fixture
def ground(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path)


def word(ground: ShopPipeline) -> Consumer:
    (consumer,) = consumers.list_consumers(Path(ground.definition.log.path))
    return consumer


def test_the_first_word_is_written_and_the_next_waits_until_it_is_time(ground: ShopPipeline) -> None:
    registered = sink_registration(ground.definition.log.path, "log", ground.definition.sinks[0])
    registered.report(Position(10))
    registered.report(Position(20))
    assert word(ground).position == 10
    registered.report(Position(30), pinned=4, at_once=True)
    assert (word(ground).name, word(ground).position, word(ground).pinned) == ("lake", 30, 4)


def test_a_target_is_the_same_consumer_under_another_name_and_another_one_at_another_place(
    ground: ShopPipeline,
) -> None:
    lake, find = ground.definition.sinks
    renamed = lake.model_copy(update={"name": "other", "tables": ("shop.a",)})
    moved = lake.model_copy(update={"path": "/elsewhere/{table}"})
    uuids = [target_uuid("log", wanted) for wanted in (lake, renamed, moved, find)]
    assert uuids[0] == uuids[1]
    assert len(set(uuids)) == 3
    assert target_uuid("another log", lake) not in uuids


def test_a_word_that_cannot_be_written_stops_nobody(ground: ShopPipeline) -> None:
    place = Path(ground.definition.log.path) / FOLDER
    place.write_text("in the way")
    registered = sink_registration(ground.definition.log.path, "log", ground.definition.sinks[0])
    registered.report(Position(10))
    registered.unregister()
    place.unlink()
    registered.report(Position(20), at_once=True)
    assert word(ground).position == 20
