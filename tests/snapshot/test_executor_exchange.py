"""The exchange between reader and driver: offers, tasks, results, errors, and files that cannot be used."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from cdc.catalog import Catalog
from cdc.errors import CdcError, CopyExecutorFailed, SinkInUse, SnapshotInvalidated, UnreadableRow
from cdc.postgres.chunk_queries import BlockRange, StoredTable
from cdc.postgres.tables import TableName
from cdc.snapshot.executor_chunks import CHUNKS, ChunkTask, StagedChunk, StagedOutcome
from cdc.snapshot.executor_exchange import (
    FAILURES,
    LEAST_BYTES,
    MOST_BYTES,
    MOST_TASKS,
    ChunkTasks,
    ExecutorsChanged,
    ExecutorTasks,
    executor_limits,
    offered_executors,
    take_file,
)
from tests.fixtures.catalog import put_catalog
from tests.fixtures.waiting import until
from tests.pgoutput.streams import ORDERS

TASK = ChunkTask(
    schema=ORDERS,
    span=BlockRange(StoredTable(1, TableName("shop", "orders"), 7, 9), 0, 9),
    publication="p",
    server="now",
    limit=None,
)
DONE = StagedChunk(outcome=StagedOutcome.STAGED, snapshot="7:9:8", rows=3)


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    put_catalog(tmp_path)
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        yield catalog


@contextmanager
def driver(catalog: Catalog, root: Path, run: Callable[[ChunkTask], StagedChunk]) -> Iterator[ChunkTasks]:
    """A driver for the block, whose executors run a function of the test."""
    over = Event()
    with offered_executors(catalog, "shop", root, 2) as tasks:
        serving = Thread(target=tasks.serve, args=(run, over.is_set))
        serving.start()
        try:
            yield tasks
        finally:
            over.set()
            serving.join()


def give_up(_task: ChunkTask) -> StagedChunk:
    raise UnreadableRow("a row is too large")


def test_the_reader_gets_the_result_of_a_task_or_the_error_of_its_executor(catalog: Catalog, tmp_path: Path) -> None:
    with driver(catalog, tmp_path, lambda _task: DONE) as served, ExecutorTasks(catalog, "shop", tmp_path) as tasks:
        assert tasks.slots == 2
        assert tasks.result_of(TASK, Event()) == DONE
    assert (served.chunks, served.rows) == (1, 3)
    with driver(catalog, tmp_path, give_up), ExecutorTasks(catalog, "shop", tmp_path) as tasks:
        with pytest.raises(UnreadableRow, match="a row is too large"):
            tasks.result_of(TASK, Event())
        assert catalog.commands.pending("shop", "copy.chunk") == []


def test_a_task_without_a_driver_is_given_back(catalog: Catalog, tmp_path: Path) -> None:
    raised = list[BaseException]()

    def ask(tasks: ExecutorTasks) -> None:
        try:
            tasks.result_of(TASK, Event())
        except ExecutorsChanged as exc:
            raised.append(exc)

    with ExecutorTasks(catalog, "shop", tmp_path) as tasks:
        assert tasks.slots == 0
        with pytest.raises(ExecutorsChanged):
            tasks.result_of(TASK, Event())
        with offered_executors(catalog, "shop", tmp_path, 3):
            until(lambda: tasks.slots == 3, "the offer")
            asking = Thread(target=ask, args=(tasks,))
            asking.start()
            until(lambda: catalog.commands.pending("shop", "copy.chunk"), "the task")
        asking.join()
        assert tasks.slots == 0
    assert len(raised) == 1


def test_a_cancelled_task_ends_and_its_late_file_is_deleted(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / CHUNKS).mkdir()
    cancelled, begun, may_end = Event(), Event(), Event()

    def write_late(_task: ChunkTask) -> StagedChunk:
        begun.set()
        may_end.wait()
        (tmp_path / CHUNKS / "late.parquet").write_bytes(b"rows")
        return StagedChunk(outcome=StagedOutcome.STAGED, file="late.parquet", rows=3)

    def ask() -> None:
        with pytest.raises(SnapshotInvalidated):
            tasks.result_of(TASK, cancelled)

    with driver(catalog, tmp_path, write_late) as served, ExecutorTasks(catalog, "shop", tmp_path) as tasks:
        raising = Thread(target=ask)
        raising.start()
        assert begun.wait(30)
        cancelled.set()
        raising.join()
        may_end.set()
    assert list((tmp_path / CHUNKS).iterdir()) == []
    assert served.rows == 0


def test_a_new_reader_removes_the_tasks_and_files_of_the_last_one(catalog: Catalog, tmp_path: Path) -> None:
    catalog.commands.post("shop", "copy.chunk", TASK.to_json())
    (tmp_path / CHUNKS).mkdir()
    (tmp_path / CHUNKS / "old.parquet").write_bytes(b"rows")
    with ExecutorTasks(catalog, "shop", tmp_path):
        assert catalog.commands.pending("shop", "copy.chunk") == []
        assert list((tmp_path / CHUNKS).iterdir()) == []


def test_a_driver_whose_executors_only_fail_gives_up(catalog: Catalog, tmp_path: Path) -> None:
    with offered_executors(catalog, "shop", tmp_path, 1) as tasks:
        for _ in range(FAILURES):
            catalog.commands.post("shop", "copy.chunk", TASK.to_json())
        with pytest.raises(CopyExecutorFailed, match="20 tasks of executors failed one after another: a row is too"):
            tasks.serve(give_up, lambda: False)


def test_two_drivers_do_not_serve_one_pipeline(catalog: Catalog, tmp_path: Path) -> None:
    other = offered_executors(catalog, "shop", tmp_path, 1)
    with (
        offered_executors(catalog, "shop", tmp_path, 1),
        pytest.raises(SinkInUse, match="another 'cdc spark submit copy' of pipeline 'shop' is running"),
        other,
    ):
        pass
    with offered_executors(catalog, "shop", tmp_path, 1), offered_executors(catalog, "blog", tmp_path, 1):
        pass


@pytest.mark.parametrize(
    ("content", "checksum", "error", "message"),
    [
        (None, 0, SnapshotInvalidated, "is missing"),
        (b"PAR1 torn", 7, SnapshotInvalidated, "differs from what an executor wrote"),
        (b"no rows", zlib.crc32(b"no rows"), CopyExecutorFailed, "cannot be used: a copied file is not a Parquet file"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_not_used(
    tmp_path: Path, content: bytes | None, checksum: int, error: type[CdcError], message: str
) -> None:
    (tmp_path / CHUNKS).mkdir()
    if content is not None:
        (tmp_path / CHUNKS / "a.parquet").write_bytes(content)
    staged = StagedChunk(outcome=StagedOutcome.STAGED, file="a.parquet", rows=1, checksum=checksum)
    with pytest.raises(error, match=message):
        take_file(tmp_path, staged, 1)


def test_the_limits_of_the_load_are_divided_by_the_tasks() -> None:
    assert executor_limits(2, None, None).nbytes == MOST_BYTES
    assert executor_limits(MOST_TASKS, None, None).nbytes == 2 << 20
    assert executor_limits(4, None, 8 << 20).nbytes == 4 << 20
    assert executor_limits(4, None, 1_000).nbytes == LEAST_BYTES
    assert executor_limits(4, 1_000, None).rows == 500
