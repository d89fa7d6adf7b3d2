"""Reached: who waits is woken, and seen while waiting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from cdc.log.durable_position import DurablePosition
from cdc.position import Position


def test_what_is_reached_is_not_waited_for():
    reached, asked = DurablePosition(), list[int]()
    reached.on_wait(lambda: asked.append(1))
    reached.advance(Position(5))
    assert reached.wait(Position(5), 0)
    assert asked == []


def test_it_is_waited_for_until_it_is_told_or_the_time_is_over():
    reached, waits = DurablePosition(), Event()
    reached.on_wait(waits.set)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reached.wait, Position(7), 60.0)
        assert waits.wait(60)
        assert reached.is_awaited(Position(6), Position(7))
        assert not reached.is_awaited(Position(7), Position(9))
        assert not reached.is_awaited(Position(1), Position(6))
        reached.advance(Position(6))
        assert not waiting.done()
        reached.advance(Position(8))
        assert waiting.result(60)
    assert not reached.is_awaited(Position(0), Position(99))
    assert not reached.wait(Position(9), 0)
    assert reached.position == 8
