"""Chunks that executors read: exact under load, and never in the log twice or half. A process pool plays executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from cdc.catalog import Catalog
from cdc.errors import CopyExecutorFailed
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BackfillRequest
from cdc.snapshot.executor_chunks import CHUNKS, ChunkTask, ExecutorAccess, StagedChunk, stage_chunk
from cdc.snapshot.executor_copy_status import TASK
from cdc.snapshot.executor_exchange import ChunkTasks, ExecutorTasks
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.executors import SLOTS, Run, processes
from tests.snapshot.executors import executors as of_pipeline
from tests.snapshot.reader_with_backfills import Running, read_rows

ROWS = 1_500
RATE = 1_000
"""Rows per second: a limit makes the chunks small, so that there are several."""


@pytest.fixture(name="pool", scope="module")
def _pool() -> Iterator[ProcessPoolExecutor]:
    with processes() as pool:
        yield pool


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """A table of two key columns and a long one, copied whole: no copy of it is requested when the reader starts."""
    run_sql(
        database,
        'CREATE TABLE t (a int, b text COLLATE "C", v text, long text, pad text, PRIMARY KEY (a, b))',
        "ALTER TABLE t SET (fillfactor = 50), ALTER long SET STORAGE EXTERNAL, ALTER pad SET STORAGE PLAIN",
        "INSERT INTO t SELECT i / 10, 'k' || i % 10, 'v' || i, repeat('x', 3000) || i, repeat('p', 700) "
        f"FROM generate_series(1, {ROWS}) i",
    )
    held = Captured(tmp_path, database)
    held.write(slot=held.slot, more="snapshot: {beside: 64MiB}\n")
    held.copy()
    held.write(slot=held.slot)
    return held


def source_rows(held: Captured) -> list[tuple[str | None, ...]]:
    return sorted(tuple(row) for row in rows_of(held.dsn, "SELECT a::text, b, v, long, pad FROM t"))


def access_of(held: Captured) -> ExecutorAccess:
    definition = held.definition
    return ExecutorAccess(held.dsn, definition.log.root, definition.source.undecodable)


def executors(held: Captured, pool: ProcessPoolExecutor, run: Run = stage_chunk) -> AbstractContextManager[ChunkTasks]:
    """Executors for the pipeline; see `tests.snapshot.executors`."""
    return of_pipeline(held.definition.catalog.url, "held", access_of(held), pool, run)


@contextmanager
def writers(held: Captured) -> Iterator[None]:
    """Changes of every kind beside the block: complete and partial images, deletes, inserts, moved rows."""
    done = Event()

    def write() -> None:
        number = 0
        with connect(held.dsn) as conn:
            while not done.wait(0.01):
                number += 1
                a = number * 7 % (ROWS // 10)
                conn.execute("UPDATE t SET v = %s WHERE a = %s", [f"new {number}", a])
                conn.execute("DELETE FROM t WHERE a = %s AND b = 'k3'", [a])
                conn.execute("INSERT INTO t VALUES (%s, 'k3', 'again', repeat('y', 3000))", [a])
                conn.execute("UPDATE t SET b = b || 'm' WHERE a = %s AND b = 'k5'", [a])

    writer = Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def test_a_copy_by_executors_beside_writers_leaves_the_log_in_the_sources_state(
    held: Captured, pool: ProcessPoolExecutor
) -> None:
    before = len(read_rows(held))
    with executors(held, pool) as tasks, Running(held) as running, writers(held):
        ended = running.ended(ask_resync(running))
        assert ended.state == "done", ended.result
    held.stream()
    assert tasks.chunks > SLOTS
    assert tasks.rows > ROWS // 2
    assert len(read_rows(held)) > before + ROWS // 2
    assert held.folded("t") == source_rows(held)
    (schema,) = held.log.schemas().values()
    assert schema.state is TableState.LIVE
    assert list((held.folder / "log" / CHUNKS).iterdir()) == []


def ask_resync(running: Running, rate: int | None = RATE) -> int:
    return running.ask(BackfillRequest(("public.t",), resync=True, rate=rate))


def resync(running: Running, rate: int | None = RATE) -> None:
    """Copy the table again, and wait until the log has all of it."""
    ended = running.ended(ask_resync(running, rate))
    assert ended.state == "done", ended.result
    running.caught_up()


RENAME = """
    DO $$ BEGIN
        LOCK TABLE t IN ACCESS EXCLUSIVE MODE;
        IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = 'v') THEN
            ALTER TABLE t RENAME v TO w;
        END IF;
    END $$
