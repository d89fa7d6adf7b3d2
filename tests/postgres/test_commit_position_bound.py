"""WalBound: the server is asked when it has to be, answers for itself alone, and its shutdown is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.errors import PositionBeyondWal, SourceUnreachable
from cdc.lsn import Lsn
from cdc.postgres.commit_position_bound import WalBound
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.replication import identify_system
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION
from tests.fixtures.waiting import until

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'cdc wal bound' AND datname = current_database()"
END_SESSIONS = f"SELECT pg_terminate_backend(pid, 5000) FROM ({SESSIONS}) AS found"


def wal_end(dsn: str) -> Lsn:
    return Lsn.parse(rows_of(dsn, "SELECT pg_current_wal_flush_lsn()::text")[0][0])


def has_session(bound: WalBound, dsn: str | None) -> bool:
    """Let it look at its session; whether the server has one."""
    bound.check_session()
    return dsn is not None and rows_of(dsn, SESSIONS) != []


def test_an_lsn_below_the_wal_end_passes_and_one_above_it_is_an_error(either_database: str) -> None:
    with WalBound(either_database) as bound:
        bound.require(Lsn(wal_end(either_database) - 1))
        with pytest.raises(PositionBeyondWal, match="the WAL of the server ends at"):
            bound.require(Lsn(2**52 - 1))
        run_sql(either_database, "CREATE TABLE more ()")
        bound.require(Lsn(wal_end(either_database) - 1))


def test_a_question_sent_ahead_is_answered_once(database: str) -> None:
    with WalBound(database) as bound:
        bound.ask(Lsn(2**52 - 1))
        with pytest.raises(PositionBeyondWal):
            bound.require(Lsn(2**52 - 1))
        run_sql(database, "CREATE TABLE more ()")
        later = Lsn(wal_end(database) - 1)
        bound.ask(later)
        bound.require(later)


def test_a_position_below_the_last_answer_is_not_asked_for(database: str) -> None:
    with WalBound(database) as bound:
        end = wal_end(database)
        bound.require(Lsn(end - 1))
        run_sql(database, END_SESSIONS)
        bound.require(Lsn(end - 1))
        assert rows_of(database, SESSIONS) == []


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_session_that_was_ended_is_replaced(database: str, looked_at: bool) -> None:
    with WalBound(database) as bound:
        run_sql(database, END_SESSIONS)
        if looked_at:
            until(lambda: has_session(bound, database), "another session")
        bound.require(Lsn(wal_end(database) - 1))
        assert len(rows_of(database, SESSIONS)) == 1


def test_a_stream_of_another_server_is_not_bounded(database: str) -> None:
    identity = identify_system(database)
    with WalBound(database) as bound:
        with pytest.raises(SourceUnreachable, match="different servers"):
            bound.expect("another start", identity)
        with pytest.raises(SourceUnreachable, match="different servers"):
            bound.expect(identity.started, replace(identity, started="another start"))
        bound.expect(identity.started, identity)
        bound.require(Lsn(wal_end(database) - 1))


def test_a_server_without_another_session_is_unreachable_and_on_a_standby_the_bound_is_its_replay_position(
    tmp_path: Path,
) -> None:
    """The standby is the same server in recovery, with nowhere to stream from: it stays at the end of its own WAL."""
    with EmbeddedPostgres(tmp_path / "own", version=MAIN_VERSION) as own:
        with WalBound(own.dsn()) as bound:
            bound.check_session()
            own.stop("fast")
            with pytest.raises(SourceUnreachable):
                until(lambda: has_session(bound, None), "the end of the session")
            with pytest.raises(SourceUnreachable):
                bound.require(Lsn(2**40))

        (own.data_directory / "standby.signal").touch()
        own.start()
        with WalBound(own.dsn()) as bound, connect(own.dsn()) as conn:
            found = conn.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone()
            assert found is not None
            bound.require(Lsn(Lsn.parse(found[0]) - 1))
            with pytest.raises(PositionBeyondWal):
                bound.require(Lsn.parse(found[0]))
