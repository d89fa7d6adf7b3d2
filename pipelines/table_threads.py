"""Table threads: apply the tables of a batch one after another, or several at once if that is faster.

While a thread runs Python code, no other thread of the process can. A table with few rows takes mostly Python code, and
then two threads need twice the CPU of one. A table with many rows takes mostly compiled code, and an object store lets
a thread wait; then several threads are faster. A single table is left to the caller: the allocator has memory for each
thread, and that of the caller has the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from pipelines.sinks.contract import Sink

_T = TypeVar("_T")


class TableThreads:
    """The threads that apply batches to the tables of one sink."""

    def __init__(self, sink: Sink) -> None:
        self._parallel_from = sink.parallel_from
        self._pool = ThreadPoolExecutor(sink.parallel, thread_name_prefix=f"merge-{sink.name}")

    def map(self, apply: Callable[[int], _T], relations: Sequence[int], rows: int) -> dict[int, _T]:
        """Call `apply` for each relation, and return the results by relation. rows: number of rows of all of them.

        An error of one call is raised when the others have ended.
        """
        if len(relations) == 1 or rows < self._parallel_from * len(relations):
            return {relation: apply(relation) for relation in relations}
        calls = {relation: self._pool.submit(apply, relation) for relation in relations}
        wait(calls.values())
        return {relation: call.result() for relation, call in calls.items()}

    def close(self) -> None:
        """Wait for running calls to end; no other can begin."""
        self._pool.shutdown()
