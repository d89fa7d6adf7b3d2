"""First copies in chunks beside the stream: exact under writers, whatever order the rows are read in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import psycopg
import pytest

from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.multiset import left_of
from tests.snapshot.reader_with_backfills import Running, read_rows

FEW, ROWS = 500, 4_000
CHUNKS = 27
"""Of the table, about."""


WRITES = """
CREATE PROCEDURE write(number int) LANGUAGE plpgsql AS $$
DECLARE
    line int;
    change text;
BEGIN
    LOOP
        number := number + 7;
        line := number * 31 % {rows};
        FOREACH change IN ARRAY ARRAY[
            format('UPDATE t SET v = %L WHERE id = %s', 'new ' || number, line),
            format('UPDATE t SET id = id + 100000 WHERE id = %s', (line + 1) % {rows}),
            format('UPDATE t SET id = id - 100000 WHERE id = %s', (line + 11) % {rows} + 100000),
            format('DELETE FROM t WHERE id = %s', (line + 2) % {rows}),
            format('INSERT INTO t VALUES (%s, ''again'', repeat(''y'', 3000))', number + 1000000)
        ] LOOP
            BEGIN
                EXECUTE change;
            EXCEPTION WHEN unique_violation OR deadlock_detected THEN
                NULL;
            END;
            COMMIT;
        END LOOP;
        PERFORM pg_sleep(0.04);
    END LOOP;
END $$
"""
"""Inside the server: writers in this process would take the interpreter from the reader that they are to press."""


@contextmanager
def written(dsn: str, rows: int) -> Iterator[None]:
    """Somebody changes the rows all the while: values beside an unsent one, keys, deletes, inserts."""
    run_sql(dsn, WRITES.replace("{rows}", str(rows)))
    with connect(dsn) as first, connect(dsn) as second, ThreadPoolExecutor(2) as writers:
        running = [writers.submit(conn.execute, f"CALL write({seed})") for seed, conn in enumerate((first, second))]
        try:
            yield
        finally:
            first.cancel_safe()
            second.cancel_safe()
            assert all(isinstance(written.exception(), psycopg.errors.QueryCanceled) for written in running)


@pytest.fixture(name="rows")
def _rows() -> int:
    return FEW


@pytest.fixture(name="large")
def _large(tmp_path: Path, either_database: str, rows: int) -> Captured:
    """A table with a value that no update sends, not copied yet, which counts as large; a block is few of its rows."""
    run_sql(
        either_database,
        "CREATE TABLE t (id int PRIMARY KEY, v text, long text) WITH (fillfactor = 20)",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        f"INSERT INTO t SELECT i, 'v' || i, repeat('x', 3000) || i FROM generate_series(1, {rows}) i",
    )
    held = Captured(tmp_path, either_database)
    with held.path.open("a") as definition:
        definition.write(f"snapshot: {{beside: 0, chunk_rows: {rows // CHUNKS}, parallel: 3}}\n")
    return held


def source_rows(held: Captured) -> list[tuple[str | None, ...]]:
    return sorted(tuple(row) for row in rows_of(held.dsn, "SELECT id::text, v, long FROM t"))


def copied(running: Running) -> None:
    """Wait until no table is being copied any more."""
    running.until(lambda: (found := running.catalog.commands.ls("held", BACKFILL)) and found[0].state != "pending")
    (command,) = running.catalog.commands.ls("held", BACKFILL)
    assert command.state == "done", command.result


@pytest.mark.parametrize("rows", [FEW, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_a_first_copy_beside_writers_ends_in_the_sources_state(large: Captured, rows: int) -> None:
    with written(large.dsn, rows), Running(large) as running:
        copied(running)
    with Running(large) as running:
        running.caught_up()
    assert large.folded("t") == source_rows(large)
    (schema,) = large.log.schemas().values()
    assert schema.state is TableState.LIVE
    assert len({row["position"] for row in read_rows(large)}) > 10
    ends = [row for batch in large.log.rows(Position(0), large.log.durable or Position(0)) for row in batch.to_pylist()]
    assert [row["op"] for row in ends].count(Operation.GENERATION.value) == 1


@pytest.mark.slow
def test_a_table_without_a_key_is_copied_again_while_it_is_written(tmp_path: Path, database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int, v text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 50, 'v' FROM generate_series(1, 500) i",
    )
    held = Captured(tmp_path, database)
    held.copy()
    done = Event()

    def write() -> None:
        with connect(database) as conn:
            for number in range(10_000):
                conn.execute("UPDATE t SET v = %s WHERE id = %s", [f"n{number}", number % 50])
                conn.execute("INSERT INTO t VALUES (%s, 'new')", [number % 50])
                if done.is_set():
                    return

    with Running(held) as running:
        writer = Thread(target=write)
        writer.start()
        try:
            for _ in range(3):
                ended = running.ended(running.ask(BackfillRequest(("public.t",), resync=True)))
                assert ended.state == "done", ended.result
        finally:
            done.set()
            writer.join()
        running.caught_up()
    rows = [row for batch in held.log.rows(Position(0), held.log.durable or Position(0)) for row in batch.to_pylist()]
    found = sorted(tuple(value for _, value in image) for image in left_of(rows))
    assert found == sorted(rows_of(database, "SELECT id::text, v FROM t"))


def test_a_reader_that_is_there_for_the_copy_alone_ends_when_it_is_done(large: Captured) -> None:
    text = large.path.read_text().replace("snapshot: {", "snapshot: {mode: initial_only, ")
    large.path.write_text(text)
    with Running(large) as running:
        running.until(lambda: not running.reads)
    assert large.folded("t") == source_rows(large)


def test_a_mode_says_what_is_copied(tmp_path: Path, database: str) -> None:
    """One pipeline that copies nothing, and one that copies when its log is new, of the same database."""
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
    copied: dict[str, Captured] = {}
    for mode in ("no_data", "when_needed"):
        (tmp_path / mode).mkdir()
        copied[mode] = Captured(tmp_path / mode, database, slot=f"s_{mode}_{database.rpartition('/')[2]}")
        with copied[mode].path.open("a") as definition:
            definition.write(f"snapshot: {{mode: {mode}}}\n")
        copied[mode].copy()
    run_sql(database, "INSERT INTO t VALUES (2, 'two')")
    for held in copied.values():
        held.stream()
    assert copied["no_data"].folded("t") == [("2", "two")]
    assert {schema.state for schema in copied["no_data"].log.schemas().values()} == {TableState.LIVE}
    assert copied["when_needed"].folded("t") == [("1", "one"), ("2", "two")]
