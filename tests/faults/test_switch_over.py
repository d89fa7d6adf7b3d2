"""Switch-overs inside a cluster: how the new primary is found, and what `cdc source move` proves or refuses."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from cdc.capture.startup_checks import find_problems
from cdc.errors import PreflightFailed, SlotMissing, SourceInRecovery, SourceRestored
from cdc.postgres.connection import connect
from tests.faults.capture import ReaderProcess
from tests.faults.captured_cluster import SLOT, CapturedCluster, captured_cluster, refused, synced_standby
from tests.fixtures.moving_source import run_move
from tests.fixtures.pgbouncer import pgbouncer
from tests.fixtures.postgres import drop_when_free, rows_of, run_sql
from tests.fixtures.replicated_postgres import OFTEN, Cluster, ClusterMember
from tests.fixtures.tcp_relay import tcp_relay
from tests.fixtures.waiting import until

CONTINUES_WITHIN = 5.0
"""Seconds between the move of an address and the first new row in the log."""
pytestmark = pytest.mark.slow


@pytest.fixture(name="held")
def _held(tmp_path: Path, servers: Cluster) -> CapturedCluster:
    return captured_cluster(tmp_path, servers)


@pytest.fixture(name="standby")
def _standby(servers: Cluster, held: CapturedCluster) -> ClusterMember:
    return synced_standby(servers, held)


def test_an_address_that_moves_to_the_promoted_standby_is_followed(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    with tcp_relay(servers.primary.port) as address:
        held.dsn = f"postgresql://postgres@127.0.0.1:{address.port}/postgres"
        held.write(slot=SLOT)
        with ReaderProcess(held) as reader:
            run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'before the crash')")
            until(lambda: len(held.folded("t")) == 2, reader.output)
            standby.catch_up()
            servers.primary.stop("immediate")
            standby.promote()
            run_sql(standby.dsn(), "INSERT INTO t VALUES (3, 'after the crash')")
            address.lead_to(standby.port)
            began = time.monotonic()
            until(lambda: held.is_source(standby), reader.output, every=OFTEN)
            assert time.monotonic() - began < CONTINUES_WITHIN
    assert (held.last.timeline, held.last.last.epoch) == (2, 0)


def test_applications_write_through_pgbouncer_and_the_reader_connects_past_it(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    held.point_at(servers.primary, standby)
    with pgbouncer(servers.primary) as proxy:
        with ReaderProcess(held) as reader:
            with psycopg.connect(proxy.dsn, autocommit=True) as application:
                application.execute("INSERT INTO t VALUES (2, 'before the crash')")
            until(lambda: len(held.folded("t")) == 2, reader.output)
            standby.catch_up()
            servers.primary.stop("immediate")
            standby.promote()
            proxy.lead_to(standby)
            until(lambda: has_written(proxy.dsn), "a write through the proxy")
            until(lambda: held.is_source(standby), reader.output)
        held.dsn = proxy.dsn
        held.write(slot=SLOT)
        refused(held, PreflightFailed, "unsupported startup parameter")
    with pgbouncer(standby, "extra_float_digits, options") as proxy:
        held.dsn = proxy.dsn
        held.write(slot=SLOT)
        assert "drops the settings of the session" in str(
            [problem.message for problem in find_problems(held.definition)]
        )
    assert (held.last.timeline, held.last.last.epoch) == (2, 0)


def has_written(dsn: str) -> bool:
    """Write one row as an application does, which tries again after an error."""
    with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as application:
        application.execute("INSERT INTO t VALUES (3, 'after the crash')")
        return True
    return False


def test_a_restored_server_is_refused_with_what_it_lost_and_only_tables_that_differ_are_copied(
    servers: Cluster, held: CapturedCluster
) -> None:
    held.copy()
    backup = servers.backup()
    run_sql(servers.primary.dsn(), "INSERT INTO w VALUES (1, 'common')")
    held.stream()
    target = rows_of(servers.primary.dsn(), "SELECT pg_current_wal_lsn()::text")[0][0]
    run_sql(servers.primary.dsn(), "INSERT INTO t VALUES (2, 'lost')", "INSERT INTO u VALUES (1), (2)")
    held.stream()
    servers.primary.stop()
    restored, copies = servers.restored(backup, lsn=target), held.copies()
    run_sql(restored.dsn(), "DELETE FROM u")
    error = run_move(held.path, restored.dsn()).envelope["error"]
    assert error["code"] == SourceRestored.code
    assert "read again: public.t (1 rows of the log), public.u (2 rows of the log)" in error["message"]

    with connect(restored.dsn()) as conn:  # the backup has the slot
        drop_when_free(conn, SLOT)
    assert run_move(held.path, restored.dsn()).envelope["error"]["code"] == SlotMissing.code
    assert run_move(held.path, restored.dsn(), "--resync").envelope["ok"]
    held.point_at(restored)
    with ReaderProcess(held) as reader:
        until(lambda: held.is_complete(restored), reader.output)
    assert held.copies() == {**copies, "t": copies["t"] + 1, "u": copies["u"] + 1}


def test_a_move_to_a_standby_waits_for_its_promotion_and_then_proves_it(
    servers: Cluster, held: CapturedCluster, standby: ClusterMember
) -> None:
    assert run_move(held.path, standby.dsn()).envelope["error"]["code"] == SourceInRecovery.code
    servers.primary.stop()
    standby.promote()
    before, done = held.last, run_move(held.path, standby.dsn()).envelope
    assert [step["kind"] for step in done["result"]["steps"]] == ["checked", "checked", "proved", "next"]
    assert held.last == before
    held.point_at(standby)
    run_sql(standby.dsn(), "INSERT INTO u VALUES (1)")
    held.stream()
    assert (held.last.timeline, held.last.last.epoch) == (2, 0)
