"""follow_promotion at the border between a transaction that a server has and one that it lost, and killed anywhere."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cdc.capture.failover import accept_promotion, follow_promotion
from cdc.capture.resume_checks import captured_oids, find_lost_transactions
from cdc.capture.startup_checks import check_log
from cdc.errors import SourceRestored
from cdc.failpoint import VARIABLE
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.replication import identify_system
from cdc.postgres.source_state import read_source_state
from cdc.table import TableState
from tests.cli.command import spawn
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.replicated_postgres import Cluster
from tests.snapshot.reader_with_backfills import Running

SLOT = "cdc_shop"


class Border:
    """A log whose last record is a transaction on `t`, or a message, and a backup from before it."""

    def __init__(self, folder: Path, servers: Cluster, last: str) -> None:
        primary = servers.primary.dsn()
        run_sql(primary, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
        self.held = Captured(folder, primary, slot=SLOT)
        self.held.copy()
        self.servers, self.backup = servers, servers.backup()
        run_sql(primary, "INSERT INTO u VALUES (1)", "INSERT INTO t VALUES (1, 'common')")
        with self.held.reading() as reading:
            reading.caught_up()
            with connect(primary) as conn:
                (start,) = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("0/0",)
                conn.execute(last)  # type: ignore[call-overload]
                (end,) = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("0/0",)
            reading.until(lambda: self.is_last(Lsn.parse(start), Lsn.parse(end)), "the last record in the log")
        durable = self.held.log.durable or Position(0)
        self.record = durable.lsn if last == INSERT else Lsn.parse(start)
        """Where the last record of the log begins: the position of a transaction is its commit record."""
        servers.primary.stop()

    def is_last(self, start: Lsn, end: Lsn) -> bool:
        """Whether the log has the record between the two."""
        durable = self.held.log.durable
        return durable is not None and start <= durable.lsn < end

    def restore(self, *, inclusive: bool) -> EmbeddedPostgres:
        """Restore the backup up to the last record of the log: with it, or without it."""
        server = self.servers.restored(self.backup, lsn=str(self.record), inclusive=str(inclusive).lower())
        self.held.dsn = server.dsn()
        self.held.write(slot=SLOT, more="  on_failover: stop\n")
        return server

    def lost_from(self) -> Lsn | None:
        """The switch point behind which the server lost transactions of the log."""
        log = self.held.log
        assert log.last_commit is not None
        state = read_source_state(self.held.dsn, SLOT, "cdc_held_pub", captured_oids(log.schemas()))
        found = find_lost_transactions(log.identity, log.last_commit, state)
        return None if found is None else found.switch_point


INSERT = "INSERT INTO t VALUES (2, 'last')"
MESSAGE = "SELECT pg_logical_emit_message(false, 'test', 'last', true)"


@pytest.mark.parametrize("last", [INSERT, MESSAGE])
def test_a_server_with_the_log_s_last_record_continues_the_epoch(tmp_path: Path, servers: Cluster, last: str) -> None:
    border = Border(tmp_path, servers, last)
    server = border.restore(inclusive=True)

    behind = identify_system(server.dsn()).history.switch_point - (border.held.log.durable or Position(0)).lsn
    assert behind == 1 if last == MESSAGE else behind > 1  # the position of a message is the last byte of its record
    assert border.lost_from() is None
    assert follow_promotion(border.held.definition) is None
    check_log(border.held.definition)
    run_sql(server.dsn(), "INSERT INTO t VALUES (3, 'after')")
    assert border.held.stream().epoch == 0
    assert border.held.folded("t") == sorted(rows_of(server.dsn(), "SELECT id::text, v FROM t"))


@pytest.mark.parametrize(("last", "tables"), [(INSERT, {"public.t": 1}), (MESSAGE, {})])
def test_a_server_that_ends_where_the_log_s_last_record_begins_lost_it(
    tmp_path: Path, servers: Cluster, last: str, tables: dict[str, int]
) -> None:
    border = Border(tmp_path, servers, last)
    server, held, record = border.restore(inclusive=False), border.held, border.record

    assert border.lost_from() == record
    with pytest.raises(SourceRestored, match=r"restored to a recovery target \(before LSN"):
        check_log(held.definition)
    followed = accept_promotion(held.definition)
    assert followed is not None
    assert followed.tables == tables
    assert followed.position == Position.of(record - 1, 1)
    run_sql(server.dsn(), "INSERT INTO u VALUES (3)")
    assert held.stream().epoch == 1
    assert held.folded("u") == [("1",), ("3",)]
    states = {schema.topic: schema.state for schema in held.log.schemas().values()}
    assert {topic for topic, state in states.items() if state is TableState.SNAPSHOTTING} == tables.keys()


@pytest.mark.parametrize("point", ["before_promotion_recorded", "after_copy_staged", "after_promotion_recorded"])
def test_a_promotion_that_lost_transactions_is_recorded_once_wherever_the_command_is_killed(
    tmp_path: Path, servers: Cluster, point: str
) -> None:
    border = Border(tmp_path, servers, INSERT)
    server, held = border.restore(inclusive=False), border.held
    command = ("slots", "recover", "-c", held.path, "--accept-promotion", "--yes", "--json")
    assert spawn(*command, environment={VARIABLE: point}).status == -signal.SIGKILL
    recorded = point == "after_promotion_recorded"
    assert (held.log.durable or Position(0)).epoch == recorded

    again = spawn(*command).envelope
    assert again["result"]["lost_tables"] == ({} if recorded else {"public.t": 1})
    with Running(held) as running:
        running.until(lambda: held.folded("t") == [("1", "common")], "the resync")
        run_sql(server.dsn(), "INSERT INTO t VALUES (3, 'after')")
        running.caught_up()
    assert held.folded("t") == [("1", "common"), ("3", "after")]
    assert (held.log.durable or Position(0)).epoch == 1
