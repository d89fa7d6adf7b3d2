"""How many chunks of a copy are in memory, and on their way in front of the stream: cdc/snapshot/chunk_reader.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from cdc.snapshot.chunk_reader import ChunkBudget


def test_so_many_are_taken_and_one_more_when_one_is_given_back() -> None:
    slots = ChunkBudget(2)

    assert [slots.take(alone=False) for _ in range(3)] == [True, True, False]
    slots.give_back()
    assert slots.take(alone=False)


def test_while_the_stream_brings_rows_one_is_on_its_way_of_all_connections() -> None:
    slots = ChunkBudget(4)

    assert slots.take(alone=True)
    assert not slots.take(alone=True)
    assert slots.take(alone=False)
    slots.give_back()
    assert not slots.take(alone=True)
    slots.give_back()
    assert slots.take(alone=True)


def test_who_has_none_is_told_when_one_is_given_back() -> None:
    slots, waits = ChunkBudget(1), Event()
    assert slots.take(alone=False)

    def waiting() -> bool:
        waits.set()
        slots.wait(60, alone=False)
        return slots.take(alone=False)

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(waiting)
        assert waits.wait(60)
        assert not taken.done()
        slots.give_back()
        assert taken.result(30)
