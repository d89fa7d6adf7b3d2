"""Settings of the server that prevent logical decoding, and versions that cdc does not know, are named by doctor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import pytest

from cdc.capture.startup_checks import check_log, find_problems
from cdc.errors import OutputPluginRefused
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.decoding_settings import KNOWN_COLUMNS, NEWEST, decoding_problems, unknown_columns
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until


@pytest.fixture(name="refusing", params=["database_17", "database_19"])
def _refusing(request: pytest.FixtureRequest) -> str:
    """A database in which pgoutput is not allowed, with one table."""
    dsn: str = request.getfixturevalue(request.param)
    name = dsn.rpartition("/")[2]
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    run_sql(dsn, f"ALTER DATABASE {name} SET output_plugin_libraries = 'test_decoding', 'wal2json'")  # type: ignore[arg-type]
    return dsn


@pytest.fixture(name="weak")
def _weak(refusing: str) -> Iterator[str]:
    """The same database, seen by a role that may not read the setting."""
    run_sql(refusing, "DROP ROLE IF EXISTS weak", "CREATE ROLE weak LOGIN REPLICATION")
    yield refusing.replace("postgres@", "weak@")
    run_sql(refusing, "DROP ROLE weak")


def test_a_refused_plugin_is_named_with_setting_and_value_at_the_first_start_and_at_a_resume(
    tmp_path: Path, refusing: str
) -> None:
    held = Captured(tmp_path, refusing)
    (problem,) = (found for found in find_problems(held.definition) if found.fatal)
    assert (problem.code, problem.subject) == (OutputPluginRefused.code, "output_plugin_libraries")
    assert "is 'test_decoding, wal2json', without pgoutput" in problem.message
    with pytest.raises(OutputPluginRefused, match="output_plugin_libraries: is 'test_decoding, wal2json'"):
        check_log(held.definition)

    run_sql(refusing, problem.sql or "")  # type: ignore[arg-type]
    assert [found for found in find_problems(held.definition) if found.fatal] == []
    held.copy()
    name = refusing.rpartition("/")[2]
    run_sql(refusing, f"ALTER DATABASE {name} SET output_plugin_libraries = 'test_decoding'")  # type: ignore[arg-type]
    (again,) = (found for found in find_problems(held.definition) if found.fatal)
    assert again.subject == "output_plugin_libraries"
    with pytest.raises(OutputPluginRefused, match='"pgoutput" may not be used'):
        held.stream()

    run_sql(refusing, again.sql or "", "INSERT INTO t VALUES (2)")  # type: ignore[arg-type]
    held.stream()
    assert held.folded("t") == [("1",), ("2",)]


def test_a_role_that_may_not_read_the_setting_learns_of_it_from_a_trial(weak: str, refusing: str) -> None:
    (problem,) = decoding_problems(weak, "none")
    assert (problem.code, problem.subject, problem.sql) == (OutputPluginRefused.code, "output_plugin_libraries", None)
    assert "visible only to members of pg_read_all_settings" in problem.message
    run_sql(refusing, f"ALTER DATABASE {refusing.rpartition('/')[2]} RESET output_plugin_libraries")  # type: ignore[arg-type]
    assert decoding_problems(weak, "none") == []
    slots: LiteralString = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    until(lambda: rows_of(refusing, slots) == [], "the end of the temporary slot")


def test_a_slot_that_is_in_use_proves_that_the_plugin_is_allowed(database_19: str) -> None:
    slot = database_19.rpartition("/")[2]
    run_sql(database_19, "CREATE PUBLICATION pub", "DROP ROLE IF EXISTS weak", "CREATE ROLE weak LOGIN REPLICATION")
    with create_slot(database_19, slot):
        pass
    with ReplicationStream.open(database_19, StreamOptions(slot=slot, publication="pub", start=Lsn(0))):
        assert decoding_problems(database_19.replace("postgres@", "weak@"), slot) == []
    run_sql(database_19, "DROP ROLE weak")


def test_no_version_up_to_the_newest_has_a_column_that_is_not_known(any_database: str, database_19: str) -> None:
    for dsn in (any_database, database_19):
        assert decoding_problems(dsn, "none") == []
    assert rows_of(database_19, "SELECT current_setting('server_version_num')::int / 10000") == [(NEWEST,)]
    known = {**KNOWN_COLUMNS, "pg_publication_rel": "oid prpubid prrelid prqual prattrs"}
    with connect(database_19) as conn:
        (problem,) = unknown_columns(conn, known)
    assert (problem.subject, problem.fatal) == ("pg_publication_rel", False)
    assert "has the column 'prexcept'" in problem.message


def test_with_wal_level_replica_version_19_is_captured_and_a_limit_of_idle_slots_is_named(
    tmp_path: Path, postgres_19: EmbeddedPostgres
) -> None:
    settings = {"wal_level": "replica", "idle_replication_slot_timeout": "90min"}
    with EmbeddedPostgres(tmp_path / "pg", version=postgres_19.version, settings=settings, tcp=True) as server:
        dsn = server.dsn()
        run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        assert preflight(dsn, SourceRequirements("pre", "pub", ["public.*"])) == []
        (problem,) = decoding_problems(dsn, "pre")
        held = Captured(tmp_path, dsn)
        check_log(held.definition)
        held.copy()
        run_sql(dsn, "INSERT INTO t VALUES (2)")
        held.stream()
        assert held.folded("t") == [("1",), ("2",)]
        server.stop()
        server.start()
        run_sql(dsn, "INSERT INTO t VALUES (3)")
        held.stream()
        assert held.folded("t") == [("1",), ("2",), ("3",)]
    assert (problem.subject, problem.fatal) == ("idle_replication_slot_timeout", False)
    assert "idle for 90min" in problem.message
    assert problem.sql == "ALTER SYSTEM SET idle_replication_slot_timeout = '0'; SELECT pg_reload_conf();"