"""


def rename_and_lose_first_result(task: ChunkTask, access: ExecutorAccess) -> StagedChunk:
    """Rename a column after the window opened; and run the task again, as Spark does if an executor dies at its end."""
    run_sql(access.dsn, RENAME)
    stage_chunk(task, access)
    return stage_chunk(task, access)


def test_a_task_that_runs_twice_puts_its_rows_into_the_log_once_and_under_the_present_columns(
    held: Captured, pool: ProcessPoolExecutor
) -> None:
    before, expected = Counter(tuple(row["key"]) for row in read_rows(held)), source_rows(held)
    with executors(held, pool, rename_and_lose_first_result) as tasks, Running(held) as running:
        resync(running)
        lost_files = list((held.folder / "log" / CHUNKS).iterdir())
        assert len(lost_files) == tasks.chunks > SLOTS
        with ExecutorTasks(running.catalog, "held", held.folder / "log"):  # as the next copy begins
            assert list((held.folder / "log" / CHUNKS).iterdir()) == []
    assert Counter(tuple(row["key"]) for row in read_rows(held)) - before == before
    (schema,) = held.log.schemas().values()
    assert [column.name for column in schema.columns] == ["a", "b", "w", "long", "pad"]
    assert held.folded("t") == expected


def fail_later(task: ChunkTask, access: ExecutorAccess) -> StagedChunk:
    """An executor that reads only the first tasks. The next one is posted when the reader has got one of these."""
    for number in range(SLOTS):
        try:
            (Path(str(access.root)).parent / f"task {number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return stage_chunk(task, access)
    raise CopyExecutorFailed("no executor is left")


def test_the_reader_goes_on_alone_when_executors_fail(held: Captured, pool: ProcessPoolExecutor) -> None:
    failure = pytest.raises(CopyExecutorFailed, match="no executor is left")
    with Running(held) as running, failure, executors(held, pool, fail_later) as tasks:
        resync(running, RATE // 2)
    assert 0 < tasks.rows < ROWS
    assert held.folded("t") == source_rows(held)


def read_when_another_task_waits(task: ChunkTask, access: ExecutorAccess) -> StagedChunk:
    """An executor that does not begin before more tasks were posted than executors can run."""
    folder = Path(str(access.root)).parent
    with Catalog.open(f"sqlite:///{folder}/catalog.db") as catalog:
        until(
            lambda: (folder / "waited").exists() or len(catalog.commands.pending("held", TASK)) > SLOTS,
            "a task that waits",
        )
    (folder / "waited").touch()
    return stage_chunk(task, access)


def test_the_next_tasks_wait_in_the_catalog_while_executors_read(held: Captured, pool: ProcessPoolExecutor) -> None:
    with executors(held, pool, read_when_another_task_waits), Running(held) as running:
        resync(running, None)
    assert held.folded("t") == source_rows(held)


def copied_rows(running: Running, job: int) -> int:
    """Rows that are durable, as the catalog shows them."""
    command = running.catalog.commands.get(job)
    tables = {} if command is None or command.result is None else command.result["tables"]
    return sum(table["rows"] for table in tables.values())


@pytest.mark.slow  # the copy has to last until executors join it
def test_executors_may_join_a_copy_that_has_begun(held: Captured, pool: ProcessPoolExecutor) -> None:
    held.write(slot=held.slot, more="snapshot: {chunk_rows: 200}\n")
    with Running(held) as running:
        job = ask_resync(running, RATE // 8)
        running.until(lambda: copied_rows(running, job), "the first rows")
        with executors(held, pool) as tasks:
            assert running.ended(job).state == "done"
        running.caught_up()
    assert 0 < tasks.rows < ROWS
    assert held.folded("t") == source_rows(held)
