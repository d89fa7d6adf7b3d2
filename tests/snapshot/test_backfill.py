"""Backfills of a real server through a real reader: exact under load, resumable, and for one sink if asked."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Thread, get_native_id, local
from typing import Any

import pyarrow.compute as pc
import pytest

from cdc.catalog import Catalog
from cdc.errors import ConfigError
from cdc.log.reader import LogReader
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.backfill_selection import READ_WITHIN
from cdc.postgres.connection import connect
from cdc.snapshot.backfill import NICE_INCREMENT, lower_thread_priority
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest, check_request
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableSchema, TableState
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import Running, read_rows

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'"
"""A worker of autovacuum may wait too."""
ROWS = 1_200
PARALLEL = 2
CLOCKS = 1.05
"""The server's clock and the reader's need not run alike."""
READS = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'COPY%generate_series%'"


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """A table of two key columns and a long one, copied whole: no copy of it is requested when the reader starts."""
    run_sql(
        database,
        'CREATE TABLE t (a int, b text COLLATE "C", v text, long text, PRIMARY KEY (a, b))',
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i / 10, 'k' || i % 10, 'v' || i, repeat('x', 3000) || i FROM generate_series(1, 1200) i",
    )
    held = Captured(tmp_path, database)
    held.write(slot=held.slot, more="snapshot: {beside: 64MiB}\n")
    held.copy()
    assert [schema.state for schema in held.log.schemas().values()] == [TableState.LIVE]
    held.write(slot=held.slot)
    return held


@pytest.fixture(name="running")
def _running(held: Captured) -> Iterator[Running]:
    with Running(held) as running:
        yield running


def source_rows(held: Captured) -> list[tuple[str | None, ...]]:
    found = rows_of(held.dsn, "SELECT a::text, b, v, long FROM t")
    return sorted(tuple(row) for row in found)


def test_a_backfill_beside_writers_leaves_the_log_in_the_sources_state(running: Running) -> None:
    held, done = running.held, Event()
    before = len(read_rows(held))

    def write() -> None:
        number = 0
        with connect(held.dsn) as conn:
            while not done.wait(0.02):
                number += 1
                a = number * 7 % 120
                conn.execute("UPDATE t SET v = %s WHERE a = %s", [f"new {number}", a])
                conn.execute("DELETE FROM t WHERE a = %s AND b = 'k3'", [a])
                conn.execute("INSERT INTO t VALUES (%s, 'k3', 'again', repeat('y', 3000))", [a])
                conn.execute("UPDATE t SET b = b || 'm' WHERE a = %s AND b = 'k5'", [a])

    writer = Thread(target=write)
    writer.start()
    try:
        for _ in range(2):
            ended = running.ended(running.ask(BackfillRequest(("public.t",))))
            assert ended.state == "done", ended.result
    finally:
        done.set()
        writer.join()
    running.caught_up()
    assert len(read_rows(held)) > before + ROWS
    assert held.folded("t") == source_rows(held)


def test_a_resync_takes_away_what_vanished_unseen_and_the_mark(running: Running) -> None:
    held = running.held
    run_sql(
        held.dsn,
        "SET session_replication_role = replica; ALTER PUBLICATION cdc_held_pub SET (publish = 'insert')",
        "DELETE FROM t WHERE a < 20",
        "ALTER PUBLICATION cdc_held_pub SET (publish = 'insert, update, delete, truncate')",
    )
    running.caught_up()
    assert held.folded("t") != source_rows(held)
    ended = running.ended(running.ask(BackfillRequest(("public.*",), resync=True)))
    assert ended.state == "done", ended.result
    running.caught_up()
    assert held.folded("t") == source_rows(held)
    (schema,) = held.log.schemas().values()
    assert schema.state is TableState.LIVE


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (BackfillRequest(("public.t",), first=("7", "k0"), last=("8", "k9")), 20),
        (BackfillRequest(("public.t",), where="a = 5 AND b > 'k4'"), 5),
        pytest.param(BackfillRequest(("public.t",), last=("0", "k4")), 4, marks=pytest.mark.slow),
        pytest.param(BackfillRequest(("public.t",), where="false"), 0, marks=pytest.mark.slow),
    ],
)
def test_a_range_and_a_predicate_read_just_those_rows(running: Running, asked: BackfillRequest, expected: int) -> None:
    before = len(read_rows(running.held))
    ended = running.ended(running.ask(asked))
    assert ended.state == "done", ended.result
    assert len(read_rows(running.held)) == before + expected
    assert ended.result is not None
    assert ended.result["tables"]["public.t"]["rows"] == expected


@pytest.mark.slow
def test_the_largest_table_is_read_first_a_partitioned_one_by_its_leaves(tmp_path: Path, database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE a_small (id int PRIMARY KEY)",
        "CREATE TABLE b_middle (id int PRIMARY KEY, v text)",
        "CREATE TABLE c_large (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE c_1 PARTITION OF c_large FOR VALUES FROM (0) TO (900)",
        "CREATE TABLE c_2 PARTITION OF c_large FOR VALUES FROM (900) TO (9000)",
        "INSERT INTO a_small SELECT i FROM generate_series(1, 2000) i",
        "INSERT INTO b_middle SELECT i, repeat('v', 1000) FROM generate_series(1, 1000) i",
        "INSERT INTO c_large SELECT i, repeat('v', 1000) FROM generate_series(1, 1800) i",
    )
    held = Captured(tmp_path, database)
    before = held.copy()
    with Running(held) as running:
        assert running.ended(running.ask(BackfillRequest(("public.*",)))).state == "done"
    again = [row["topic"] for row in read_rows(held) if row["position"] > before]
    assert list(dict.fromkeys(again)) == ["public.c_large", "public.b_middle", "public.a_small"]


RATES = {
    "rows of a range": (BackfillRequest(("public.t",), last=("59", "k9"), rate=500), "{}", 500.0),
    "rows of a table": (BackfillRequest(("public.t",), rate=1_000), "{}", 1_000.0),
    "bytes of a range": (BackfillRequest(("public.t",), last=("59", "k9")), "{bytes_per_second: 1500000}", 500.0),
    "bytes of a table": (BackfillRequest(("public.t",)), "{bytes_per_second: 3000000}", 1_000.0),
}


@pytest.mark.parametrize(
    "limit", [pytest.param(limit, marks=() if limit == "rows of a table" else pytest.mark.slow) for limit in RATES]
)
def test_no_more_is_read_than_a_limit_allows(held: Captured, limit: str) -> None:
    """By the server's clock: each chunk is stamped when its watermark commits. A row has 3,000 bytes and some more."""
    asked, load, rate = RATES[limit]
    with held.path.open("a") as definition:
        definition.write(f"snapshot: {{chunk_rows: 40, parallel: {PARALLEL}, max_source_load: {load}}}\n")
    with Running(held) as running:
        running.until(lambda: {s.state for s in held.log.schemas().values()} == {TableState.LIVE}, "the first copy")
        before = len(read_rows(held))
        assert running.ended(running.ask(asked)).state == "done"
    chunks = Counter(row["committed_at"] for row in read_rows(held)[before:])
    assert len(chunks) > 5
    began, so_far = min(chunks), 0
    for moment in sorted(chunks):
        # each other connection has one chunk more on its way than it has rested for
        rested = so_far - (PARALLEL - 1) * max(chunks.values())
        assert rested <= rate * CLOCKS * (moment - began).total_seconds()
        so_far += chunks[moment]


