"""kill -9 of the reader anywhere in a copy beside writers: log and target end exact, and little is read again."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from threading import Event, Thread
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL
from cdc.snapshot.chunk_copier import CHUNKS_AHEAD
from cdc.table import TableState
from cdc.targets.lake_reader import read_target
from tests.cli.command import spawn
from tests.faults.capture import fold, rows_with
from tests.fixtures.forked import Forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.multiset import left_of
from tests.snapshot.test_keyless import more, writers

ROWS = 1_500
STILL = 4
"""Of so many rows one is never changed: what of those the log has twice was read again."""
STRIPES = 60
"""Of so many rows a statement changes one: some in every chunk, so that each window has something to say."""
CHUNK_ROWS, PARALLEL = 60, 3
PAUSE, RESTS = 0.02, 4
"""A writer pauses PAUSE seconds, or RESTS times the length of its last transaction: so it does not slow the copy."""
ABOUT = 1.25
"""By how much a chunk may have more rows: it is cut by blocks."""
COLUMNS = {"t": ("id", "v", "long"), "emptied": ("id", "v")}
SLOWLY = 1_500_000
"""Bytes of text per second, so that no machine is through before it is killed."""
POINTS = [
    "chunk_read:1",
    "chunk_read:9",
    "chunk_durable:1",
    "chunk_durable:12",
    "after_data_file:4",
    "after_log_commit:1",
    "after_log_commit:5",
    "before_confirm:20",
    "after_confirm:20",
    "after_receive:12",
    "before_data_file:3",
    "after_copy_staged",
]
QUICK = {"chunk_durable:12"}
BESIDE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(13)]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))]


@pytest.fixture(name="copied")
def _copied(pipeline: Pipeline) -> Pipeline:
    """A table of long values that updates do not send, and one of a few wide ones, to be copied in chunks."""
    run_sql(
        pipeline.dsn,
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.t (id int PRIMARY KEY, v text, long text)",
        "ALTER TABLE shop.t ALTER long SET STORAGE EXTERNAL",
        f"INSERT INTO shop.t SELECT i, 'v' || i, repeat('x', 2500) || i FROM generate_series(1, {ROWS}) i",
        "CREATE TABLE shop.emptied (id int PRIMARY KEY, v text)",
        "INSERT INTO shop.emptied SELECT i, repeat('v', 500) FROM generate_series(1, 300) i",
    )
    pipeline.write()
    load = f"{{bytes_per_second: {SLOWLY}}}"
    with pipeline.definition.open("a") as definition:
        definition.write(
            f"snapshot: {{beside: 0, chunk_rows: {CHUNK_ROWS}, parallel: {PARALLEL}, max_source_load: {load}}}\n"
        )
    return pipeline


@contextmanager
def written(dsn: str, seed: int) -> Iterator[None]:
    """Somebody changes what is copied: values beside an unsent one, keys, deletes, inserts, a truncate."""
    done, random = Event(), Random(seed)

    def write(conn: Any, number: int) -> None:
        row = random.randrange(ROWS // STILL) * STILL + random.randrange(1, STILL)
        some: list[tuple[Any, ...]] = [
            (f"UPDATE shop.t SET v = %s WHERE id %% {STRIPES} = %s", f"new {number}", row % STRIPES),
            (f"UPDATE shop.t SET id = id + 100000 WHERE id < 100000 AND id %% {STRIPES} = %s", row % STRIPES),
            (f"UPDATE shop.t SET id = id - 100000 WHERE id > 100000 AND id %% {STRIPES} = %s", row % STRIPES),
            ("UPDATE shop.t SET id = id + 100000, long = 'short' WHERE id = %s", row),
            ("DELETE FROM shop.t WHERE id = %s", row),
            ("INSERT INTO shop.t VALUES (%s, 'again', repeat('y', 3000))", row),
            ("UPDATE shop.emptied SET v = 'n' WHERE id = %s", row),
            ("INSERT INTO shop.emptied VALUES (%s, 'new')", number + 1000),
        ]
        with conn.transaction():
            for statement, *values in random.sample(some, 3):
                conn.execute(statement, values)
            if number == 20:
                conn.execute("TRUNCATE shop.emptied")

    def run() -> None:
        number = 0
        with connect(dsn) as conn:
            while not done.is_set():
                number, began = number + 1, time.monotonic()
                with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                    write(conn, number)
                done.wait(max(PAUSE, RESTS * (time.monotonic() - began)))

    writer = Thread(target=run)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def work_of(pipeline: Pipeline) -> dict[str, Any] | None:
    """The first copy's command: its state, and how far it is."""
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        found = catalog.commands.ls(pipeline.name, BACKFILL)
    assert len(found) <= 1, found
    return {**(found[0].result or {}), "state": found[0].state} if found else None


def rows_so_far(pipeline: Pipeline) -> int:
    work = work_of(pipeline) if (pipeline.folder / "catalog.db").exists() else None
    return sum(table["rows"] for table in (work or {}).get("tables", {}).values())


def finish(pipeline: Pipeline) -> None:
    """Let a new reader end the copy, at full speed."""
    text = pipeline.definition.read_text().replace(f"bytes_per_second: {SLOWLY}", "bytes_per_second: 1GiB")
    pipeline.definition.write_text(text)
    pipeline.reader()
    pipeline.wait(lambda: (work := work_of(pipeline)) and work["state"] != "pending", "the end of the copy")
    work = work_of(pipeline)
    assert work is not None
    assert work["state"] == "done", work


