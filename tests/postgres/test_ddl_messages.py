"""DDL messages of the event triggers describe a table at their position in the WAL, whatever the catalogue is now."""

from __future__ import annotations

import json
from typing import LiteralString

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import SourceError
from cdc.postgres.connection import connect
from cdc.postgres.ddl_messages import parse_ddl_message, trigger_script
from cdc.postgres.system_catalog import read_catalog_tables
from cdc.postgres.tables import match_tables
from cdc.table import TableState
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.postgres_programs import needs_version
from tests.postgres.decoding_session import DecodingSession, decoding_session, within

TABLE: LiteralString = "CREATE TABLE t (id int PRIMARY KEY, a text, b int)"


def install(dsn: str) -> None:
    run_sql(dsn, trigger_script("install"))


def made(dsn: str, *schemas: str) -> None:
    """The table in each of the schemas."""
    for schema in schemas:
        run_sql(dsn, f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
        run_sql(within(dsn, schema), TABLE)


def columns(session: DecodingSession) -> list[list[tuple[int, str]]]:
    return [[(c.id, c.name) for c in version.columns] for version in session.versions]


def test_ddl_messages_identify_a_column_that_was_dropped_and_added_again(either_database: str) -> None:
    run_sql(either_database, TABLE)
    with decoding_session(either_database) as session:
        install(either_database)
        session.run(
            "INSERT INTO t VALUES (1, 'a', 2)",
            "ALTER TABLE t DROP COLUMN b",
            "ALTER TABLE t ADD COLUMN b int",
            "INSERT INTO t VALUES (2, 'a', 3)",
            "ALTER TABLE t RENAME COLUMN b TO late",
        )
        rows = session.catch_up()

    assert columns(session)[-3:] == [
        [(1, "id"), (2, "a")],
        [(1, "id"), (2, "a"), (4, "b")],
        [(1, "id"), (2, "a"), (4, "late")],
    ]
    assert {version.state for version in session.versions} == {TableState.LIVE}
    assert [row["after"] for row in rows if row["op"] == "c"] == [
        [(1, "1"), (2, "a"), (3, "2")],
        [(1, "2"), (2, "a"), (4, "3")],
    ]


def test_columns_of_a_table_are_known_in_the_tables_that_inherit_from_it_before_they_change(
    either_database: str,
) -> None:
    run_sql(
        either_database,
        TABLE,
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (t)",
        "CREATE TABLE grandchild (PRIMARY KEY (id)) INHERITS (child)",
    )
    with decoding_session(either_database) as session:
        install(either_database)
        session.run("ALTER TABLE t RENAME COLUMN a TO article", "ALTER TABLE t ADD COLUMN c int DEFAULT 7")
        session.catch_up()

    latest = {version.name: [c.name for c in version.columns] for version in session.versions}
    assert latest == {name: ["id", "article", "b", "c"] for name in ("t", "child", "grandchild")}
    assert {version.state for version in session.versions} == {TableState.LIVE}


REWRITES: dict[str, LiteralString] = {
    "type": "ALTER TABLE t ALTER b TYPE int USING b * 2",
    "values for existing rows": "ALTER TABLE t ADD COLUMN c float8 DEFAULT random()",
}


def test_a_rewrite_marks_the_table_at_its_place(either_database: str) -> None:
    schemas = {reason: f"case_{number}" for number, reason in enumerate(REWRITES)}
    made(either_database, *schemas.values())
    with decoding_session(either_database, "case_*.*") as session:
        install(either_database)
        for reason, schema in schemas.items():
            statements = "INSERT INTO t VALUES (1)", REWRITES[reason], "INSERT INTO t VALUES (2)"
            run_sql(within(either_database, schema), *statements)
        rows = session.catch_up()

    for reason, schema in schemas.items():
        versions = [version for version in session.versions if version.schema == schema]
        assert versions[-1].state is TableState.NEEDS_RESYNC
        assert reason in (versions[-1].reason or "")
        marked = next(v for v in versions if v.state is TableState.NEEDS_RESYNC).to_json()
        assert [row["op"] for row in rows if row["topic"] == f"{schema}.t" and row["payload"] in {None, marked}] == [
            "c",
            "s",
            "c",
        ]


def test_a_renamed_label_marks_the_table_without_a_row(either_database: str) -> None:
    run_sql(either_database, "CREATE TYPE mood AS ENUM ('sad')", "CREATE TABLE t (id int PRIMARY KEY, m mood[])")
    with decoding_session(either_database) as session:
        install(either_database)
        session.run("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
        session.catch_up()

    assert session.latest.state is TableState.NEEDS_RESYNC
    assert "labels" in (session.latest.reason or "")


HARMLESS: tuple[tuple[LiteralString, ...], ...] = (
    ("ALTER TABLE t ALTER a SET DEFAULT 'x'", "VACUUM FULL t"),
    ("ALTER TABLE t ADD COLUMN c int DEFAULT 7", "VACUUM FULL t"),
    ("ALTER TABLE t ALTER a TYPE varchar",),
    ("CREATE TABLE unrelated (id int)", "DROP TABLE unrelated"),
)


def test_a_harmless_rewrite_is_known_to_be_harmless(database: str) -> None:
    schemas = {f"case_{number}": changes for number, changes in enumerate(HARMLESS)}
    made(database, *schemas)
    with decoding_session(database, "case_*.*") as session:
        install(database)
        session.catch_up()
        session.check_catalog()
        for schema, changes in schemas.items():
            run_sql(within(database, schema), *changes, "INSERT INTO t VALUES (1)")
        session.catch_up()
        session.check_catalog()

    assert {version.schema for version in session.versions} == schemas.keys()
    assert {version.state for version in session.versions} == {TableState.LIVE}


def test_ddl_messages_report_a_dropped_table_and_its_successor_is_another_relation(either_database: str) -> None:
    run_sql(either_database, TABLE)
    with decoding_session(either_database) as session:
        first = rows_of(either_database, "SELECT 't'::regclass::oid::bigint")[0][0]
        install(either_database)
        session.run("DROP TABLE t", TABLE, "ALTER PUBLICATION pub ADD TABLE t", "INSERT INTO t VALUES (1)")
        session.catch_up()

    states = {version.relation: version.state for version in session.versions}
    assert states.pop(first) is TableState.DROPPED
    assert list(states.values()) == [TableState.LIVE]


def test_a_renamed_schema_renames_its_tables(either_database: str) -> None:
    run_sql(either_database, "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int PRIMARY KEY)")
    with decoding_session(either_database, "shop.*") as session:
        install(either_database)
        session.run(
            "INSERT INTO shop.t VALUES (1)", "ALTER SCHEMA shop RENAME TO store", "INSERT INTO store.t VALUES (2)"
        )
        rows = session.catch_up()

    assert [row["topic"] for row in rows if row["op"] == "c"] == ["shop.t", "store.t"]


def test_a_ddl_message_describes_the_table_as_the_catalogue_does(either_database: str) -> None:
    run_sql(
        either_database,
        "CREATE TABLE t (a int, gone int, b int, g int GENERATED ALWAYS AS (a * 2) STORED, "
        "PRIMARY KEY (b, a) INCLUDE (g))",
        "ALTER TABLE t DROP COLUMN gone",
    )
    with decoding_session(either_database) as session:
        install(either_database)
        session.run("ALTER TABLE t ADD COLUMN late text NOT NULL DEFAULT 'ü, \"x\"'")
        session.catch_up()
        with connect(either_database) as conn:
            shown = read_catalog_tables(conn, [session.latest.oid])[session.latest.oid]

    assert shown is not None
    places = {number: place for place, number in enumerate(shown.key)}
    assert session.latest.columns == tuple(a.column(a.number, places.get(a.number)) for a in shown.live)
    assert [c.name for c in session.latest.key] == ["b", "a"]
    assert session.latest.witness == shown.witness is not None


def test_a_trigger_that_was_off_for_a_while_is_no_witness(database: str) -> None:
    run_sql(database, TABLE)
    with decoding_session(database) as session:
        install(database)
        session.run(
            "ALTER EVENT TRIGGER cdc_ddl_end DISABLE",
            "ALTER TABLE t DROP COLUMN b",
            "ALTER TABLE t ADD COLUMN b int",
            "ALTER EVENT TRIGGER cdc_ddl_end ENABLE ALWAYS",
            "INSERT INTO t VALUES (1, 'a', 3)",
        )
        session.catch_up()

    assert session.latest.state is TableState.NEEDS_RESYNC


def test_a_role_without_rights_alters_its_tables_as_before(either_database: str) -> None:
    run_sql(either_database, "CREATE TABLE t (id int)")
    install(either_database)
    role = either_database.rpartition("/")[2]
    with connect(either_database) as conn:
        conn.execute(f'CREATE ROLE "{role}"'.encode())
        try:
            conn.execute(f'ALTER TABLE t OWNER TO "{role}"'.encode())
            conn.execute(f'SET ROLE "{role}"'.encode())
            conn.execute("ALTER TABLE t ADD COLUMN a int DEFAULT 7")
            conn.execute("ALTER TABLE t ALTER a TYPE text")
            conn.execute("DROP TABLE t")
        finally:
            conn.execute("RESET ROLE")
            conn.execute(f'DROP OWNED BY "{role}"'.encode())
            conn.execute(f'DROP ROLE "{role}"'.encode())


REAL: LiteralString = "cdc_source.described('t'::regclass, 'ALTER TABLE')"
FORGED: dict[str, LiteralString] = {
    "dropped": "jsonb_build_object('oid', 't'::regclass::oid::bigint, 'command', 'DROP TABLE', 'dropped', true)",
    "rewritten": "jsonb_build_object('oid', 't'::regclass::oid::bigint, 'command', 'ALTER TABLE', 'rewrite', 4)",
    "renamed": f'{REAL} || \'{{"name": "elsewhere"}}\'',
    "another key": f"{REAL} || '{{\"key\": [2]}}'",
    "without columns": f"jsonb_set({REAL}, '{{attributes,1,2}}', 'true')",
    "exchanged names": f"jsonb_set(jsonb_set({REAL}, '{{attributes,1,1}}', '\"b\"'), '{{attributes,2,1}}', '\"a\"')",
}
"""Contents that a role can make of what it can read."""
KEYS: tuple[LiteralString, ...] = (
    "''",
    "repeat('0', 72) || ' '",
    "(SELECT description FROM pg_description LIMIT 1) || ' '",
)


@pytest.mark.parametrize("installed", [True, False])
def test_messages_of_a_role_without_rights_change_nothing(either_database: str, installed: bool) -> None:
    run_sql(either_database, TABLE, "INSERT INTO t VALUES (1, 'x', 2)")
    install(either_database)
    contents = [
        content for forged in FORGED.values() for (content,) in rows_of(either_database, f"SELECT {forged}::text")
    ]
    if not installed:
        run_sql(either_database, trigger_script("remove"))
    role = either_database.rpartition("/")[2]
    with decoding_session(either_database) as session, connect(either_database) as conn:
        conn.execute(f'CREATE ROLE "{role}"'.encode())
        try:
            conn.execute(f'SET ROLE "{role}"'.encode())
            for content in contents:
                for key in KEYS:
                    conn.execute(f"SELECT pg_logical_emit_message(true, 'cdc.ddl', {key} || %s)".encode(), [content])
        finally:
            conn.execute("RESET ROLE")
            conn.execute(f'DROP ROLE "{role}"'.encode())
        run_sql(either_database, "UPDATE t SET b = 3", "INSERT INTO t VALUES (2, 'y', 4)")
        rows = session.catch_up()

    assert [row["after"] for row in rows if row["op"] in {"c", "u"}] == [
        [(1, "1"), (2, "x"), (3, "3")],
        [(1, "2"), (2, "y"), (3, "4")],
    ]
    assert all((version.state, version.name) == (TableState.LIVE, "t") for version in session.versions)
    assert {(c.id, c.name) for v in session.versions for c in v.columns} <= {(1, "id"), (2, "a"), (3, "b")}


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT key FROM cdc_source.message_key",
        "UPDATE cdc_source.message_key SET key = repeat('0', 72)",
        "SELECT cdc_source.emit_end()",
        "COMMENT ON EVENT TRIGGER cdc_ddl_end IS 'x'",
    ],
)
def test_no_other_role_reads_or_replaces_the_key(database: str, statement: LiteralString) -> None:
    install(database)
    role = database.rpartition("/")[2]
    with connect(database) as conn:
        conn.execute(f'CREATE ROLE "{role}"'.encode())
        try:
            conn.execute(f'SET ROLE "{role}"'.encode())
            with pytest.raises(psycopg.Error):
                conn.execute(statement)
        finally:
            conn.execute("RESET ROLE")
            conn.execute(f'DROP ROLE "{role}"'.encode())


