"""Transactions far larger than memory: exact, whole, in the order of the commits, and in bounded memory.

`logical_decoding_work_mem` is 64 kB, so that the server streams them while they run; the last tests also take them
whole at their commit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import numpy as np
import psycopg
import pytest

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.fixtures.forked import Forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import fresh_database, run_sql
from tests.fixtures.postgres_programs import needs_version

LARGE: Final = 150_000
SPOOLED: Final = 200_000
"""Rows that make three batches of a replay."""
KILLED: Final = -signal.SIGKILL
LIMIT: Final = 512 << 10
"""KiB that the whole process may take at its peak."""
_XID: Final = "SELECT pg_current_xact_id()::text::bigint % 4294967296"
_ROWS: Final = "INSERT INTO t SELECT i, i FROM generate_series(%s::bigint, %s) i"


@pytest.fixture(name="database")
def _database(postgres: EmbeddedPostgres) -> Iterator[str]:
    for dsn in fresh_database(postgres):
        configure(dsn, "logical_decoding_work_mem", "64kB")
        run_sql(dsn, "CREATE TABLE t (id bigint PRIMARY KEY, v text)", "CREATE TABLE s (id bigint PRIMARY KEY)")
        yield dsn


@pytest.fixture(name="pipeline")
def _pipeline(pipeline: Pipeline) -> Pipeline:
    pipeline.write(tables="public.*")
    return pipeline


def configure(dsn: str, name: str, value: str) -> None:
    """Set a parameter for the sessions that begin from now on."""
    database = psycopg.sql.Identifier(dsn.rpartition("/")[2])
    with connect(dsn) as conn:
        conn.execute(psycopg.sql.SQL("ALTER DATABASE {} SET {} = {}").format(database, psycopg.sql.SQL(name), value))


def copied(pipeline: Pipeline, failpoint: str | None = None) -> Forked:
    """A reader that has made the first copy."""
    reader = pipeline.reader(failpoint)
    pipeline.wait_for_copy()
    return reader


@contextmanager
def transaction(pipeline: Pipeline) -> Iterator[tuple[psycopg.Connection, int]]:
    """An open transaction and its xid; commits in the end."""
    with connect(pipeline.dsn, autocommit=False) as conn:
        yield conn, xid_of(conn)
        conn.commit()


def xid_of(conn: psycopg.Connection) -> int:
    found = conn.execute(_XID).fetchone()
    assert found is not None
    return int(found[0])


def small(pipeline: Pipeline, number: int) -> int:
    """A transaction of one row; gives its xid."""
    with transaction(pipeline) as (conn, xid):
        conn.execute("INSERT INTO s VALUES (%s)", [number])
    return xid


def streamed(pipeline: Pipeline) -> int:
    """Bytes that the slot's server process has sent of transactions that had not committed."""
    query = "SELECT stream_bytes FROM pg_stat_replication_slots WHERE slot_name = %s"
    with connect(pipeline.dsn) as conn:
        found = conn.execute(query, [f"cdc_{pipeline.name}"]).fetchone()
    return 0 if found is None else int(found[0])


def logged(pipeline: Pipeline) -> dict[int, np.ndarray]:
    """Keys of the rows by xid as the log has them, by their ordinals, each of which is there once."""
    log, found = LogReader(pipeline.log), dict[int, list[np.ndarray]]()
    for batch in log.rows(Position(0), log.durable or Position(0)):
        rows = batch.filter(batch["key"].is_valid())
        keys, xids = rows["key"].flatten().cast("int64").to_numpy(), rows["xid"].to_numpy()
        for xid in np.unique(xids).tolist():
            found.setdefault(xid, []).append(np.stack((rows["ordinal"].to_numpy(), keys))[:, xids == xid])
    whole = {xid: np.concatenate(parts, axis=1) for xid, parts in found.items()}
    assert all(len(np.unique(ordinals)) == len(ordinals) for ordinals, _ in whole.values())
    return {xid: keys[np.argsort(ordinals)] for xid, (ordinals, keys) in whole.items()}


def order_in_log(pipeline: Pipeline) -> list[int]:
    """Xids of all transactions with rows in the order of their positions, each once."""
    log, at = LogReader(pipeline.log), dict[int, int]()
    for batch in log.rows(Position(0), log.durable or Position(0)):
        rows = batch.filter(batch["key"].is_valid())
        positions, firsts = np.unique(rows["position"].to_numpy(), return_index=True)
        at |= {int(p): int(x) for p, x in zip(positions, rows["xid"].to_numpy()[firsts], strict=True)}
    return [at[position] for position in sorted(at)]