def exact(pipeline: Pipeline, killed: int) -> None:
    """The log tells the source's rows, each table is live and ended once, and no more was read again than may be."""
    log = LogReader(pipeline.log)
    for schema in log.schemas().values():
        assert schema.state is TableState.LIVE
        told = sorted(tuple(image.get(c.id) for c in schema.columns) for image in fold(log, schema.relation))
        columns = ", ".join(f"{c.name}::text" for c in schema.columns)
        truth = sorted(rows_of(pipeline.dsn, f"SELECT {columns} FROM shop.{schema.name}"))  # type: ignore[arg-type]
        assert told == truth, schema.topic
    rows = rows_with(log, pc.field("op").isin([Operation.READ.value, Operation.GENERATION.value]), "op", "topic", "key")
    ends = Counter(row["topic"] for row in rows if row["op"] == Operation.GENERATION.value)
    assert ends == {"shop.t": 1, "shop.emptied": 1}
    read = Counter(row["key"][0] for row in rows if (row["op"], row["topic"]) == (Operation.READ.value, "shop.t"))
    again = sum(read[str(row)] - 1 for row in range(STILL, ROWS + 1, STILL))
    assert 0 <= again <= killed * (CHUNKS_AHEAD + PARALLEL) * CHUNK_ROWS * ABOUT / STILL


@pytest.mark.parametrize("point", [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow) for p in POINTS])
def test_a_reader_killed_at_a_point_of_a_first_copy_ends_it_exactly(copied: Pipeline, point: str) -> None:
    with written(copied.dsn, 0):
        killed = copied.reader(failpoint=point)
        assert killed.wait(120) == -signal.SIGKILL, copied.output()
        finish(copied)
    copied.settle()
    exact(copied, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_killed_at_a_random_moment_of_a_first_copy_ends_it_exactly(copied: Pipeline, seed: int) -> None:
    random = Random(seed)
    with written(copied.dsn, seed):
        for share in sorted(random.random() for _ in range(2)):
            reader = copied.reader()
            rows = share * ROWS * 0.8
            until(lambda rows=rows: rows_so_far(copied) > rows, "some of the copy", every=random.random() / 20)  # type: ignore[misc]
            reader.kill()
            reader.wait()
        finish(copied)
    copied.settle()
    exact(copied, 2)


def with_lake(pipeline: Pipeline) -> Pipeline:
    """The same with a Delta target."""
    lake = f"[{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]"
    pipeline.definition.write_text(pipeline.definition.read_text().replace("sinks: []", f"sinks: {lake}"))
    return pipeline


def in_lake(pipeline: Pipeline, table: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    rows = pa.table(read_target(f"{pipeline.folder}/lake/shop/{table}")).select(list(columns)).to_pylist()
    return sorted(tuple(str(value) for value in row.values()) for row in rows)


@pytest.mark.parametrize("seed", BESIDE)
def test_a_target_beside_a_first_copy_ends_exact_whoever_is_killed(copied: Pipeline, seed: int) -> None:
    """The reader twice, once before there is a target; and together with it, for every second seed, the driver."""
    random, pipeline = Random(seed), with_lake(copied)
    with written(pipeline.dsn, seed):
        kill_after(pipeline, pipeline.reader(), random.uniform(0, 0.2))
        driver = pipeline.apply()
        pipeline.wait(lambda: pipeline.reports(driver), "the driver")
        kill_after(pipeline, pipeline.reader(), random.uniform(0.3, 0.8))
        if seed % 2:
            driver.kill()
            driver.wait()
            driver = pipeline.apply()
        finish(pipeline)
    pipeline.wait(lambda: pipeline.reports(driver), "the driver")
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
    for table, columns in COLUMNS.items():
        truth = sorted(rows_of(pipeline.dsn, f"SELECT {', '.join(f'{c}::text' for c in columns)} FROM shop.{table}"))  # type: ignore[arg-type]
        assert in_lake(pipeline, table, columns) == truth, table
    exact(pipeline, 2)


def kill_after(pipeline: Pipeline, reader: Forked, share: float) -> None:
    """Once it has copied so much of all rows."""
    until(lambda: rows_so_far(pipeline) > share * ROWS, "some of the copy")
    reader.kill()
    reader.wait()


@pytest.mark.slow
def test_a_reader_killed_with_a_table_without_a_key_in_hand_begins_it_anew_once(pipeline: Pipeline) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE TABLE t (a int, long text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 50, nullif(repeat('x', i % 3), '') FROM generate_series(1, 2000) i",
    )
    pipeline.write(tables="public.*")
    first = pipeline.reader()
    pipeline.wait_for_copy()
    first.terminate()
    assert first.wait(60) == 0
    with writers(pipeline.dsn) as counts:
        killed = pipeline.reader(failpoint="chunk_read:1")
        source = {"CDC_TEST_DSN": pipeline.dsn}
        asked = spawn("tables", "resync", "public.t", "-c", pipeline.definition, environment=source)
        assert asked.status == 0, asked.errors
        assert killed.wait(120) == -signal.SIGKILL, pipeline.output()
        more(counts)
        finish(pipeline)
    pipeline.settle()
    log = LogReader(pipeline.log)
    rows = [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]
    told = sorted((tuple(value for _, value in image) for image in left_of(rows)), key=repr)
    assert told == sorted(rows_of(pipeline.dsn, "SELECT a::text, long FROM t"), key=repr)
    begun = Counter(row["op"] for row in rows if row["op"] in {Operation.TRUNCATE.value, Operation.GENERATION.value})
    assert begun == {Operation.TRUNCATE.value: 1, Operation.GENERATION.value: 2}
