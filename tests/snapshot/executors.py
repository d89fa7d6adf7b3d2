"""Executors of Spark, played by a pool of processes that run the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from queue import Queue
from threading import Event, Thread
from typing import Final

from cdc.catalog import Catalog
from cdc.errors import CdcError
from cdc.snapshot.executor_chunks import ChunkTask, ExecutorAccess, StagedChunk, stage_chunk
from cdc.snapshot.executor_exchange import ChunkTasks, offered_executors
from tests.fixtures.waiting import PATIENCE

SLOTS: Final = 2
Run = Callable[[ChunkTask, ExecutorAccess], StagedChunk]


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """Processes that read chunks; they take seconds to start."""
    with ProcessPoolExecutor(SLOTS, get_context("forkserver")) as pool:
        yield pool


@contextmanager
def executors(
    url: str, pipeline: str, access: ExecutorAccess, pool: ProcessPoolExecutor, run: Run = stage_chunk
) -> Iterator[ChunkTasks]:
    """A driver that offers the processes for the block; its error is raised. url: of the catalog."""
    over = Event()
    opened: Queue[ChunkTasks | BaseException] = Queue()
    failures = list[BaseException]()

    def drive() -> None:
        try:
            with Catalog.open(url) as catalog, offered_executors(catalog, pipeline, access.root, SLOTS) as tasks:
                opened.put(tasks)
                tasks.serve(lambda task: pool.submit(run, task, access).result(), over.is_set)
        except CdcError as failure:
            failures.append(failure)
            opened.put(failure)

    driver = Thread(target=drive, daemon=True)
    driver.start()
    tasks = opened.get(timeout=PATIENCE)
    if isinstance(tasks, BaseException):
        raise tasks
    try:
        yield tasks
    finally:
        over.set()
        driver.join()
    if failures:
        raise failures[0]