def test_rows_for_one_sink_carry_its_name(held: Captured) -> None:
    more = f"sinks: [{{name: lake, type: delta, path: '{held.folder}/lake/{{schema}}/{{table}}'}}]\n"
    with held.path.open("a") as definition:
        definition.write(more)
    with Running(held) as running:
        assert running.ended(running.ask(BackfillRequest(("public.t",), last=("0", "k9"), sink="lake"))).state == "done"
        assert {row["address"] for row in read_rows(held)[-9:]} == {"lake"}


def test_a_paused_backfill_rests_a_cancelled_one_ends_and_both_keep_what_was_placed(running: Running) -> None:
    commands = running.catalog.commands
    job = running.ask(BackfillRequest(("public.t",), rate=2_000))
    commands.post("held", BackfillAction.PAUSE.kind, {"id": job})
    running.until(lambda: running.state(job) in {"paused", "done"})
    commands.post("held", BackfillAction.RESUME.kind, {"id": job})
    assert running.ended(job).state == "done"
    other = running.ask(BackfillRequest(("public.t",)))
    commands.post("held", BackfillAction.CANCEL.kind, {"id": other})
    assert running.ended(other).state in {"failed", "done"}
    assert running.held.folded("t") == source_rows(running.held)


def test_progress_is_gone_on_from(held: Captured) -> None:
    """The rows behind the recorded key are read, and no others."""
    with Catalog.open(held.definition.catalog.url) as catalog:
        job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",), first=("0", "k0")).to_json())
        work = {"tables": {"public.t": {"state": "snapshotting", "after": ["119", "k8"], "rows": 7}}}
        catalog.commands.record(job, work)
    before = len(read_rows(held))
    with Running(held) as running:
        ended = running.ended(job)
    assert ended.result is not None
    assert ended.result["tables"]["public.t"]["rows"] == 7 + 2
    assert [row["key"] for row in read_rows(held)[before:]] == [["119", "k9"], ["120", "k0"]]


