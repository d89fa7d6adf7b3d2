"""A part of the tests of capture, copies and faults, on the versions of Postgres that a run downloads.

CDC_TEST_POSTGRES runs all of them on one version.
"""

from __future__ import annotations

from pathlib import Path
from typing import LiteralString

import pytest

from cdc.capture.startup_checks import find_problems
from cdc.snapshot.backfill_documents import BackfillRequest
from cdc.table import TableState
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import Running

SCHEMA: tuple[LiteralString, ...] = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TABLE t (id int PRIMARY KEY, v text, m mood, n numeric, large text)",
    "ALTER TABLE t ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO t SELECT i, 'old', 'ok', i / 7.0, repeat('x', 3000) FROM generate_series(1, 600) i",
    "CREATE TABLE full_images (id int PRIMARY KEY, n int)",
    "ALTER TABLE full_images REPLICA IDENTITY FULL",
    "INSERT INTO full_images SELECT i, i % 3 FROM generate_series(1, 30) i",
    "CREATE TABLE p (id int, r int, v text, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2) PARTITION BY LIST (r)",
    "CREATE TABLE p2a PARTITION OF p2 DEFAULT",
    "INSERT INTO p SELECT i, 1 + i % 2, 'old' FROM generate_series(1, 20) i",
)
CHANGES: tuple[LiteralString, ...] = (
    "UPDATE t SET v = 'unsent beside it' WHERE id % 5 = 0",
    "UPDATE t SET id = id + 10000 WHERE id % 7 = 0",
    "DELETE FROM t WHERE id % 11 = 0",
    "INSERT INTO t SELECT i, 'streamed', 'sad', i, 'y' FROM generate_series(20000, 23000) i",
    "BEGIN; INSERT INTO t VALUES (5000, 'kept'); SAVEPOINT s; UPDATE t SET v = 'rolled back'; ROLLBACK TO s; COMMIT",
    "DELETE FROM full_images WHERE n = 1",
    "UPDATE p SET r = 3 - r, v = 'moved' WHERE id < 5",
    "INSERT INTO p2a VALUES (77, 2, 'by its leaf')",
)
DEFINITION_CHANGES: tuple[tuple[LiteralString, ...], ...] = (
    ("ALTER TABLE t ADD COLUMN late int", "UPDATE t SET late = 8 WHERE id % 13 = 0"),
    ("ALTER TABLE t RENAME COLUMN v TO w", "UPDATE t SET w = 'renamed' WHERE id % 17 = 0"),
    (
        "ALTER TABLE t DROP COLUMN n",
        "ALTER TYPE mood ADD VALUE 'fine'",
        "UPDATE t SET m = 'fine' WHERE id % 19 = 0",
        "CREATE TABLE p3 (LIKE p INCLUDING ALL)",
        "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES IN (3)",
        "INSERT INTO p VALUES (90, 3, 'new leaf')",
        "TRUNCATE full_images",
        "INSERT INTO full_images VALUES (1, 1)",
    ),
)
"""Each part is captured before the next one, so that every column is identified."""
QUERIES: dict[str, LiteralString] = {
    "t": "SELECT id::text, w, m::text, large, late::text FROM t",
    "full_images": "SELECT id::text, n::text FROM full_images",
    "p": "SELECT id::text, r::text, v FROM p",
}
EARLIER: dict[str, LiteralString] = {**QUERIES, "t": "SELECT id::text, v, m::text, n::text, large FROM t"}


@pytest.fixture(name="held")
def _held(tmp_path: Path, further_database: str) -> Captured:
    """A pipeline whose source streams large transactions before they commit; nothing is copied yet."""
    run_sql(further_database, *SCHEMA)
    options = "?options=-c%20logical_decoding_work_mem%3D64kB"
    return Captured(tmp_path, further_database + options, slot=further_database.rpartition("/")[2])


def check_equal(held: Captured, queries: dict[str, LiteralString]) -> None:
    """Check that the log has the rows of the source, and no table is marked."""
    assert {schema.name: schema.state for schema in held.log.schemas().values()} == dict.fromkeys(
        queries, TableState.LIVE
    )
    for table, query in queries.items():
        expected = sorted(rows_of(held.dsn, query), key=repr)
        assert sorted(held.folded(table), key=repr) == expected, table


def test_rows_changes_and_new_definitions_are_captured(held: Captured) -> None:
    assert [problem for problem in find_problems(held.definition) if problem.fatal] == []
    held.copy()
    check_equal(held, EARLIER)
    run_sql(held.dsn, *CHANGES)
    held.stream()
    check_equal(held, EARLIER)
    for changes in DEFINITION_CHANGES:
        run_sql(held.dsn, *changes)
        held.stream()
    check_equal(held, QUERIES)


def test_a_table_is_copied_in_chunks_while_it_changes(held: Captured) -> None:
    with held.path.open("a") as definition:
        definition.write("snapshot: {beside: 0, chunk_rows: 100}\n")
    held.copy()
    with Running(held) as running:
        run_sql(held.dsn, *CHANGES)
        running.until(lambda: {s.state for s in held.log.schemas().values()} == {TableState.LIVE}, "the first copy")
        run_sql(held.dsn, "SET session_replication_role = replica", "DELETE FROM t WHERE id < 50")
        assert running.ended(running.ask(BackfillRequest(("public.t",), resync=True))).state == "done"
        running.caught_up()
    check_equal(held, EARLIER)


def test_a_killed_reader_and_a_killed_walsender_lose_nothing(held: Captured) -> None:
    held.copy()
    with ReaderProcess(held) as reader:
        run_sql(held.dsn, CHANGES[0])
        until(lambda: rows_of(held.dsn, SENDERS), reader.output)
        assert rows_of(held.dsn, TERMINATE) == [(True,)]
        run_sql(held.dsn, *CHANGES[1:4])
        end = held.wal_end()
        until(lambda: held.holds(end), reader.output)
        run_sql(held.dsn, *CHANGES[4:])
        reader.child.kill()
    held.stream()
    check_equal(held, EARLIER)


SENDERS: LiteralString = """
    SELECT active_pid FROM pg_replication_slots WHERE database = current_database() AND active AND NOT temporary
"""
TERMINATE: LiteralString = f"SELECT pg_terminate_backend(active_pid) FROM ({SENDERS}) AS senders"