def assert_has(found: np.ndarray, expected: np.ndarray) -> None:
    """The same keys in the same order."""
    assert len(found) == len(expected)
    assert bool((found == expected).all())


def files_on_disk(pipeline: Pipeline) -> set[str]:
    return {str(file) for file in (pipeline.log / "changes").glob("segment=*/*.parquet")}


def files_in_log(pipeline: Pipeline) -> set[str]:
    return {file.path for file in LogReader(pipeline.log).every_file()}


class Watch:
    """A consumer that looks all the time; `seen` are the numbers of rows that it found in the log."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.seen: set[int] = set()
        self._log, self._stop = LogReader(pipeline.log), Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._log.refresh()
            self.seen.add(sum(file.rows for file in self._log.every_file()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_streamed_transaction_is_seen_whole_or_not_at_all_in_the_order_of_the_commits(pipeline: Pipeline) -> None:
    copied(pipeline)
    with Watch(pipeline) as consumer:
        with transaction(pipeline) as (conn, xid):
            conn.execute(_ROWS, [1, LARGE // 2])
            before = [small(pipeline, number) for number in range(20)]
            conn.execute(_ROWS, [LARGE // 2 + 1, LARGE])
            before += [small(pipeline, number) for number in range(20, 40)]
        after = [small(pipeline, number) for number in range(40, 60)]
        pipeline.settle()
    assert streamed(pipeline) > LARGE
    assert order_in_log(pipeline) == [*before, xid, *after]
    assert_has(logged(pipeline)[xid], np.arange(1, LARGE + 1))
    assert [rows for rows in consumer.seen if 200 < rows < LARGE] == []
    assert max(consumer.seen) > LARGE


@needs_version(16)
def test_savepoints_half_rolled_back_leave_exactly_the_rows_of_the_others(pipeline: Pipeline) -> None:
    configure(pipeline.dsn, "debug_logical_replication_streaming", "immediate")  # so that each rollback is told
    copied(pipeline)
    xid = with_savepoints(pipeline, 2_000)
    last = small(pipeline, 1)
    pipeline.settle()
    assert streamed(pipeline) > 0
    assert order_in_log(pipeline) == [xid, last]
    assert_has(logged(pipeline)[xid], np.arange(2, 2_001, 2))


def with_savepoints(pipeline: Pipeline, number: int) -> int:
    """A transaction of that many rows, each in a savepoint; every other one is rolled back. Gives its xid."""
    with transaction(pipeline) as (conn, xid):
        conn.execute(
            "DO $$ BEGIN FOR i IN 1..current_setting('test.number')::int LOOP BEGIN INSERT INTO t VALUES (i, 'v'); "
            "IF i % 2 = 1 THEN RAISE EXCEPTION 'back'; END IF; EXCEPTION WHEN raise_exception THEN NULL; END; "
            "END LOOP; END $$".replace("current_setting('test.number')::int", str(int(number))).encode()
        )
    return xid


def test_a_reader_killed_while_it_spools_and_while_it_replays_loses_and_doubles_nothing(pipeline: Pipeline) -> None:
    killed = copied(pipeline, "mid_spool:3")
    with transaction(pipeline) as (conn, xid):
        conn.execute(_ROWS, [1, SPOOLED])
        first = small(pipeline, 1)
        assert killed.wait(30) == KILLED
    assert pipeline.reader("mid_replay:3").wait(30) == KILLED
    last = small(pipeline, 2)
    assert xid not in logged(pipeline)

    pipeline.reader()
    pipeline.settle()
    assert order_in_log(pipeline) == [first, xid, last]
    assert_has(logged(pipeline)[xid], np.arange(1, SPOOLED + 1))
    assert files_on_disk(pipeline) == files_in_log(pipeline)


@pytest.mark.slow
def test_a_reader_stopped_while_it_spools_and_while_it_replays_ends_soon_and_leaves_no_part(pipeline: Pipeline) -> None:
    reader, rows = copied(pipeline), 60_000
    with transaction(pipeline) as (conn, xid):
        conn.execute("INSERT INTO t SELECT i, repeat('x', 2100) FROM generate_series(1, %s::int) i", [rows])
        pipeline.wait(lambda: streamed(pipeline) > rows * 10, "most of it sent")
        stops(reader)
    reader = pipeline.reader()
    pipeline.wait(lambda: files_on_disk(pipeline) > files_in_log(pipeline), "a staged file", every=0.0)
    reader.send_signal(signal.SIGSTOP)
    stops(reader)
    assert xid not in logged(pipeline)
    assert files_on_disk(pipeline) > files_in_log(pipeline)

    pipeline.reader()
    pipeline.settle()
    assert_has(logged(pipeline)[xid], np.arange(1, rows + 1))
    assert files_on_disk(pipeline) == files_in_log(pipeline)


def stops(reader: Forked) -> None:
    """It drains: in less time than after which it would end itself by force."""
    reader.send_signal(signal.SIGTERM)
    reader.send_signal(signal.SIGCONT)
    assert reader.wait(6) == 0


def peak(reader: Forked) -> int:
    """KiB that the process took at its highest."""
    lines = Path(f"/proc/{reader.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(pipeline: Pipeline, work: Callable[[], object]) -> str:
    """Do the work and wait until it is in the log; the reader's peak is asserted and told."""
    reader = copied(pipeline)
    began = time.monotonic()
    work()
    worked, marker = time.monotonic() - began, small(pipeline, 1)
    pipeline.wait(lambda: marker in last_xids(pipeline), "the marker", seconds=280.0, every=0.5)
    seconds, highest = time.monotonic() - began, peak(reader)
    told = f"{highest >> 10} MiB at the peak, {worked:.0f} s of SQL, in the log after {seconds:.0f} s"
    print(told)
    assert highest <= LIMIT, told
    return told


