"""Doctor's checks of the settings for a failover, on a primary and its standby."""

from __future__ import annotations

from typing import LiteralString

from cdc.postgres.connection import connect
from cdc.postgres.failover_settings import failover_problems
from cdc.postgres.replication import quote_identifier
from cdc.postgres.slot import create_slot
from tests.fixtures.postgres import run_sql
from tests.fixtures.replicated_postgres import Cluster, dsn_of_all
from tests.fixtures.waiting import until

SLOT = "cdc_shop"
ADVANCE: LiteralString = (
    "SELECT pg_log_standby_snapshot(), pg_replication_slot_advance('cdc_shop', pg_current_wal_lsn())"
)


def found_in(dsn: str) -> dict[str, str]:
    """The messages, with the SQL that solves each problem."""
    return {problem.message: problem.sql or "" for problem in failover_problems(dsn, SLOT) if not problem.fatal}


def test_each_setting_that_is_missing_is_named_with_its_sql_until_none_is(servers: Cluster) -> None:
    primary = servers.primary
    alone = found_in(primary.dsn())
    assert any("no standby replicates through a physical slot" in message for message in alone)

    standby = servers.standby(syncs_slots=True)
    both = dsn_of_all(primary, standby)
    with create_slot(primary.dsn(), SLOT):
        pass
    found = found_in(both)
    empty = next(sql for message, sql in found.items() if message.startswith("the setting is empty"))
    assert empty == "ALTER SYSTEM SET synchronized_standby_slots = 'second'; SELECT pg_reload_conf();"
    alter = next(sql for message, sql in found.items() if "is not synchronized to standbys" in message)
    assert alter == f'ALTER_REPLICATION_SLOT "{SLOT}" (FAILOVER);'
    assert any(f"does not have slot {SLOT!r}" in message for message in found)

    with connect(primary.dsn(), replication=True) as conn:
        conn.execute(f"ALTER_REPLICATION_SLOT {quote_identifier(SLOT)} (FAILOVER)".encode())
    for statement in empty.split("; "):
        run_sql(primary.dsn(), statement)  # type: ignore[arg-type]

    def is_clean() -> bool:
        run_sql(primary.dsn(), ADVANCE)  # the standby takes a slot only when it needs no older rows
        return found_in(both) == {}

    until(is_clean, lambda: str(found_in(both)))


def test_a_standby_that_is_away_is_named_and_the_reader_waits_for_it(servers: Cluster) -> None:
    standby = servers.standby()
    standby.stop()
    standby.set_option("hot_standby_feedback", "off")
    standby.start()
    run_sql(servers.primary.dsn(), "ALTER SYSTEM SET synchronized_standby_slots = 'second'", "SELECT pg_reload_conf()")
    both = dsn_of_all(servers.primary, standby)
    until(lambda: any("its standby sends no feedback" in message for message in found_in(both)), "no feedback")
    assert {sql for sql in found_in(both).values() if "feedback" in sql or "sync_" in sql} == {
        "ALTER SYSTEM SET hot_standby_feedback = 'on'; SELECT pg_reload_conf();",
        "ALTER SYSTEM SET sync_replication_slots = 'on'; SELECT pg_reload_conf();",
    }
    standby.stop()
    until(lambda: any("gets no changes until one does" in message for message in found_in(both)), "the standby's end")
    assert any("cannot be checked" in message for message in found_in(both))


def test_an_older_server_has_no_failover_slots(database_16: str) -> None:
    assert list(found_in(database_16)) == ["failover slots need Postgres 17 or later"]
