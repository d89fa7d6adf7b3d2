"""A table without a key is copied again while others write to it: the log is the table, row for equal row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import Event, Thread
from types import TracebackType
from typing import Any, LiteralString, Self
from uuid import uuid4

import pyarrow as pa
import pytest

from cdc import metrics
from cdc.log_row import LOG_SCHEMA, WATERMARK_PREFIX
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.chunk_queries import snapshot_transaction
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_table
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.visibility import Visibility
from cdc.snapshot.missing_base_rows import unconfirmed_xids
from cdc.snapshot.watermark_window import Chunk, PlacedRows
from cdc.table import TableSchema
from tests.faults.capture import Captured, Reading
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION
from tests.fixtures.waiting import until
from tests.snapshot.multiset import left_of

Hook = Callable[[], object]
PATIENCE = 30.0
ANY_ROW: LiteralString = (
    "ctid = (SELECT ctid FROM t ORDER BY md5(ctid::text || %(salt)s) LIMIT 1 FOR UPDATE SKIP LOCKED)"
)
STATEMENTS: list[LiteralString] = [
    "INSERT INTO t VALUES (%(a)s, %(long)s), (%(a)s, %(long)s)",
    f"UPDATE t SET a = %(a)s WHERE {ANY_ROW}",
    f"UPDATE t SET long = %(long)s WHERE {ANY_ROW}",
    f"DELETE FROM t WHERE {ANY_ROW}",
]


def nothing() -> None:
    """No hook."""


class Recopying(Reading):
    """A reader, and a connection that copies the table again while the reader runs."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._conn = connect(self.held.dsn)
        self._wait_for(self.windows.track_xids(on=True))
        self.windows.add_unconfirmed_xids(unconfirmed_xids(self._conn, self.held.folder / "log"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conn.close()
        super().__exit__(kind, error, trace)

    def recopy(
        self, *, before: Hook = nothing, under: Hook = nothing, after: Hook = nothing, **said: Any
    ) -> PlacedRows:
        """Copy the table again; hooks: in the window before the snapshot, under it, and when the rows are in hand."""
        (schema,) = self.held.log.schemas().values()
        while True:
            token = uuid4().hex
            self.windows.open_window(token, schema.relation, PATIENCE, keyless=True)
            before()
            rows, visibility = self._everything(token, schema, under)
            if rows is not None:
                after()
                self.windows.set_chunk(
                    token, Chunk(schema.relation, schema.topic, rows, schema, "here", visibility=visibility, **said)
                )
                emit_message(self._conn, WATERMARK_PREFIX, token)
                placed = self.windows.wait_for_outcome(token, PATIENCE)
                if not placed.must_read_again:
                    return placed

    def _everything(self, token: str, schema: TableSchema, under: Hook) -> tuple[pa.Table | None, Visibility]:
        with snapshot_transaction(self._conn, schema) as visibility:
            if not self.windows.sees_all(token, visibility):
                return None, visibility
            under()
            decoder = CopyDecoder(schema, position=Position(0), xid=0, committed_at=0, first_ordinal=0)
            lines = copy_table(self._conn, schema)
            return pa.Table.from_batches([b for part in lines if (b := decoder.feed(part))], LOG_SCHEMA), visibility

    def _wait_for(self, position: Position) -> None:
        held = lambda: self.figures.value(metrics.LOG_POSITION, "held") or 0.0  # noqa: E731
        self.until(lambda: held() >= max(1, position), "what was received in the log")


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return captured(tmp_path, database)


def captured(folder: Path, dsn: str) -> Captured:
    """A table with equal rows, copied."""
    run_sql(
        dsn,
        "CREATE TABLE t (a int, long text)",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 50, nullif(repeat('x', i % 3 * 1500), '') FROM generate_series(1, 500) i",
    )
    held = Captured(folder, dsn)
    held.copy()
    return held


@pytest.fixture(name="recopying")
def _recopying(held: Captured) -> Iterator[Recopying]:
    with Recopying(held) as recopying:
        yield recopying


def in_log(held: Captured) -> list[tuple[str | None, ...]]:
    return sorted((tuple(value for _, value in image) for image in left_of(held.rows())), key=repr)


def in_source(held: Captured) -> list[tuple[str | None, ...]]:
    return sorted(rows_of(held.dsn, "SELECT a::text, long FROM t"), key=repr)


def test_what_vanished_unseen_vanishes_from_the_log(recopying: Recopying) -> None:
    held = recopying.held
    run_sql(
        held.dsn,
        "ALTER PUBLICATION cdc_held_pub SET (publish = 'insert')",
        "DELETE FROM t WHERE a < 20",
        "ALTER PUBLICATION cdc_held_pub SET (publish = 'insert, update, delete, truncate')",
    )
    recopying.caught_up()
    assert in_log(held) != in_source(held)
    assert recopying.recopy().rows == len(in_source(held))
    recopying.caught_up()
    assert in_log(held) == in_source(held)


def test_a_transaction_counts_once_wherever_it_stands_to_the_snapshot(recopying: Recopying) -> None:
    """Seen in the window; open under the snapshot, with sub-transactions; begun and ended under it, and after it."""
    held = recopying.held
    delete: LiteralString = "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a = 7)"
    with connect(held.dsn) as conn, conn.transaction():
        with conn.transaction():
            conn.execute("UPDATE t SET a = a + 100 WHERE a = 3")
        with conn.transaction(force_rollback=True):
            conn.execute("INSERT INTO t VALUES (1, 'rolled back')")
        conn.execute("INSERT INTO t SELECT 5, NULL FROM generate_series(1, 3)")
        placed = recopying.recopy(
            before=lambda: run_sql(held.dsn, "INSERT INTO t SELECT 6, 'twice' FROM generate_series(1, 2)", delete),
            under=lambda: run_sql(held.dsn, delete, "UPDATE t SET a = 8 WHERE a = 9"),
            after=lambda: all([conn.execute("COMMIT"), conn.execute("BEGIN"), run_sql(held.dsn, delete)]),  # type: ignore[func-returns-value]
        )
    run_sql(held.dsn, "DELETE FROM t WHERE a = 8", delete)
    recopying.caught_up()
    placed_rows = [row for row in held.rows() if row["position"] == placed.position]
    ops = [row["op"] for row in sorted(placed_rows, key=lambda row: row["ordinal"])]
    again = ["d", *["u"] * 10, *["u"] * 10, *["c"] * 3, "d"]
    assert ops == ["s", "t", *["r"] * 501, *again, "g"]
    assert in_log(held) == in_source(held)


def test_a_prepared_transaction_counts_when_it_is_committed(tmp_path: Path) -> None:
    prepare: LiteralString = "BEGIN; UPDATE t SET a = 100 WHERE a = 3; SAVEPOINT s; DELETE FROM t WHERE a = 4; "
    with EmbeddedPostgres(
        tmp_path / "server", version=MAIN_VERSION, settings={"max_prepared_transactions": "4"}, tcp=True
    ) as server:
        held = captured(tmp_path, server.dsn())
        with Recopying(held) as recopying, connect(held.dsn) as conn:
            conn.execute(prepare + "PREPARE TRANSACTION 'one'")
            placed = recopying.recopy(after=lambda: run_sql(held.dsn, "COMMIT PREPARED 'one'"))
            assert placed.rows == 500
            recopying.caught_up()
            assert in_log(held) == in_source(held)


def test_a_truncate_in_the_window_has_the_table_read_again(recopying: Recopying) -> None:
    """It gives the table another file, which a version of its schema tells of."""
    held, tries = recopying.held, list[None]()

    def empty_once() -> None:
        tries.append(None)
        if len(tries) == 1:
            run_sql(held.dsn, "TRUNCATE t", "INSERT INTO t VALUES (3, 'three')")

    assert recopying.recopy(after=empty_once).rows == 1
    assert len(tries) == 2
    recopying.caught_up()
    assert in_log(held) == in_source(held) == [("3", "three")]


def test_with_writers_it_is_the_table_each_time(recopying: Recopying) -> None:
    held = recopying.held
    with writers(held.dsn) as counts:
        for _ in range(2):
            recopying.recopy(before=partial(more, counts), after=partial(more, counts))
    recopying.caught_up()
    assert in_log(held) == in_source(held)


@contextmanager
def writers(dsn: str) -> Iterator[list[int]]:
    """Three of them, and how many transactions each has committed."""
    done, counts = Event(), [0, 0, 0]
    threads = [Thread(target=write, args=(dsn, done, Random(n), counts, n)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        done.set()
        for thread in threads:
            thread.join()


def more(counts: list[int]) -> None:
    """Wait for ten more."""
    before = sum(counts)
    until(lambda: sum(counts) >= before + 10, "writers")


def write(dsn: str, done: Event, random: Random, counts: list[int], place: int) -> None:
    """Transactions over a few values, so that many rows are equal."""
    with connect(dsn) as conn:
        while not done.wait(0.02):
            with conn.transaction():
                for _ in range(random.randint(1, 4)):
                    long = random.choice(["x", "y" * 3000, None])
                    said = {"a": random.randint(1, 4), "long": long, "salt": str(random.random())}
                    with conn.transaction(force_rollback=random.random() < 0.2):
                        conn.execute(random.choice(STATEMENTS), said)
            counts[place] += 1