def test_a_paused_backfill_stays_so_when_the_reader_starts_again(held: Captured) -> None:
    with Catalog.open(held.definition.catalog.url) as catalog:
        job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",)).to_json())
        catalog.commands.record(job, {"state": "paused", "tables": {}})
    with Running(held) as running:
        look = running.catalog.commands.post("held", CHECK_TABLES, {})
        assert running.ended(look).state == "done"
        assert running.state(job) == "paused"
        for kind in (BackfillAction.RESUME.kind, BackfillAction.PAUSE.kind, BackfillAction.RESUME.kind):
            running.catalog.commands.post("held", kind, {"id": job})
        assert running.ended(job).state == "done"


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_transaction_that_waits_for_a_standby_holds_nothing_up_and_is_not_lost(
    held: Captured, restarted: bool
) -> None:
    """It is in the stream and in no snapshot: chunks wait for it, watermarks and heartbeats do not."""
    run_sql(held.dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    stuck = Thread(target=_update_quietly, args=(held.dsn,))
    try:
        with Running(held) as running:
            stuck.start()
            running.until(lambda: rows_of(held.dsn, WAITING) == [(1,)])
            running.until(lambda: any(row["key"] == ["1", "k1"] for row in _updates(held)))
            if not restarted:
                waits(running)
        if restarted:  # what the process of before had noted is gone
            with Running(held) as running:
                waits(running)
    finally:
        run_sql(held.dsn, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        stuck.join()
    with Running(held) as running:
        running.until(lambda: running.catalog.commands.ls("held", BACKFILL)[0].state == "done")
        running.caught_up()
    assert held.folded("t") == source_rows(held)


def test_a_session_that_ends_as_a_backfill_begins_does_not_fail_it(held: Captured) -> None:
    with Running(held, SessionsThatEndSoon()) as running:
        assert running.ended(running.ask(BackfillRequest(("public.t",)))).state == "done"


class SessionsThatEndSoon(WatermarkWindows):
    """Windows whose every third question for the schemas, by the same thread, comes after the session's end."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = local()

    def schemas(self) -> list[TableSchema]:
        """The known schemas, or none."""
        self._asked.count = getattr(self._asked, "count", 0) + 1
        return [] if self._asked.count % 3 == 0 else super().schemas()


def test_behind_a_standby_that_does_not_answer_heartbeats_and_watermarks_come_through(held: Captured) -> None:
    held.write(slot=held.slot, more="  heartbeat: 300ms\n")
    run_sql(held.dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    stuck = Thread(target=_update_quietly, args=(held.dsn,))
    try:
        stuck.start()
        until(lambda: rows_of(held.dsn, WAITING) == [(1,)], "somebody who waits for the standby")
        run_sql(held.dsn, "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        stuck.join()
        with ReaderProcess(held) as reader, Catalog.open(held.definition.catalog.url) as catalog:
            for _ in range(3):
                before = held.log.durable or Position(0)
                until(partial(_moves_without_waiting, held, before), reader.output)
            job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",)).to_json())
            until(
                lambda: _moves_without_waiting(held, Position(0)) and catalog.commands.get(job).state == "done",  # type: ignore[union-attr]
                reader.output,
            )
    finally:
        run_sql(held.dsn, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        stuck.join()


def _moves_without_waiting(held: Captured, before: Position) -> bool:
    """Whether the log got on; fails if one of our sessions waits for the standby."""
    assert rows_of(held.dsn, WAITING) == [(0,)]
    return (held.log.durable or Position(0)) > before


def waits(running: Running) -> None:
    """A backfill of the row that the transaction changed does not read it."""
    job = running.ask(BackfillRequest(("public.t",), first=("1", "k1"), last=("1", "k1")))
    running.until(lambda: running.state(job) in {"snapshotting", "done"})
    Event().wait(0.5)  # time enough to be wrong in
    assert running.state(job) == "snapshotting"


def _update_quietly(dsn: str) -> None:
    with connect(dsn) as conn:
        conn.execute("UPDATE t SET v = 'stuck' WHERE a = 1 AND b = 'k1'")


def _updates(held: Captured) -> list[dict[str, Any]]:
    log: LogReader = held.log
    batches = log.rows(Position(0), log.durable or Position(0))
    return [row for batch in batches for row in batch.filter(pc.field("op") == Operation.UPDATE.value).to_pylist()]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (BackfillRequest(("public.nothing",)), "no table of the log matches"),
        (BackfillRequest(("public.t",), sink="elsewhere"), "the definition has no sink called 'elsewhere'"),
        (BackfillRequest(("public.t",), first=("1",)), r"the key of table 'public.t' has the columns \(a, b\): got 1"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(held: Captured, request_: BackfillRequest, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_request(request_, held.log.schemas(), {})


ENDLESS = "EXISTS (SELECT FROM generate_series(1, 1000000) x, generate_series(1, 1000000) y WHERE x + y < 0)"


@pytest.mark.slow
def test_a_predicate_that_writes_or_does_not_parse_is_refused_by_the_reader_too(running: Running) -> None:
    """What is asked here comes to the reader unseen, as a signal does."""
    held = running.held
    run_sql(held.dsn, "CREATE SEQUENCE s")
    for predicate in ("no_such = 1", "setval('s', 7) > 0", "1 = 1) OR (", "'"):
        ended = running.ended(running.ask(BackfillRequest(("public.t",), where=predicate)))
        assert ended.state == "failed"
        assert ended.result is not None
        assert (ended.result["error"]["code"], ended.result["tables"]) == (ConfigError.code, {})
    assert rows_of(held.dsn, "SELECT last_value, is_called FROM s") == [(1, False)]


def test_a_function_that_is_declared_to_read_and_writes_is_stopped_by_the_reading(running: Running) -> None:
    held = running.held
    run_sql(
        held.dsn,
        "CREATE SEQUENCE s",
        "CREATE FUNCTION only_reads(int) RETURNS bool STABLE LANGUAGE sql RETURN setval('s', 7 + $1) > 0",
    )
    ended = running.ended(running.ask(BackfillRequest(("public.t",), where="only_reads(a)")))
    assert ended.result is not None
    assert (ended.state, ended.result["error"]["code"]) == ("failed", ConfigError.code)
    assert (
        "the condition calls a function that is declared STABLE or IMMUTABLE but writes"
        in ended.result["error"]["message"]
    )
    assert rows_of(held.dsn, "SELECT last_value, is_called FROM s") == [(1, False)]


def test_reading_by_a_predicate_is_bounded(running: Running) -> None:
    asked = BackfillRequest(("public.t",), where=f"current_setting('statement_timeout') = '{READ_WITHIN / 3600:g}h'")
    ended = running.ended(running.ask(asked))
    assert ended.result is not None
    assert (ended.state, ended.result["tables"]["public.t"]["rows"]) == ("done", ROWS)


def test_a_cancelled_backfill_ends_although_its_predicate_never_does(running: Running) -> None:
    job = running.ask(BackfillRequest(("public.t",), where=ENDLESS))
    running.until(lambda: rows_of(running.held.dsn, READS) == [(1,)], "the reading")
    running.catalog.commands.post("held", BackfillAction.CANCEL.kind, {"id": job})
    ended = running.ended(job)
    assert ended.result is not None
    assert ended.result["state"] == "cancelled"
    assert rows_of(running.held.dsn, READS) == [(0,)]


@pytest.mark.slow
def test_a_reader_that_stops_does_not_wait_for_such_a_predicate(held: Captured) -> None:
    with Running(held) as running:
        running.ask(BackfillRequest(("public.t",), where=ENDLESS))
        running.until(lambda: rows_of(held.dsn, READS) == [(1,)], "the reading")
    assert rows_of(held.dsn, READS) == [(0,)]


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="a priority is the process' there")
def test_a_thread_gives_way_to_the_others_of_its_process():
    before = nice()
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
        assert pool.submit(nice).result() == min(19, before + NICE_INCREMENT)
    assert nice() == before