def last_xids(pipeline: Pipeline) -> list[int]:
    """Of the youngest file's rows, if they are few."""
    log = LogReader(pipeline.log)
    file = max(log.every_file(), key=lambda found: found.last)
    if file.rows > 10:
        return []
    return [xid for batch in log.rows(Position(file.first - 1), file.last) for xid in batch["xid"].to_pylist()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("work_mem", ["64kB", "16GB"], ids=["streamed", "whole"])
def test_ten_million_rows_in_one_transaction_take_bounded_memory(pipeline: Pipeline, work_mem: str) -> None:
    configure(pipeline.dsn, "logical_decoding_work_mem", work_mem)
    number = 10_000_000
    measured(pipeline, lambda: run_sql(pipeline.dsn, "INSERT INTO t SELECT i, i FROM generate_series(1, 10000000) i"))
    assert (streamed(pipeline) > 0) is (work_mem == "64kB")
    found = logged(pipeline)
    assert_has(max(found.values(), key=len), np.arange(1, number + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("streaming", "number"), [("buffered", 100_000), ("immediate", 20_000)])
def test_savepoints_by_the_ten_thousand_half_rolled_back_take_bounded_memory(
    pipeline: Pipeline, streaming: str, number: int
) -> None:
    # "immediate" tells every rollback, but makes each block cost the server a look at all subtransactions so far
    configure(pipeline.dsn, "debug_logical_replication_streaming", streaming)
    measured(pipeline, lambda: with_savepoints(pipeline, number))
    found = logged(pipeline)
    assert_has(max(found.values(), key=len), np.arange(2, number + 1, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wide_rows_with_both_images_in_two_tables_take_bounded_memory(pipeline: Pipeline) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE TABLE w (id bigint PRIMARY KEY, v text)",
        "ALTER TABLE w REPLICA IDENTITY FULL",
        "ALTER TABLE t REPLICA IDENTITY FULL",
    )

    def work() -> None:
        with transaction(pipeline) as (conn, _):
            conn.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 200000) i")
            conn.execute("INSERT INTO w SELECT * FROM t")
            conn.execute("WITH x AS (UPDATE t SET v = v || 'x' RETURNING id) UPDATE w SET v = v || 'x' FROM x "
                         "WHERE x.id = w.id")  # fmt: skip
            conn.execute("INSERT INTO w SELECT -i, repeat(md5(i::text), 250000) FROM generate_series(1, 20) i")

    measured(pipeline, work)
    assert max(len(keys) for keys in logged(pipeline).values()) == 800_020


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_interleaved_streamed_transactions_take_bounded_memory(pipeline: Pipeline) -> None:
    def work() -> None:
        open_ones = [connect(pipeline.dsn, autocommit=False) for _ in range(8)]
        for block in range(20):
            for place, conn in enumerate(open_ones):
                first = (place * 20 + block) * 10_000
                conn.execute(_ROWS, [first + 1, first + 10_000])
        for conn in open_ones:
            conn.commit()
            conn.close()

    measured(pipeline, work)
    found = sorted((keys for keys in logged(pipeline).values() if len(keys) > 1), key=lambda keys: int(keys[0]))
    assert len(found) == 8
    assert_has(np.concatenate(found), np.arange(1, 1_600_001))
