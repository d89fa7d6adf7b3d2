"""Copy limits: how many chunks of a copy are in memory or pending in the stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from cdc.snapshot.copy_limits import ChunkBudget


def test_a_budget_of_two_chunks_allows_a_third_after_a_release() -> None:
    budget = ChunkBudget(2)

    assert [budget.acquire(alone=False) for _ in range(3)] == [True, True, False]
    budget.release()
    assert budget.acquire(alone=False)


def test_a_chunk_is_acquired_alone_only_while_none_is_pending() -> None:
    budget = ChunkBudget(4)

    assert budget.acquire(alone=True)
    assert not budget.acquire(alone=True)
    assert budget.acquire(alone=False)
    budget.release()
    assert not budget.acquire(alone=True)
    budget.release()
    assert budget.acquire(alone=True)


def test_a_release_wakes_a_waiting_connection() -> None:
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
