"""The status of a pipeline says what executors read for its reader, while they do and not longer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

import pytest

from cdc.catalog import Catalog
from cdc.service.status import pipeline_status
from cdc.snapshot.executor_chunks import ChunkTask, StagedChunk
from cdc.snapshot.executor_copy_status import ExecutorCopy
from cdc.snapshot.executor_exchange import ExecutorTasks
from tests.fixtures.catalog import put_catalog
from tests.snapshot.test_executor_exchange import DONE, TASK, driver


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    put_catalog(tmp_path)
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        yield catalog


def test_the_status_says_what_executors_read_and_have_read(catalog: Catalog, tmp_path: Path) -> None:
    begun, may_end = Event(), Event()

    def wait(_task: ChunkTask) -> StagedChunk:
        begun.set()
        may_end.wait()
        return DONE

    def status() -> ExecutorCopy | None:
        return pipeline_status(catalog, "shop", datetime.now(UTC)).executor_copy

    assert status() is None
    with driver(catalog, tmp_path, wait), ExecutorTasks(catalog, "shop", tmp_path) as tasks:
        asking = Thread(target=tasks.result_of, args=(TASK, Event()))
        asking.start()
        assert begun.wait(30)
        during = status()
        may_end.set()
        asking.join()
        after = status()
    assert during == ExecutorCopy(tasks=2, chunks=0, rows=0, tables={"shop.orders": 1})
    assert during.text.startswith("executors read shop.orders (1 task), up to 2 tasks at a time")
    assert after == ExecutorCopy(tasks=2, chunks=1, rows=3, tables={})
    assert status() is None
