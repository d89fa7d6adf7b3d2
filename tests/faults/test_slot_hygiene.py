"""What the reader owes the server: WAL that can go, a stop that ends, a budget that is kept, a slot that can begin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.capture.resume_checks import lsn_to_confirm
from cdc.errors import ExitCode, PublicationMissing, SlotBlocked, SourceError, WalBudgetExceeded
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import SlotStatus, create_slot, slot_status
from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION, needs_version
from tests.fixtures.waiting import PATIENCE, until

SCHEMA = "CREATE TABLE t (id int PRIMARY KEY, v text)"
UNPUBLISHED = "CREATE TABLE busy (id serial PRIMARY KEY, v text)"


def status(held: Captured) -> SlotStatus:
    with connect(held.dsn) as conn:
        found = slot_status(conn, held.slot)
    assert found is not None
    return found


@pytest.fixture(name="held")
def _held(tmp_path: Path, either_database: str) -> Captured:
    run_sql(either_database, SCHEMA, UNPUBLISHED)
    held = Captured(tmp_path, either_database, tables="public.t")
    held.copy()
    return held


def test_wal_of_unpublished_tables_goes_although_the_published_ones_are_quiet(held: Captured) -> None:
    held.write(tables="public.t", slot=held.slot, more="  heartbeat: 200ms\n")

    def gone() -> bool:
        restart, durable = status(held).restart_lsn, held.log.durable
        assert durable is not None
        return restart is not None and restart >= end and (status(held).confirmed_flush or 0) <= durable.lsn + 1

    with ReaderProcess(held) as reader:
        run_sql(held.dsn, "INSERT INTO busy (v) SELECT repeat('x', 900) FROM generate_series(1, 6000)")
        end = status(held).wal_end
        run_sql(held.dsn, "CHECKPOINT")  # it says what runs, as the server does every 15 seconds: the slot follows that
        until(gone, lambda: f"the slot past {end}\n{reader.output()}")


def test_postgres_is_never_told_more_than_the_log_holds(held: Captured) -> None:
    with ReaderProcess(held):
        for _ in range(20):
            run_sql(held.dsn, "INSERT INTO t SELECT coalesce(max(id), 0) + 1, 'x' FROM t")
            confirmed = status(held).confirmed_flush or Lsn(0)
            durable = held.log.durable  # read after the slot: the log only grows
            assert durable is not None
            assert confirmed <= durable.lsn + 1


@pytest.fixture(name="own_server", params=[MAIN_VERSION, pytest.param(15, marks=pytest.mark.slow)])
def _own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    request.getfixturevalue({MAIN_VERSION: "postgres", 15: "postgres_15"}[request.param])  # skips without the programs
    with EmbeddedPostgres(tmp_path / "pg", version=request.param, tcp=True) as server:
        yield server


def test_a_server_stops_within_ten_seconds_and_sends_nothing_twice(
    tmp_path: Path, own_server: EmbeddedPostgres
) -> None:
    run_sql(own_server.dsn(), SCHEMA, UNPUBLISHED)
    held = Captured(tmp_path, own_server.dsn(), tables="public.t")
    held.copy()
    run_sql(held.dsn, "INSERT INTO t VALUES (1, 'last')")
    held.stream()
    with pytest.raises(SourceError), held.reading():  # noqa: PT012 - it is raised where the block ends
        until(lambda: status(held).active, "the reader at the slot")
        for _ in range(5):
            run_sql(held.dsn, "INSERT INTO busy (v) SELECT repeat('x', 900) FROM generate_series(1, 2000)")
        began = time.monotonic()
        own_server.stop("fast")
        took = time.monotonic() - began
    assert took < 10
    own_server.start()

    if own_server.version >= 17:  # before, a stopping server does not write down what it was told last
        assert sent_again(held) == []
    held.stream()
    found = [(r["position"], r["ordinal"]) for r in rows(held)]
    assert len(found) == len(set(found))
    assert held.folded("t") == [("1", "last")]


def test_a_reader_that_comes_back_is_sent_nothing_that_the_log_holds(held: Captured) -> None:
    run_sql(held.dsn, "INSERT INTO t VALUES (1, 'last')")
    held.stream()
    until(lambda: not status(held).active, "the slot free")
    assert sent_again(held) == []


def sent_again(held: Captured) -> list[bytes]:
    """Rows that the server sends from where it was told to be."""
    options = StreamOptions(slot=held.slot, publication="cdc_held_pub", start=lsn_to_confirm(0))
    with ReplicationStream.open(held.dsn, options) as stream:
        frames = stream.receive(1.0)
    until(lambda: not status(held).active, "the server has noticed that the connection is closed")
    return [bytes(f) for f in frames or [] if bytes(f)[25:26] in {b"I", b"U", b"D"}]


def rows(held: Captured) -> list[dict[str, object]]:
    log = held.log
    return [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]


def test_a_slot_that_cannot_begin_names_who_holds_it_up_and_leaves_nothing(either_database: str) -> None:
    slot = either_database.rpartition("/")[2]
    run_sql(either_database, SCHEMA)
    with connect(either_database, autocommit=False, application_name="forgotten") as idle:
        idle.execute("INSERT INTO t VALUES (1, 'open')")
        pid = idle.info.backend_pid
        with (
            pytest.raises(SlotBlocked, match=rf"pid {pid} \(forgotten, xid \d+, open since "),
            create_slot(either_database, slot, timeout=0.5),
        ):
            pass
    with connect(either_database) as conn:
        assert slot_status(conn, slot) is None
    with create_slot(either_database, slot, timeout=5):
        pass


def test_a_budget_that_says_stop_stops_the_reader_and_leaves_the_slot(held: Captured) -> None:
    held.write(tables="public.t", slot=held.slot, more="  heartbeat: 0s\n  wal_budget: 1MiB\n  on_wal_budget: stop\n")
    with connect(held.dsn, autocommit=False) as old:
        # a transaction that stays open keeps the WAL: the slot cannot move past it
        old.execute("INSERT INTO t VALUES (1, 'open')")
        with ReaderProcess(held) as reader:
            run_sql(held.dsn, "INSERT INTO busy (v) SELECT repeat('x', 900) FROM generate_series(1, 4000)")
            assert reader.child.wait(PATIENCE) == ExitCode.HALTED, reader.output()
    assert WalBudgetExceeded.code in reader.output()
    until(lambda: not status(held).active, "the slot free")


def test_a_budget_that_says_warn_goes_on(held: Captured) -> None:
    held.write(tables="public.t", slot=held.slot, more="  heartbeat: 0s\n  wal_budget: 1MiB\n")
    with ReaderProcess(held) as reader:
        with connect(held.dsn, autocommit=False) as old:
            old.execute("INSERT INTO t VALUES (1, 'open')")
            run_sql(held.dsn, "INSERT INTO busy (v) SELECT repeat('x', 900) FROM generate_series(1, 4000)")
            until(lambda: "WAL budget is exceeded" in reader.output(), reader.output)
        run_sql(held.dsn, "INSERT INTO t VALUES (2, 'after')")
        until(lambda: ("2", "after") in held.folded("t"), reader.output)
        assert reader.child.poll() is None


def test_a_publication_dropped_under_a_running_reader_stops_it(held: Captured) -> None:
    with ReaderProcess(held) as reader:
        until(lambda: status(held).active, "the reader at the slot")
        run_sql(held.dsn, "DROP PUBLICATION cdc_held_pub", "INSERT INTO t VALUES (1, 'never sent')")
        assert reader.child.wait(PATIENCE) == ExitCode.HALTED, reader.output()
    assert PublicationMissing.code in reader.output() or "CDC-2110" in reader.output()
    assert f"-c {held.path}" in reader.output()
    assert "-c FILE" not in reader.output()


@needs_version(17)
def test_a_failover_slot_is_made_where_the_server_knows_them(tmp_path: Path, database: str) -> None:
    run_sql(database, SCHEMA)
    held = Captured(tmp_path, database)
    slot = held.slot
    held.path.write_text(held.path.read_text().replace(f"{{name: {slot}}}", f"{{name: {slot}, failover: true}}"))
    held.copy()
    assert status(held).failover
