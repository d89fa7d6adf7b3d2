"""State of the source: which captured tables a publication does not send, or sends under other names."""

from __future__ import annotations

from cdc.postgres.connection import connect
from cdc.postgres.source_state import publication_status, read_source_state
from cdc.postgres.tables import match_tables
from tests.fixtures.postgres import rows_of, run_sql


def test_a_publication_is_compared_with_the_captured_tables(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE PUBLICATION pub FOR TABLE a, parted",
    )
    with connect(database) as conn:
        oids = [oid for oid, _ in match_tables(conn, ["public.*"])]
        status = publication_status(conn, "pub", oids)
        assert status is not None
        assert (status.missing, status.by_leaf) == (("public.b",), ("public.parted",))
        conn.execute("ALTER PUBLICATION pub SET (publish_via_partition_root = true)")
        conn.execute("ALTER PUBLICATION pub ADD TABLE b")
        complete = publication_status(conn, "pub", oids)
        assert complete is not None
        assert (complete.oid, complete.missing, complete.by_leaf) == (status.oid, (), ())
        assert publication_status(conn, "other", oids) is None


def test_the_state_identifies_the_server_and_has_no_slot_and_publication_that_do_not_exist(database: str) -> None:
    state = read_source_state(database, "no_slot", "no_publication", [])

    assert (state.slot, state.publication) == (None, None)
    assert [(state.identity.system_id,)] == rows_of(database, "SELECT system_identifier::text FROM pg_control_system()")
