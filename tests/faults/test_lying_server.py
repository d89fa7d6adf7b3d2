"""A server that lies about places in its WAL: nothing is committed or confirmed behind what it has, no row is lost.

The lies are a proxy's: it changes the LSNs, times, flags and lengths in the frames of the replication stream. Each lie
is found, and is an error with its code, or it changes nothing; once the proxy repeats the truth the log equals the
source, every row once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cdc.errors import CdcError, ContradictoryLsn, PositionBeyondWal
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import slot_status
from tests.faults.capture import Captured
from tests.faults.proxy import Proxy
from tests.faults.stream_rewriter import FAR, Frame, Liar, Script, StreamRewriter, kind_of, lsn_at, with_lsn
from tests.fixtures.postgres import drop_when_free, fresh_database, rows_of, run_sql

STREAMED = "?options=-c%20logical_decoding_work_mem%3D64kB"
"""The server sends transactions of more than so much while they run."""
SERVERS = ("postgres", pytest.param("postgres_15", marks=pytest.mark.slow))


@pytest.fixture(name="server", params=SERVERS)
def _server(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    server: EmbeddedPostgres = request.getfixturevalue(request.param)
    return server


@pytest.fixture(name="proxy")
def _proxy(server: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(name="database")
def _database(server: EmbeddedPostgres) -> Iterator[str]:
    """On the server itself, without the proxy."""
    yield from fresh_database(server)


@pytest.fixture(name="held")
def _held(proxy: Proxy, database: str, tmp_path: Path) -> Iterator[Captured]:
    """A table, which is captured through the proxy."""
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE busy (v text)")
    held = Captured(tmp_path, proxy.dsn(database) + STREAMED, tables="public.t", slot=database.rpartition("/")[2])
    held.copy()
    yield held
    with connect(database) as conn:
        drop_when_free(conn, held.slot)


def lie(proxy: Proxy, script: Script | None) -> None:
    """Have the connections from now on say what the script makes of the truth; None is the truth."""
    proxy.rewriter = partial(StreamRewriter, script) if script else None


def assert_within(held: Captured, database: str) -> Position:
    """The log is not ahead of the server's WAL, and the reader confirmed no more than the log holds; its position."""
    with connect(database) as conn:
        slot = slot_status(conn, held.slot)
    durable = held.log.durable  # read after the slot: the log only grows
    with connect(database) as conn:
        found = conn.execute("SELECT pg_current_wal_lsn()::text").fetchone()
    assert slot is not None
    assert durable is not None
    assert found is not None
    assert durable.lsn < Lsn.parse(found[0])
    assert (slot.confirmed_flush or 0) <= durable.lsn + 1
    return durable


def assert_equal(held: Captured, database: str) -> None:
    """The log holds every insert of the source once."""
    inserted = [row["after"][0][1] for row in held.rows() if row["op"] == "c"]
    assert sorted(inserted, key=int) == [str(i) for (i,) in rows_of(database, "SELECT id FROM t ORDER BY id")]
    assert held.folded("t") == sorted((str(i), v) for i, v in rows_of(database, "SELECT id, v FROM t"))


def test_a_keepalive_with_a_false_wal_end_moves_nothing(held: Captured, proxy: Proxy, database: str) -> None:
    keepalives = []

    def script(frame: Frame) -> Frame:
        if frame[:1] != b"k":
            return frame
        keepalives.append(frame)
        return with_lsn(frame, 1, FAR)[:-1] + b"\1"  # and it asks for a reply

    lie(proxy, script)
    with held.reading() as reading:
        for number in range(8):
            run_sql(database, "INSERT INTO busy VALUES ('x')")
            asked = len(keepalives)
            reading.until(lambda asked=asked: len(keepalives) > asked, "a keepalive")  # type: ignore[misc]
            with connect(database) as conn:
                conn.execute("INSERT INTO t VALUES (%s, 'true')", [number])
            assert_within(held, database)
        reading.caught_up()
    assert_within(held, database)
    assert_equal(held, database)


def far_commits(frame: Frame) -> Frame:
    """Every commit at a place that the server has not reached, in all fields alike."""
    places = {b"B": (26,), b"C": (1, 9, 27, 35), b"c": (1, 9, 31, 39)}.get(kind_of(frame), ())
    for place in places:
        frame = with_lsn(frame, place, lsn_at(frame, place) + 2**40)
    return frame


