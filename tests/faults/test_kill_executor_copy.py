"""kill -9 of the reader while executors read the first copy: the next reader goes on, and the log is exact."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from cdc.config.source import Undecodable
from cdc.log.reader import LogReader
from cdc.snapshot.executor_chunks import ExecutorAccess
from cdc.table import TableState
from tests.faults.capture import fold
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.executors import executors, processes

ROWS = 6_000


@pytest.fixture(name="pool", scope="module")
def _pool() -> Iterator[ProcessPoolExecutor]:
    with processes() as pool:
        yield pool


@pytest.mark.parametrize(
    "failpoint",
    [
        "chunk_read:2",
        "after_data_file:4",
        pytest.param("chunk_read:1", marks=pytest.mark.slow),
        pytest.param("before_data_file:4", marks=pytest.mark.slow),
        pytest.param("after_log_commit:4", marks=pytest.mark.slow),
        pytest.param("chunk_durable:1", marks=pytest.mark.slow),
        pytest.param("chunk_durable:3", marks=pytest.mark.slow),
    ],
)
def test_a_reader_killed_while_executors_copy_is_continued_without_loss_or_repetition(
    pipeline: Pipeline, pool: ProcessPoolExecutor, failpoint: str
) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.t (id int PRIMARY KEY, v text) WITH (fillfactor = 10)",  # many blocks, so several chunks
        f"INSERT INTO shop.t SELECT i, 'v' || i || repeat('x', 100) FROM generate_series(1, {ROWS}) i",
    )
    pipeline.write()
    with pipeline.definition.open("a") as definition:
        definition.write("snapshot: {beside: 64KiB, max_source_load: {bytes_per_second: 400KiB}}\n")
    access = ExecutorAccess(pipeline.dsn, pipeline.log, Undecodable.FAIL)
    with executors(f"sqlite:///{pipeline.folder}/catalog.db", pipeline.name, access, pool) as tasks:
        killed = pipeline.reader(failpoint=failpoint)
        assert killed.wait(60) == -signal.SIGKILL
        run_sql(pipeline.dsn, "DELETE FROM shop.t WHERE id % 10 = 0", "UPDATE shop.t SET v = 'new' WHERE id % 7 = 0")
        pipeline.reader()
        pipeline.wait(lambda: is_live(pipeline), "the end of the copy")
    pipeline.settle()
    log = LogReader(pipeline.log)
    (relation,) = log.schemas()
    found = {(image[1], image[2]) for image in fold(log, relation)}
    assert found == set(rows_of(pipeline.dsn, "SELECT id::text, v FROM shop.t"))
    pipeline.changes_by_transaction()  # no ordinal is missing, and none is there twice
    assert tasks.rows > 0


def is_live(pipeline: Pipeline) -> bool:
    return all(schema.state is TableState.LIVE for schema in LogReader(pipeline.log).schemas().values())
