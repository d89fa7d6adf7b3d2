"""Executors of a local Spark session read the chunks of a first copy; what they cannot do has a code."""

from __future__ import annotations

import gc
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import Definition, load_definition
from cdc.config.source import Undecodable
from cdc.errors import CopyExecutorFailed, ExecutorPythonUnusable, StateConflict
from cdc.garbage import RARELY
from cdc.log.reader import LogReader
from cdc.snapshot.executor_chunks import CHUNKS, ExecutorAccess
from cdc.table import TableState
from pipelines.submitted.copy_chunks import CopyReport, EndOfCopies, _probe, check_executors, copy_by_executors
from pipelines.submitted.copy_chunks import _run as run_tasks
from tests.faults.capture import Captured
from tests.fixtures.catalog import put_catalog
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import Running

ROWS = 20_000


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """A table that is too large for the first commit of the log, which is not begun yet."""
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text, pad text)",
        f"INSERT INTO t SELECT i, 'v' || i, repeat('p', 100) FROM generate_series(1, {ROWS}) i",
    )
    held = Captured(tmp_path, database)
    held.write(slot=held.slot, more="snapshot: {beside: 64KiB, max_source_load: {bytes_per_second: 1MiB}}\n")
    held.copy()
    return held


def access_of(definition: Definition, dsn: str) -> ExecutorAccess:
    return ExecutorAccess(dsn, definition.log.root, definition.source.undecodable)


@pytest.mark.usefixtures("spark")
def test_executors_make_the_first_copy_of_a_table_that_changes_meanwhile(held: Captured) -> None:
    reports = list[CopyReport]()
    lines = list[str]()
    job = Thread(target=lambda: reports.append(copy_by_executors(held.definition, 2, lines.append)))
    job.start()
    while not lines and job.is_alive():
        job.join(0.1)
    with Running(held) as running:
        running.until((held.folder / "log" / CHUNKS).exists, "a chunk")
        run_sql(held.dsn, "UPDATE t SET v = 'new' WHERE id % 100 = 0", "DELETE FROM t WHERE id % 101 = 0")
        job.join()
        running.caught_up()
    (report,) = reports
    assert report.chunks > 2
    assert report.rows > ROWS // 2
    (schema,) = LogReader(held.folder / "log").schemas().values()
    assert schema.state is TableState.LIVE
    assert held.folded("t") == sorted(tuple(row) for row in rows_of(held.dsn, "SELECT id::text, v, pad FROM t"))


def test_an_executor_that_cannot_work_is_refused_before_the_reader_waits_for_it(
    held: Captured, spark: SparkSession
) -> None:
    definition = held.definition
    with pytest.raises(CopyExecutorFailed, match="cannot connect to the source") as refused:
        check_executors(spark, access_of(definition, "host=/nowhere dbname=none"), 2)
    assert refused.value.fix.startswith("install cdc with its dependencies on every machine")

    (held.folder / "log" / CHUNKS).write_text("no directory")
    with pytest.raises(CopyExecutorFailed, match="cannot write into"):
        check_executors(spark, access_of(definition, held.dsn), 1)


def without_dependency(_argument: Any) -> None:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_a_missing_dependency_of_an_executor_is_named(spark: SparkSession) -> None:
    with pytest.raises(ExecutorPythonUnusable, match="No module named 'no_such_package'"):
        run_tasks(spark, without_dependency, [1])


def test_a_job_for_which_no_reader_runs_ends_with_the_command_that_starts_one(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(
        "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1/none'}\ntables: [{match: 'shop.*'}]\n"
        f"log: {{path: '{tmp_path}/log'}}\n"
    )
    put_catalog(tmp_path)
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        end = EndOfCopies(catalog, load_definition(path), reader_within=0.0)
        with pytest.raises(StateConflict, match="no reader of pipeline 'shop' runs") as refused:
            until(end.is_reached, "the end of the job")
    assert refused.value.code == "CDC-1006"
    assert refused.value.fix.startswith("start the reader with 'cdc reader -c FILE'")


def threshold_after_probe(folder: Path) -> int:
    gc.callbacks.clear()  # of earlier tasks of this worker
    gc.set_threshold(700)
    _probe(ExecutorAccess("host=/nowhere dbname=none", folder, Undecodable.FAIL), 0)
    return gc.get_threshold()[0]


def test_an_executor_rarely_looks_for_garbage(spark: SparkSession, tmp_path: Path) -> None:
    assert run_tasks(spark, threshold_after_probe, [tmp_path]) == [RARELY]