def test_the_schema_of_another_role_is_not_trusted(database: str) -> None:
    role = database.rpartition("/")[2]
    run_sql(database, f'CREATE ROLE "{role}"', f'CREATE SCHEMA cdc_source AUTHORIZATION "{role}"')  # type: ignore[arg-type]
    try:
        with pytest.raises(SourceError, match="belongs to another role"), connect(database) as conn:
            conn.execute(trigger_script("install").encode())
    finally:
        run_sql(database, "DROP SCHEMA cdc_source", f'DROP ROLE "{role}"')  # type: ignore[arg-type]


def test_the_table_with_the_key_is_never_captured(database: str) -> None:
    install(database)
    with connect(database) as conn:
        assert match_tables(conn, ["*.*"]) == []


def test_installed_twice_and_removed_twice_nothing_is_left(either_database: str) -> None:
    for name in ("install", "install", "remove", "remove"):
        run_sql(either_database, trigger_script(name))

    assert rows_of(either_database, "SELECT FROM pg_event_trigger") == []
    assert rows_of(either_database, "SELECT FROM pg_namespace WHERE nspname = 'cdc_source'") == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["oid", "command", "attributes", "key"]), inner),
)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_message_that_is_none_of_ours_is_passed_over(content: bytes) -> None:
    parsed = parse_ddl_message(content)

    assert parsed is None or isinstance(parsed.oid, int)


@needs_version(18)
def test_computed_columns_that_are_sent_are_not_taken_for_new_ones(database: str) -> None:
    """The trigger does not know the publication: of an altered table, and of one that is created under it."""
    run_sql(
        database,
        "CREATE PUBLICATION pub WITH (publish_via_partition_root, publish_generated_columns = stored)",
        "COMMENT ON PUBLICATION pub IS 'made by cdc for pipeline '",
        "CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
    )
    with decoding_session(database) as session:
        install(database)
        session.run(
            "ALTER TABLE t ADD a int",
            "INSERT INTO t VALUES (1)",
            "CREATE TABLE u (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
            "ALTER PUBLICATION pub ADD TABLE u",
            "INSERT INTO u VALUES (1)",
        )
        session.catch_up()

    assert {version.name for version in session.versions} == {"t", "u"}
    assert {version.state for version in session.versions} == {TableState.LIVE}
