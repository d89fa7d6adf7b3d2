"""Backfills of a real server through a real reader: exact under load, resumable, and for one sink if asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread, local
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
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableSchema, TableState
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import Running, read_rows

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'"
"""A worker of autovacuum may wait too."""
ROWS = 600
PARALLEL = 2
CLOCKS = 1.05
"""The server's clock and the reader's need not run alike."""
READS = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'COPY%generate_series%'"


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """A table of two key columns and a long one, copied whole: no copy of it is requested when the reader starts."""
    run_sql(
        database,
        'CREATE TABLE t (a int, b text COLLATE "C", v text, long text, PRIMARY KEY (a, b)) WITH (fillfactor = 50)',
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i / 10, 'k' || i % 10, 'v' || i, repeat('x', 3000) || i FROM generate_series(1, 600) i",
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
                a = number * 7 % 60
                conn.execute("UPDATE t SET v = %s WHERE a = %s", [f"new {number}", a])
                conn.execute("DELETE FROM t WHERE a = %s AND b = 'k3'", [a])
                conn.execute("INSERT INTO t VALUES (%s, 'k3', 'again', repeat('y', 3000))", [a])
                conn.execute("UPDATE t SET b = b || 'm' WHERE a = %s AND b = 'k5'", [a])

    writer = Thread(target=write)
    writer.start()
    try:
        ended = running.ended(running.ask(BackfillRequest(("public.t",))))
        assert ended.state == "done", ended.result
    finally:
        done.set()
        writer.join()
    running.caught_up()
    assert len(read_rows(held)) > before + ROWS // 2
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


LAKE = "sinks: [{{name: lake, type: delta, path: '{}/lake/{{schema}}/{{table}}'}}]\n"
LIMITED = f"current_setting('statement_timeout') = '{READ_WITHIN / 3600:g}h'"
ASKED = [
    (BackfillRequest(("public.t",), first=("7", "k0"), last=("8", "k9")), 20),
    (BackfillRequest(("public.t",), where="a = 5 AND b > 'k4'"), 5),
    (BackfillRequest(("public.t",), last=("0", "k4"), sink="lake"), 4),
    (BackfillRequest(("public.t",), where="false"), 0),
    (BackfillRequest(("public.t",), where=LIMITED), ROWS),
]
"""Requests with their number of rows; LIMITED shows that reading by a predicate has a statement timeout."""


def test_just_the_rows_that_are_asked_for_are_read_and_for_one_sink_they_carry_its_name(held: Captured) -> None:
    with held.path.open("a") as definition:
        definition.write(LAKE.format(held.folder))
    with Running(held) as running:
        jobs = [running.ask(asked) for asked, _ in ASKED]
        for job, (asked, expected) in zip(jobs, ASKED, strict=True):
            ended = running.ended(job)
            assert ended.state == "done", ended.result
            assert ended.result is not None
            assert ended.result["tables"]["public.t"]["rows"] == expected, asked
    again = read_rows(held)[ROWS:]
    assert len(again) == sum(expected for _, expected in ASKED)
    assert [row["address"] for row in again] == [None] * 25 + ["lake"] * 4 + [None] * ROWS


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
    "rows of a range": (BackfillRequest(("public.t",), last=("29", "k9"), rate=500), "{}", 500.0),
    "rows of a table": (BackfillRequest(("public.t",), rate=1_000), "{}", 1_000.0),
    "bytes of a range": (BackfillRequest(("public.t",), last=("29", "k9")), "{bytes_per_second: 1500000}", 500.0),
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


def test_backfills_are_paused_resumed_and_cancelled_and_none_may_write_to_the_source(running: Running) -> None:
    """A function that is declared to read and writes is stopped by the reading; an endless one ends when cancelled."""
    held, commands = running.held, running.catalog.commands
    run_sql(
        held.dsn,
        "CREATE SEQUENCE s",
        "CREATE FUNCTION only_reads(int) RETURNS bool STABLE LANGUAGE sql RETURN setval('s', 7 + $1) > 0",
    )
    job = running.ask(BackfillRequest(("public.t",), rate=2_000))
    commands.post("held", BackfillAction.PAUSE.kind, {"id": job})
    running.until(lambda: running.state(job) in {"paused", "done"})
    commands.post("held", BackfillAction.RESUME.kind, {"id": job})
    writes = running.ask(BackfillRequest(("public.t",), where="only_reads(a)"))
    endless = running.ask(BackfillRequest(("public.t",), where=ENDLESS))
    assert running.ended(job).state == "done"

    ended = running.ended(writes)
    assert ended.result is not None
    assert (ended.state, ended.result["error"]["code"]) == ("failed", ConfigError.code)
    assert (
        "the condition calls a function that is declared STABLE or IMMUTABLE but writes"
        in ended.result["error"]["message"]
    )
    assert rows_of(held.dsn, "SELECT last_value, is_called FROM s") == [(1, False)]

    running.until(lambda: rows_of(held.dsn, READS) == [(1,)], "the reading")
    commands.post("held", BackfillAction.CANCEL.kind, {"id": endless})
    ended = running.ended(endless)
    assert ended.result is not None
    assert ended.result["state"] == "cancelled"
    assert rows_of(held.dsn, READS) == [(0,)]
    assert held.folded("t") == source_rows(held)


def test_a_reader_that_starts_again_reads_the_rows_behind_the_recorded_key_and_leaves_what_is_paused(
    held: Captured,
) -> None:
    with Catalog.open(held.definition.catalog.url) as catalog:
        job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",), first=("0", "k0")).to_json())
        work = {"tables": {"public.t": {"state": "snapshotting", "after": ["59", "k8"], "rows": 7}}}
        catalog.commands.record(job, work)
        other = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",)).to_json())
        catalog.commands.record(other, {"state": "paused", "tables": {}})
    before = len(read_rows(held))
    with Running(held) as running:
        ended = running.ended(job)
        assert ended.result is not None
        assert ended.result["tables"]["public.t"]["rows"] == 7 + 2
        assert [row["key"] for row in read_rows(held)[before:]] == [["59", "k9"], ["60", "k0"]]
        look = running.catalog.commands.post("held", CHECK_TABLES, {})
        assert running.ended(look).state == "done"
        assert running.state(other) == "paused"
        for kind in (BackfillAction.RESUME.kind, BackfillAction.PAUSE.kind, BackfillAction.RESUME.kind):
            running.catalog.commands.post("held", kind, {"id": other})
        assert running.ended(other).state == "done"


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


@pytest.mark.slow
def test_a_reader_that_stops_does_not_wait_for_such_a_predicate(held: Captured) -> None:
    with Running(held) as running:
        running.ask(BackfillRequest(("public.t",), where=ENDLESS))
        running.until(lambda: rows_of(held.dsn, READS) == [(1,)], "the reading")
    assert rows_of(held.dsn, READS) == [(0,)]
