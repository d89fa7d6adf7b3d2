"""Copy limits: how many chunks of a copy are in memory or pending in the stream, and how fast they are read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import cast

import pytest

from cdc.config.source import SourceLoad
from cdc.snapshot.chunk_sender import ChunkSender
from cdc.snapshot.copy_limits import ChunkBudget, CopyRateLimit

MIB = 1 << 20


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


class RecordedWaits(Event):
    """An event on which nothing waits; it keeps the seconds of each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return False


@pytest.mark.parametrize(("rows", "load"), [(None, SourceLoad(bytes_per_second=MIB)), (1000, SourceLoad())])
def test_the_limit_of_the_source_holds_for_all_tasks_of_executors_together(rows: int | None, load: SourceLoad) -> None:
    waits, of_no_standby = RecordedWaits(), cast("ChunkSender", None)
    limit = CopyRateLimit(rows, load, of_no_standby, waits)
    for _chunk in range(3):
        for _task in range(8):
            limit.throttle(1000, MIB)  # a second of the limit
    # with a limit for each task the last wait would end after 3 s
    assert 12.0 < waits.seconds[-1] <= 24.0
