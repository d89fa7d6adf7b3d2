"""Preflight reports all problems at once, and its SQL fixes them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.ddl_messages import trigger_script
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.preflight import PreflightProblem, SourceRequirements, preflight, why_too_old
from cdc.postgres.publication import PublicationControl
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import match_tables, readable_tables
from tests.fixtures.postgres import reader_of, rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION, needs_version

LEFT_ALONE = PublicationControl(create=False)
WANTS = SourceRequirements(slot="pre", publication="pub", patterns=["public.*"])


def subjects(problems: list[PreflightProblem]) -> set[str]:
    return {problem.subject for problem in problems if problem.fatal}


def test_a_source_that_is_ready_has_no_problems(any_database: str) -> None:
    run_sql(any_database, "CREATE TABLE t (id int PRIMARY KEY)")
    assert preflight(any_database, WANTS) == []


def test_all_missing_privileges_are_reported_at_once_and_the_sql_grants_them(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE TABLE keyed (id int PRIMARY KEY)",
        "CREATE TABLE keyless (id int)",
        "DROP ROLE IF EXISTS weak",
        "CREATE ROLE weak LOGIN",
    )
    weak = any_database.replace("postgres@", "weak@")
    problems = preflight(weak, WANTS)

    assert subjects(problems) == {"role weak", "public.keyed", "public.keyless", "publication pub"}
    run_sql(any_database, *(problem.sql for problem in problems if problem.sql))  # type: ignore[misc]
    remaining = preflight(weak, WANTS)
    run_sql(any_database, "DROP OWNED BY weak", "DROP ROLE weak")
    assert subjects(remaining) == set()


def test_settings_are_named_with_their_values(tmp_path: Path) -> None:
    settings = {"wal_level": "minimal", "max_replication_slots": "0", "max_wal_senders": "0"}
    with EmbeddedPostgres(tmp_path / "pg", version=MAIN_VERSION, settings=settings, tcp=True) as server:
        problems = preflight(server.dsn(), WANTS)

    assert subjects(problems) == {"wal_level", "max_replication_slots", "max_wal_senders", "tables"}
    assert any("wal_level 'minimal'" in problem.message for problem in problems)


@pytest.mark.parametrize("dsn", ["postgresql://u:p%zz@h/d", "postgresql://u@127.0.0.1:1/d"])
def test_without_a_connection_problems_of_dsn_and_slot_name_are_reported(dsn: str) -> None:
    problems = preflight(dsn, SourceRequirements(slot="Bad-Name", publication="p", patterns=["*"]))
    assert subjects(problems) == {"slot 'Bad-Name'", "dsn"}


def test_a_server_older_than_the_oldest_tested_version_is_refused() -> None:
    assert why_too_old(140020) == "the server is too old: expected Postgres 15 or newer, got 14"
    assert why_too_old(150000) is None


def test_a_slot_of_another_plugin_or_database_is_refused(either_database: str) -> None:
    slot = either_database.rpartition("/")[2]
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY)")
    with create_slot(either_database, slot):
        pass
    wants = SourceRequirements(slot=slot, publication="pub", patterns=["public.*"])
    elsewhere = either_database.rpartition("/")[0] + "/postgres"

    assert preflight(either_database, wants) == []
    assert f"slot {slot}" in subjects(preflight(elsewhere, wants))
    run_sql(either_database, "SELECT pg_create_physical_replication_slot('physical_one')")
    physical = preflight(
        either_database, SourceRequirements(slot="physical_one", publication="pub", patterns=["public.*"])
    )
    run_sql(either_database, "SELECT pg_drop_replication_slot('physical_one')")
    assert subjects(physical) == {"slot physical_one"}


def test_event_triggers_of_an_earlier_version_are_advice(database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", trigger_script("install"))
    assert preflight(database, WANTS) == []
    run_sql(database, "COMMENT ON EVENT TRIGGER cdc_ddl_end IS NULL")
    (problem,) = preflight(database, WANTS)
    assert (problem.subject, problem.fatal) == ("event trigger cdc_ddl_end", False)


def test_a_slot_in_use_is_advice(database: str) -> None:
    slot = database.rpartition("/")[2]
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    with create_slot(database, slot):
        pass
    wants = SourceRequirements(slot=slot, publication="pub", patterns=["public.*"])
    with ReplicationStream.open(database, StreamOptions(slot=slot, publication="pub", start=Lsn(0))):
        problems = [problem for problem in preflight(database, wants) if problem.subject == f"slot {slot}"]

    assert [problem.fatal for problem in problems] == [False]


def test_a_publication_without_all_tables_and_operations_is_reported_with_its_sql(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE a WITH (publish = 'insert')",
    )
    wants = SourceRequirements(
        slot="pre", publication="pub", patterns=["public.*"], create_slot=False, control=LEFT_ALONE
    )
    problems = preflight(any_database, wants)

    assert subjects(problems) == {"slot pre", "publication pub"}
    assert 'ALTER PUBLICATION "pub" ADD TABLE ONLY "public"."b";' in [problem.sql for problem in problems]
    with connect(any_database) as conn:
        for problem in problems:
            if problem.sql and problem.subject == "publication pub":
                conn.execute(problem.sql)  # type: ignore[call-overload]
    assert subjects(preflight(any_database, wants)) == {"slot pre"}


def test_a_table_without_changes_in_the_wal_is_advice_and_its_sql_repairs_it(either_database: str) -> None:
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE UNLOGGED TABLE fast (id int PRIMARY KEY)")
    (problem,) = preflight(either_database, WANTS)
    assert (problem.subject, problem.fatal) == ("public.fast", False)
    assert problem.message == "is unlogged: its changes are not in the WAL; the table is not captured"
    run_sql(either_database, problem.sql or "")  # type: ignore[arg-type]
    assert preflight(either_database, WANTS) == []


def test_a_partition_without_its_root_is_advice(either_database: str) -> None:
    run_sql(
        either_database,
        "CREATE TABLE far (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE near PARTITION OF far DEFAULT",
        "CREATE TABLE t (id int PRIMARY KEY)",
    )
    wants = replace(WANTS, patterns=["public.t", "public.near"])
    (problem,) = preflight(either_database, wants)
    assert (problem.subject, problem.fatal, problem.sql) == ("public.near", False, None)
    assert "is a partition of public.far" in problem.message


def test_a_generated_column_of_the_replica_identity_is_reported_and_the_sql_fixes_it(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE TABLE t (a int, b int, g int GENERATED ALWAYS AS (b % 10) STORED, n int, PRIMARY KEY (a, g))",
        "CREATE TABLE fine (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a % 10) STORED)",
        "INSERT INTO t VALUES (1, 1), (1, 2)",
    )
    (problem,) = preflight(any_database, WANTS)
    assert (problem.subject, problem.fatal) == ("public.t", True)
    assert "has the generated column 'g' in its replica identity" in problem.message
    run_sql(any_database, problem.sql or "")  # type: ignore[arg-type]
    assert preflight(any_database, WANTS) == []


@needs_version(18)
def test_generated_columns_under_full_are_reported_if_they_would_stop_the_source(database: str) -> None:
    for name, kind in (("kept", "STORED"), ("made", "VIRTUAL")):
        run_sql(
            database,
            f"CREATE TABLE {name} (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a % 10) {kind})",  # type: ignore[arg-type]
            f"ALTER TABLE {name} REPLICA IDENTITY FULL",  # type: ignore[arg-type]
            f"INSERT INTO {name} VALUES (1)",  # type: ignore[arg-type]
        )
    run_sql(database, "CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    with pytest.raises(psycopg.Error, match="unpublished generated columns"):
        run_sql(database, "UPDATE kept SET a = 2")
    told = {problem.subject: problem.sql for problem in preflight(database, WANTS)}
    assert told.keys() == {"public.kept", "public.made"}
    assert told["public.made"] is None  # such a column is never sent
    run_sql(database, told["public.kept"] or "", "UPDATE kept SET a = 2")  # type: ignore[arg-type]
    assert subjects(preflight(database, WANTS)) == {"public.made"}


SEES = "GRANT pg_read_all_stats TO {role}"


def hide_replication(dsn: str) -> None:
    """Make the catalog say that no role may replicate, as on servers where a membership gives the right."""
    with connect(dsn) as conn:
        conn.execute("SET allow_system_table_mods = on")
        (view,) = conn.execute("SELECT pg_get_viewdef('pg_roles'::regclass)").fetchone()  # type: ignore[misc]
        shown = re.sub(r"(\w+\.)?rolreplication", "false AS rolreplication", view, count=1)
        conn.execute(f"CREATE OR REPLACE VIEW pg_catalog.pg_roles AS {shown}".encode())


def test_the_right_to_replicate_is_what_a_replication_connection_proves(any_database: str) -> None:
    run_sql(any_database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    hide_replication(any_database)
    with reader_of(any_database, SEES, "GRANT SELECT ON t TO {role}") as dsn:
        assert preflight(dsn, WANTS) == []
    with reader_of(any_database, SEES, "GRANT SELECT ON t TO {role}", "ALTER ROLE {role} NOREPLICATION") as dsn:
        (problem,) = preflight(dsn, WANTS)
        assert problem.message.startswith("may not replicate: ")
        run_sql(any_database, problem.sql or "")  # type: ignore[arg-type]
        assert preflight(dsn, WANTS) == []


def test_on_a_server_with_a_role_for_replication_the_remedy_is_a_membership(database: str) -> None:
    """An administrator who is no superuser runs it."""
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    lacks = ("ALTER ROLE {role} NOREPLICATION", SEES, "GRANT SELECT ON t TO {role}")
    run_sql(database, "CREATE ROLE rds_replication")
    try:
        with (
            reader_of(database, "GRANT rds_replication TO {role} WITH ADMIN OPTION") as admin,
            reader_of(database, *lacks) as dsn,
        ):
            (problem,) = preflight(dsn, WANTS)
            run_sql(admin, problem.sql or "")  # type: ignore[arg-type]
            member = "SELECT count(*) FROM pg_auth_members WHERE roleid = 'rds_replication'::regrole"
            assert rows_of(database, member) == [(2,)]
    finally:
        run_sql(database, "DROP ROLE rds_replication")


@pytest.mark.parametrize(
    ("policies", "is_owner", "hidden"),
    [
        ("ENABLE ROW LEVEL SECURITY", False, True),
        ("ENABLE ROW LEVEL SECURITY", True, False),
        ("ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY", True, True),
        ("FORCE ROW LEVEL SECURITY", True, False),
    ],
)
def test_row_security_counts_where_it_hides_rows_from_the_role(
    database: str, policies: str, is_owner: bool, hidden: bool
) -> None:
    rights = "ALTER TABLE t OWNER TO {role}" if is_owner else "GRANT SELECT ON t TO {role}"
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"ALTER TABLE t {policies}",  # type: ignore[arg-type]
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    with reader_of(database, SEES, rights) as dsn:
        problems = preflight(dsn, WANTS)
        assert [problem.subject for problem in problems] == ["public.t"] * hidden
        with connect(dsn) as conn:
            assert bool(readable_tables(conn, match_tables(conn, ["public.t"]))) is not hidden
        run_sql(database, *(problem.sql or "" for problem in problems))  # type: ignore[misc]
        assert preflight(dsn, WANTS) == []
        with connect(dsn) as conn:
            conn.execute("SELECT FROM t")
        if is_owner:
            run_sql(database, "ALTER TABLE t OWNER TO CURRENT_USER")


def test_the_owner_of_a_table_runs_the_grants_that_are_missing(any_database: str) -> None:
    with reader_of(any_database) as owner, reader_of(any_database, SEES) as dsn:
        name = conninfo_to_dict(owner)["user"]
        run_sql(any_database, f'CREATE SCHEMA apart AUTHORIZATION "{name}"')  # type: ignore[arg-type]
        run_sql(owner, "CREATE TABLE apart.t (id int PRIMARY KEY)")
        run_sql(any_database, "CREATE PUBLICATION pub FOR ALL TABLES")
        problems = preflight(dsn, replace(WANTS, patterns=["apart.*"]))
        assert [(p.subject, p.fatal, p.table_only) for p in problems] == [("apart.t", True, True)] * 2
        run_sql(owner, *(problem.sql or "" for problem in problems))  # type: ignore[misc]
        assert preflight(dsn, replace(WANTS, patterns=["apart.*"])) == []


def test_a_role_that_does_not_see_statistics_is_told_what_it_misses(any_database: str) -> None:
    run_sql(any_database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    with reader_of(any_database, "GRANT SELECT ON t TO {role}") as dsn:
        (problem,) = preflight(dsn, WANTS)
        assert (problem.fatal, "cdc_feedback_age_seconds" in problem.message) == (False, True)
        run_sql(any_database, problem.sql or "")  # type: ignore[arg-type]
        assert preflight(dsn, WANTS) == []


@pytest.mark.parametrize("members", ["TABLE p", "ALL TABLES", "TABLES IN SCHEMA public", "TABLE p1"])
def test_doctor_knows_whether_writes_of_a_table_without_a_key_fail_already(database: str, members: str) -> None:
    run_sql(
        database,
        "CREATE TABLE p (id int) PARTITION BY LIST (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    )
    wants = replace(WANTS, patterns=["public.p"])
    before = [problem.message for problem in preflight(database, wants)]
    assert before == ["has no primary key: once the table is published, updates and deletes fail at the source"]
    run_sql(database, "CREATE PUBLICATION theirs FOR TABLE p WITH (publish = 'insert')")
    assert [problem.message for problem in preflight(database, wants)] == before
    run_sql(database, f"CREATE PUBLICATION other FOR {members}")  # type: ignore[arg-type]
    (problem,) = preflight(database, wants)
    assert problem.message.endswith(": a publication has the table, so updates and deletes fail at the source")
