"""How many chunks of a copy are in memory, and on their way in front of the stream: cdc/snapshot/chunk_reader.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from cdc.snapshot.chunk_reader import ChunkBudget


def test_so_many_are_taken_and_one_more_when_one_is_given_back() -> None:
    budget = ChunkBudget(2)

    assert [budget.acquire(alone=False) for _ in range(3)] == [True, True, False]
    budget.release()
    assert budget.acquire(alone=False)


def test_while_the_stream_brings_rows_one_is_on_its_way_of_all_connections() -> None:
    budget = ChunkBudget(4)

    assert budget.acquire(alone=True)
    assert not budget.acquire(alone=True)
    assert budget.acquire(alone=False)
    budget.release()
    assert not budget.acquire(alone=True)
    budget.release()
    assert budget.acquire(alone=True)


def test_who_has_none_is_told_when_one_is_given_back() -> None:
    budget, waits = ChunkBudget(1), Event()
    assert budget.acquire(alone=False)

    def waiting() -> bool:
        waits.set()
        budget.wait_until_free(60, alone=False)
        return budget.acquire(alone=False)

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(waiting)
        assert waits.wait(60)
        assert not taken.done()
        budget.release()
        assert taken.result(30)