def lone_commits(frame: Frame) -> Frame:
    """Every commit a little later than its begin said."""
    return with_lsn(frame, 27, lsn_at(frame, 27) + 8) if kind_of(frame) == b"C" else frame


@pytest.fixture(name="lied_to")
def _lied_to(held: Captured, proxy: Proxy, database: str) -> tuple[Captured, Proxy, str]:
    return held, proxy, database


@pytest.mark.parametrize(
    ("script", "rows", "error"),
    [(far_commits, 3, PositionBeyondWal), (far_commits, 3000, PositionBeyondWal), (lone_commits, 3, ContradictoryLsn)],
)
def test_a_false_commit_is_an_error_with_its_code_and_the_log_stays_as_it_was(
    lied_to: tuple[Captured, Proxy, str], script: Script, rows: int, error: type[CdcError]
) -> None:
    """3,000 rows are streamed while their transaction runs, and end with a message of another kind."""
    held, proxy, database = lied_to
    before = assert_within(held, database)
    with connect(database) as conn:
        conn.execute("INSERT INTO t SELECT i, repeat('x', 99) FROM generate_series(1, %s) i", [rows])
    lie(proxy, script)
    with pytest.raises(error), held.reading() as reading:
        reading.until(lambda: False, "the lie found")
    assert assert_within(held, database) == before
    lie(proxy, None)
    held.stream()
    assert_equal(held, database)


def test_a_streamed_transaction_that_came_under_too_low_an_lsn_is_not_there_twice(
    held: Captured, proxy: Proxy, database: str
) -> None:
    """Nothing repeats the LSN of its commit, so the lie is not found; and what was confirmed is too low as well."""
    lie(proxy, lambda frame: with_lsn(frame, 31, lsn_at(frame, 31) - 8) if kind_of(frame) == b"c" else frame)
    with held.reading() as reading:
        with connect(database) as conn:
            conn.execute("INSERT INTO t SELECT i, repeat('x', 99) FROM generate_series(1, 3000) i")
        reading.until(lambda: len(held.folded("t")) == 3000, "the transaction in the log")
    lie(proxy, None)
    held.stream()
    assert_equal(held, database)


class Writing:
    """Transactions of every kind that the protocol has a message for."""

    def __init__(self, dsn: str) -> None:
        self._conn = connect(dsn, application_name="cdc test")
        self._next = 0

    def write(self) -> None:
        """A few plain transactions, messages inside and outside of them, and a large one that is streamed."""
        for rows in (1, 4, 700):
            with self._conn.transaction():
                self._insert(rows)
                self._conn.execute("SELECT pg_logical_emit_message(true, 'cdc.test', 'inside')")
                with self._conn.transaction(force_rollback=True):
                    self._conn.execute("INSERT INTO t SELECT -i, 'taken back' FROM generate_series(1, %s) i", [rows])
            self._conn.execute("SELECT pg_logical_emit_message(false, 'cdc.test', 'outside')")
            self._conn.execute("INSERT INTO busy VALUES ('x')")

    def _insert(self, rows: int) -> None:
        first, self._next = self._next, self._next + rows
        query = "INSERT INTO t SELECT i, repeat('x', 150) FROM generate_series(%s::int, %s::int) i"
        self._conn.execute(query, [first, self._next - 1])

    def close(self) -> None:
        """End the session."""
        self._conn.close()


@pytest.mark.parametrize("lies", [30, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_random_lies_lose_and_double_nothing_and_move_nothing_behind_what_the_source_has(
    held: Captured, proxy: Proxy, database: str, lies: int
) -> None:
    liar, found, writing, caught_up = Liar(seed=lies), Counter[str](), Writing(database), True
    lie(proxy, liar)
    while liar.changed.total() < lies or not found[ContradictoryLsn.code]:
        if caught_up:  # else what is to be read only grows, and with it what is lied about
            writing.write()
        caught_up = False
        try:
            with held.reading() as reading:
                reading.caught_up()
                caught_up = True
        except CdcError as error:
            found[error.code] += 1
        assert_within(held, database)
    lie(proxy, None)
    writing.close()
    held.stream()
    assert_equal(held, database)
    print(f"changed {liar.changed.total()} frames: {dict(liar.changed)}; errors: {dict(found)}")
