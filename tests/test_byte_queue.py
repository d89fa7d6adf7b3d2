"""Pipe: bounded by bytes, closed from either end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from cdc.byte_queue import ByteQueue, QueueClosed


def test_items_come_out_in_the_order_they_went_in():
    pipe: ByteQueue[int] = ByteQueue(100)
    for item in range(5):
        pipe.put(item, 10)
    assert [pipe.get() for _ in range(5)] == list(range(5))
    assert pipe.size == 0


def test_an_item_larger_than_the_limit_passes_an_empty_pipe():
    pipe: ByteQueue[str] = ByteQueue(1)
    pipe.put("large", 1000)
    assert pipe.get() == "large"


def test_a_full_pipe_holds_the_writer_and_lets_it_do_something_meanwhile():
    pipe: ByteQueue[int] = ByteQueue(10)
    pipe.put(1, 10)
    waited = Event()
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(pipe.put, 2, 10, meanwhile=waited.set)
        assert waited.wait(10)
        assert not blocked.done()
        assert pipe.get() == 1
        blocked.result(10)
    assert pipe.get() == 2


def test_get_gives_up_after_its_timeout():
    assert ByteQueue[int](10).get(timeout=0.01) is None


def test_a_closed_pipe_is_read_to_its_end():
    pipe: ByteQueue[int] = ByteQueue(10)
    pipe.put(1, 1)
    pipe.close()
    assert pipe.get() == 1
    with pytest.raises(QueueClosed):
        pipe.get()


def test_closing_with_discard_ends_both_sides():
    pipe: ByteQueue[int] = ByteQueue(10)
    pipe.put(1, 1)
    pipe.close(discard=True)
    with pytest.raises(QueueClosed):
        pipe.get()
    with pytest.raises(QueueClosed):
        pipe.put(2, 1)


def test_a_reader_that_is_woken_has_nothing_once_and_items_all_the_same():
    pipe: ByteQueue[int] = ByteQueue(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pipe.get)
        pipe.wake()
        assert waiting.result(10) is None
    pipe.put(1, 10)
    pipe.wake()  # a full pipe does not hold it up
    assert pipe.get() == 1
    assert pipe.get() is None
    assert pipe.get(0.01) is None


def test_nobody_wakes_the_reader_of_a_closed_pipe():
    pipe: ByteQueue[int] = ByteQueue(10)
    pipe.close()
    with pytest.raises(QueueClosed):
        pipe.wake()
