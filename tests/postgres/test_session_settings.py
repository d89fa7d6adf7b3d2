"""Settings that cdc cannot pin: doctor names value, place and statement, and the statement ends their effect."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.postgres.connection import connect
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.postgres.session_settings import UnsuitableSetting, unsuitable_settings
from tests.fixtures.postgres import reader_of, run_sql

UNSUITABLE = {"temp_file_limit": "1MB", "search_path": "apart, pg_catalog"}
PLACES = {
    "ROLE {role}": "for the role",
    "ROLE {role} IN DATABASE {database}": "for the role in the database",
    "DATABASE {database}": "for the database",
}


def found(dsn: str) -> list[UnsuitableSetting]:
    with connect(dsn) as conn:
        return list(unsuitable_settings(conn))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["temp_file_limit", "search_path"])
def test_a_setting_is_named_with_its_place_and_the_statement_ends_its_effect(
    database: str, place: str, name: str
) -> None:
    with reader_of(database) as dsn:
        assert found(dsn) == []
        known = conninfo_to_dict(dsn)
        where = place.format(role=f'"{known["user"]}"', database=known["dbname"])
        value = UNSUITABLE[name] if name == "search_path" else f"'{UNSUITABLE[name]}'"
        run_sql(database, f"ALTER {where} SET {name} = {value}")  # type: ignore[arg-type]
        (setting,) = found(dsn)
        assert (setting.name, PLACES[place] in setting.message) == (name, True)
        run_sql(database, setting.sql or "")  # type: ignore[arg-type]
        assert found(dsn) == []


def test_a_setting_in_the_options_of_the_dsn_has_no_statement(database: str) -> None:
    (setting,) = found(make_conninfo(database, options="-c search_path=apart,pg_catalog"))
    assert (setting.sql, "in the options of source.dsn" in setting.message) == (None, True)


def test_doctor_reports_an_unsuitable_setting_as_advice(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"ALTER DATABASE {database.rpartition('/')[2]} SET temp_file_limit = '1MB'",  # type: ignore[arg-type]
    )
    (problem,) = preflight(database, SourceRequirements(slot="pre", publication="pub", patterns=["public.*"]))
    assert (problem.subject, problem.fatal) == ("temp_file_limit", False)
