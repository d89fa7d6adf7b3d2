"""Placing: what the copying thread is given is what the stream says at that place, not what the log holds by then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.change import LOG_SCHEMA
from cdc.errors import SnapshotVoid
from cdc.pgoutput.transactions import WatermarkSeen
from cdc.position import Position
from cdc.snapshot.placing import Chunk, Placing
from cdc.table import TableSchema
from tests.pgoutput.streams import ORDERS

RENAMED = replace(ORDERS, name="renamed")


@pytest.fixture(name="placing")
def _placing() -> Placing:
    placing = Placing()
    placing.begin(Position(100), {ORDERS.relation: ORDERS})
    return placing


def chunk(schema: TableSchema | None = None) -> Chunk:
    return Chunk(ORDERS.relation, ORDERS.topic, LOG_SCHEMA.empty_table(), schema=schema)


def test_a_window_is_read_by_the_version_that_was_told_though_the_log_does_not_hold_it_yet(placing: Placing) -> None:
    assert placing.open("one", ORDERS.relation, 0.0) == ORDERS
    placing.learn(RENAMED)
    assert placing.open("two", ORDERS.relation, 0.0) == RENAMED


def test_a_version_that_a_chunk_brings_holds_from_its_watermark_on(placing: Placing) -> None:
    placing.open("one", ORDERS.relation, 0.0)
    placing.offer("one", chunk(RENAMED))
    assert placing.open("two", ORDERS.relation, 0.0) == ORDERS
    schema, (row,) = placing.place(WatermarkSeen(b"one", Position(200), 0, 7, 5))
    assert schema == RENAMED
    assert row["op"].to_pylist() == ["s"]
    assert placing.open("three", ORDERS.relation, 0.0) == RENAMED


def test_a_watermark_of_nobody_and_one_of_work_that_ended_mean_nothing(placing: Placing) -> None:
    seen = WatermarkSeen(b"one", Position(200), 0, 7, 5)
    assert placing.place(seen) == (None, [])
    placing.track(on=True)
    placing.open("one", ORDERS.relation, 0.0)
    placing.offer("one", chunk(RENAMED))
    placing.track(on=False)
    assert placing.place(seen) == (None, [])
    with pytest.raises(SnapshotVoid):
        placing.outcome("one", 0.0)


def test_nothing_can_be_placed_while_nothing_streams(placing: Placing) -> None:
    placing.end()
    with pytest.raises(SnapshotVoid):
        placing.open("one", ORDERS.relation, 0.0)
