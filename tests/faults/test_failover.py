"""Promotions on real servers: where the log continues, which tables are read again, which server is refused."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import LiteralString

import pyarrow.compute as pc
import pytest

from cdc.capture.startup_checks import check_log
from cdc.catalog import Catalog
from cdc.errors import (
    FormerPrimary,
    SourceCloned,
    SourceForked,
    SourceGap,
    SourceInRecovery,
    TransactionsLost,
)
from cdc.failpoint import VARIABLE
from cdc.log_row import Operation
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import TargetState
from pipelines.sinks.delta.settings import Writer
from tests.cli.command import spawn
from tests.faults.capture import ReaderProcess, rows_with
from tests.faults.captured_cluster import (
    SLOT,
    TABLES,
    CapturedCluster,
    captured_cluster,
    refused,
    synced_standby,
)
from tests.faults.driven_lake import drive, lake_in
from tests.fixtures.postgres import drop_when_free, rows_of, run_sql
from tests.fixtures.replicated_postgres import OFTEN, Cluster, ClusterMember, dsn_of_all
from tests.fixtures.waiting import until

CONTINUES_WITHIN = 5.0
"""Seconds between the promotion and the first new row in the log."""
ROWS, CHUNK = 5000, 250
SLOW_COPY = f"snapshot: {{parallel: 1, chunk_rows: {CHUNK}, max_source_load: {{bytes_per_second: 1MiB}}}}\n"
"""Copying `t` takes two or three seconds."""
MAKE_SLOT: LiteralString = "SELECT pg_create_logical_replication_slot('cdc_shop', 'pgoutput')"
SNAPSHOT: LiteralString = "SELECT pg_log_standby_snapshot()"
STREAMED: LiteralString = "SELECT FROM pg_stat_replication_slots WHERE stream_txns > 0"


@pytest.fixture(name="held")
def _held(tmp_path: Path, servers: Cluster) -> CapturedCluster:
    return captured_cluster(tmp_path, servers)


@pytest.fixture(name="standby")
def _standby(servers: Cluster, held: CapturedCluster) -> ClusterMember:
    return synced_standby(servers, held)


def test_a_clean_switch_over_and_the_way_back_continue_the_epoch(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    first = servers.primary
    run_sql(first.dsn(), "INSERT INTO t VALUES (2, 'while the reader is down')")
    first.stop()  # sends everything to the standby
    standby.promote()
    held.point_at(standby)
    check_log(held.definition)
    run_sql(standby.dsn(), "UPDATE t SET v = 'new' WHERE id = 1")
    held.stream()
    second = held.last
    assert (second.timeline, second.last.epoch) == (2, 0)
    assert held.is_source(standby)

    first.follow(standby)
    first.start()
    with connect(first.dsn()) as conn:  # a slot of its own prevents that the one of its primary is synchronized
        drop_when_free(conn, SLOT)
    with held.reading() as reading:
        reading.caught_up()
        first.sync_slots(SLOT)
    standby.stop()
    first.promote()
    held.point_at(first)
    run_sql(first.dsn(), "INSERT INTO u VALUES (1)")
    held.stream()
    assert (held.last.timeline, held.last.last.epoch) == (3, 0)
    assert held.last.switch_point > second.switch_point > 0
    assert held.is_source(first)
    assert held.copies() == {"t": 1, "u": 1, "w": 1}


def reads(held: CapturedCluster) -> int:
    """How many rows of `t` the log has from copies."""
    copied = (pc.field("op") == Operation.READ.value) & (pc.field("topic") == "public.t")
    return len(rows_with(held.log, copied, "op"))


LOST: tuple[LiteralString, ...] = (
    "INSERT INTO t VALUES (7, 'lost')",
    "UPDATE t SET v = 'lost' WHERE id = 1",
    "INSERT INTO u SELECT generate_series(1, 3)",
)


def lose_transactions(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember, lost: tuple[LiteralString, ...] = LOST
) -> None:
    """The log gets transactions that the standby does not get, and the standby is promoted."""
    standby.stop()
    primary = servers.primary.dsn()
    with held.reading() as reading:
        run_sql(primary, *lost)
        reading.caught_up()
    servers.primary.stop("immediate")
    standby.start()
    standby.promote()
    held.point_at(standby)


@pytest.mark.parametrize("policy", ["resync", "continue"])
def test_lost_transactions_have_their_tables_read_again_and_no_other(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember, policy: str
) -> None:
    lose_transactions(servers, held, standby)
    before, copied = held.last, reads(held)
    held.point_at(servers.primary, standby, more=f"  on_failover: {policy}\n  heartbeat: 0\n")
    run_sql(standby.dsn(), "INSERT INTO t VALUES (8, 'kept')", "INSERT INTO w VALUES (2, 'kept')")
    with ReaderProcess(held) as reader:
        if policy == "continue":
            until(lambda: held.folded("w") == [("1", "before"), ("2", "kept")], reader.output)
            assert held.states() == {"t": "needs_resync", "u": "needs_resync", "w": "live"}
            return
        until(lambda: held.last.last.epoch == 1 and held.is_complete(standby), reader.output)
    assert held.copies() == {"t": 1, "u": 1, "w": 1}
    assert reads(held) == copied + 1  # of the lost keys 1 and 7, one has a row
    assert before.last.epoch == 0
    assert (held.last.timeline, held.last.switch_point > 0) == (2, True)
    assert "the promoted server does not have the last transactions" in reader.output()


@pytest.mark.parametrize("loses", [False, True])
def test_two_promotions_while_no_reader_runs_are_one_walk_through_the_history(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember, loses: bool
) -> None:
    third = servers.standby("third")
    with held.reading() as reading:
        reading.caught_up()
        third.sync_slots(SLOT)
    for member in (standby, third):
        member.catch_up()
        member.stop()
    if loses:
        with held.reading() as reading:
            run_sql(servers.primary.dsn(), "INSERT INTO u VALUES (9)")
            reading.caught_up()
    servers.primary.stop("immediate")
    standby.start()
    standby.promote()
    run_sql(standby.dsn(), "INSERT INTO t VALUES (2, 'on timeline 2')")
    third.follow(standby)
    third.start()
    third.catch_up()
    standby.stop()
    third.promote()
    run_sql(third.dsn(), "INSERT INTO w VALUES (3, 'on timeline 3')")
    held.point_at(third, more="  heartbeat: 0\n")
    with ReaderProcess(held) as reader:
        until(lambda: held.is_complete(third), reader.output)
    assert (held.last.timeline, held.last.last.epoch) == (3, loses)
    assert held.copies() == {"t": 1, "u": 1, "w": 1}


def test_a_sink_shows_no_lost_transaction_once_the_tables_are_read_again(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    lose_transactions(servers, held, standby)
    drive(held.folder, Writer.AUTO)
    before = shown(held)
    assert before["t"] == [(1, "lost"), (7, "lost")]
    assert before["u"] == [(1,), (2,), (3,)]

    run_sql(standby.dsn(), "INSERT INTO t VALUES (8, 'kept')", "INSERT INTO w VALUES (2, 'kept')")
    with ReaderProcess(held) as reader:
        until(lambda: held.last.last.epoch == 1 and held.is_complete(standby), reader.output)
    drive(held.folder, Writer.AUTO)
    for command in (("log", "verify"), ("log", "inspect")):
        checked = spawn(*command, "-c", held.path, "--json").envelope
        assert checked["ok"], checked
    assert (checked["result"]["timeline"], checked["result"]["switch_point"]) == (2, str(held.last.switch_point))
    lake = Lake.open(lake_in(held.folder))
    assert shown(held) == {"t": [(1, "one"), (8, "kept")], "u": [], "w": [(1, "before"), (2, "kept")]}
    assert {table.state for table in lake.cut().tables.values()} == {TargetState.STREAMING}


def shown(held: CapturedCluster) -> dict[str, list[tuple[object, ...]]]:
    """The rows of each table in the lake."""
    lake, found = Lake.open(lake_in(held.folder)), {}
    for name in TABLES:
        rows = lake.query(f"SELECT * FROM public.{name} ORDER BY id", lake.cut()).read_all()
        wanted = [column for column in ("id", "v") if column in rows.column_names]
        found[name] = [tuple(row.values()) for row in rows.select(wanted).to_pylist()]
    return found


def test_a_running_reader_follows_a_crashed_primary_within_seconds(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    held.point_at(servers.primary, standby)
    with ReaderProcess(held) as reader:
        run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'before the crash')")
        until(lambda: len(held.folded("t")) == 2, reader.output)
        standby.catch_up()
        servers.primary.stop("immediate")
        until(lambda: "capture is interrupted" in reader.output(), reader.output)
        standby.promote()
        began = time.monotonic()
        run_sql(standby.dsn(), "INSERT INTO t VALUES (3, 'after the crash')")
        until(lambda: held.is_source(standby), reader.output, every=OFTEN)
        assert time.monotonic() - began < CONTINUES_WITHIN
    assert "the promoted server has every transaction of the log" in reader.output()
    assert (held.last.timeline, held.last.last.epoch) == (2, 0)
    assert held.copies() == {"t": 1, "u": 1, "w": 1}


def test_a_standby_that_is_promoted_while_it_is_read_from_continues_the_epoch(
    servers: Cluster, held: CapturedCluster
) -> None:
    standby = servers.standby()
    held.dsn = standby.dsn()
    more = f"  primary: '{servers.primary.dsn()}'\n  heartbeat: 300ms\n"
    super(CapturedCluster, held).write(slot="own", more=more)
    run_sql(
        servers.primary.dsn(), "CREATE PUBLICATION cdc_held_pub FOR TABLE t, u, w WITH (publish_via_partition_root)"
    )
    with ReaderProcess(held) as reader:
        until(lambda: held.is_source(standby), reader.output)
        run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'through the standby')")
        until(lambda: held.is_source(standby), reader.output)
        standby.catch_up()
        standby.promote()
        run_sql(standby.dsn(), "INSERT INTO t VALUES (3, 'of the promoted standby')")
        until(lambda: held.is_source(standby) and held.last.timeline == 2, reader.output)
        assert "changed from timeline 1 to 2" in reader.output()
    run_sql(standby.dsn(), "INSERT INTO t VALUES (4, 'while no reader runs')")
    check_log(held.definition)
    with ReaderProcess(held) as reader:
        until(lambda: held.is_source(standby), reader.output)
    assert held.last.last.epoch == 0


def test_a_copy_that_runs_during_a_promotion_is_completed_once(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    run_sql(servers.primary.dsn(), "INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(2, 5000) i")
    held.point_at(servers.primary, standby, below=SLOW_COPY)
    with ReaderProcess(held) as reader:
        with Catalog.open(held.definition.catalog.url) as catalog:
            catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",), resync=True).to_json())
        until(lambda: held.states()["t"] == "snapshotting" and reads(held) > ROWS / 3, reader.output)
        standby.catch_up()
        standby.sync_slots(SLOT)
        servers.primary.stop("immediate")
        standby.promote()
        before = reads(held)
        run_sql(standby.dsn(), "UPDATE t SET v = 'after' WHERE id % 7 = 0", "DELETE FROM t WHERE id % 11 = 0")
        assert held.states()["t"] == "snapshotting"
        until(lambda: held.copies()["t"] == 2 and held.is_source(standby), reader.output)
    assert (held.last.timeline, held.last.last.epoch) == (2, 0)
    assert reads(held) < ROWS + before  # it continued where it was


def test_a_large_transaction_that_is_open_during_a_promotion_is_not_in_the_log(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    for server in (servers.primary, standby):
        run_sql(server.dsn(), "ALTER SYSTEM SET logical_decoding_work_mem = '64kB'", "SELECT pg_reload_conf()")
    held.point_at(servers.primary, standby)
    with ReaderProcess(held) as reader, connect(servers.primary.dsn(), autocommit=False) as conn:
        conn.execute("INSERT INTO t SELECT i, repeat('never committed', 99) FROM generate_series(100, 5000) i")
        run_sql(servers.primary.dsn(), "INSERT INTO u VALUES (1)")
        until(lambda: rows_of(servers.primary.dsn(), STREAMED) != [] and held.folded("u") == [("1",)], reader.output)
        standby.catch_up()
        servers.primary.stop("immediate")
        conn.close()
        standby.promote()
        run_sql(standby.dsn(), "INSERT INTO t SELECT i, repeat('committed', 99) FROM generate_series(100, 5000) i")
        until(lambda: held.is_source(standby), reader.output)
    assert held.last.last.epoch == 0
    assert len(rows_with(held.log, pc.field("op") == Operation.CREATE.value, "op")) == 4901 + 2


def test_a_standby_that_is_read_from_changes_its_primary(servers: Cluster, held: CapturedCluster) -> None:
    standby, third = servers.standby(), servers.standby("third")
    run_sql(
        servers.primary.dsn(), "CREATE PUBLICATION cdc_held_pub FOR TABLE t, u, w WITH (publish_via_partition_root)"
    )
    held.dsn = standby.dsn()
    more = f"  primary: '{dsn_of_all(servers.primary, third)}'\n  heartbeat: 300ms\n"
    super(CapturedCluster, held).write(slot="own", more=more)
    with ReaderProcess(held) as reader:
        until(lambda: held.is_source(standby), reader.output)
        third.catch_up()
        standby.catch_up()
        servers.primary.stop()
        third.promote()
        run_sql(third.dsn(), "INSERT INTO t VALUES (2, 'of the new primary')")
        standby.stop()
        standby.follow(third)
        standby.start()
        until(lambda: held.last.timeline == 2 and held.is_source(third), reader.output)
    assert held.last.last.epoch == 0
    assert held.copies() == {"t": 1, "u": 1, "w": 1}


@pytest.mark.parametrize("point", ["before_promotion_recorded", "after_copy_staged", "after_promotion_recorded"])
def test_a_reader_that_is_killed_while_it_follows_a_promotion_is_continued_by_the_next_one(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember, point: str
) -> None:
    lose_transactions(servers, held, standby)
    held.point_at(standby, more="  heartbeat: 0\n")
    ended = spawn("reader", "-c", held.path, environment={VARIABLE: point})
    assert ended.status == -signal.SIGKILL, ended
    assert held.last.last.epoch == (point == "after_promotion_recorded")
    with ReaderProcess(held) as reader:
        until(lambda: held.is_complete(standby), reader.output)
    assert held.last.last.epoch == 1
    # killed before it could request the keys, it leaves whole tables to copy
    whole = 1 + (point == "after_promotion_recorded")
    assert held.copies() == {"t": whole, "u": whole, "w": 1}


def test_lost_versions_and_truncates_have_the_whole_table_copied(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    altered = ("ALTER TABLE t ADD COLUMN lost int", "INSERT INTO t VALUES (7, 'lost', 1)")
    lose_transactions(servers, held, standby, (*altered, "TRUNCATE w", "INSERT INTO u VALUES (1)"))
    held.point_at(standby, more="  heartbeat: 0\n")
    with ReaderProcess(held) as reader:
        until(lambda: held.is_complete(standby), reader.output)
        run_sql(standby.dsn(), "ALTER TABLE t ADD COLUMN kept text", "INSERT INTO t VALUES (8, 'new', 'k')")
        until(lambda: held.folded("t") == [("1", "one", None), ("8", "new", "k")], reader.output)
    assert held.copies() == {"t": 2, "u": 1, "w": 2}


def test_with_the_policy_stop_the_reader_ends_and_touches_nothing(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    lose_transactions(servers, held, standby)
    refused(held, TransactionsLost, "left timeline 1 at .* does not have the log's transactions")
    held.point_at(standby, more="  on_failover: stop\n")
    before = held.log.durable
    with ReaderProcess(held) as reader:
        assert reader.child.wait(60) != 0
    assert TransactionsLost.code in reader.output()
    assert held.log.durable == before


def test_a_slot_that_was_made_on_the_standby_continues_if_it_is_not_ahead(
    servers: Cluster, held: CapturedCluster
) -> None:
    standby = servers.standby()
    held.copy()
    with ThreadPoolExecutor(1) as pool:  # a slot on a standby waits for what its primary writes
        made = pool.submit(run_sql, standby.dsn(), MAKE_SLOT)
        until(lambda: run_sql(servers.primary.dsn(), SNAPSHOT) or made.done(), "the slot", every=0.2)  # type: ignore[func-returns-value]
        made.result()
    with held.reading() as reading:
        run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'two')")
        reading.caught_up()
    standby.catch_up()
    servers.primary.stop("immediate")
    standby.promote()
    held.point_at(standby)
    run_sql(standby.dsn(), "INSERT INTO u VALUES (1)")
    held.stream()
    assert held.is_source(standby)
    assert (held.last.timeline, held.last.last.epoch) == (2, 0)

    run_sql(standby.dsn(), "INSERT INTO t VALUES (3, 'in the gap')")
    with connect(standby.dsn()) as conn:
        drop_when_free(conn, SLOT)
        conn.execute(MAKE_SLOT)
    refused(held, SourceGap, "ahead of the log's position")


def test_a_former_primary_and_a_second_promoted_standby_are_refused(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    other = servers.standby("third")
    servers.primary.stop()
    servers.primary.start()
    other.catch_up()
    run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'two')")
    standby.catch_up()
    other.stop()
    held.point_at(standby)
    refused(held, SourceInRecovery, "only synchronizes slot")
    standby.promote()
    run_sql(standby.dsn(), "INSERT INTO t VALUES (3, 'three')")
    held.stream()

    held.point_at(servers.primary)
    refused(held, FormerPrimary, "the source is on timeline 1, and the log is on timeline 2")
    run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (4, 'split brain')")
    other.start()
    other.catch_up()
    other.promote()
    held.point_at(other)
    refused(held, SourceForked, "two servers were promoted")


def test_a_clone_of_the_primary_is_refused_once_the_log_is_ahead_of_it(servers: Cluster, held: CapturedCluster) -> None:
    held.copy()
    held.stream()
    backup = servers.backup()
    clone = servers.clone(backup)
    run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'two')")
    held.stream()
    held.point_at(clone)
    refused(held, SourceCloned, "was not synchronized, so the server may be a clone")
