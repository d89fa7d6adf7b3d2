"""Tables under REPLICA IDENTITY FULL without a usable key: whole rows identify rows."""

from __future__ import annotations

from typing import LiteralString

import pytest

from cdc.postgres.connection import connect
from cdc.postgres.ddl_messages import trigger_script
from cdc.postgres.publication import published_schemas
from cdc.postgres.tables import match_tables
from cdc.table import TableSchema, TableState
from tests.fixtures.postgres import run_sql
from tests.postgres.decoding_session import PUBLICATION, decoding_session
from tests.postgres.four_readings import capture_stream, copy_rows

DEFERRABLE: LiteralString = "PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED"
FULL: LiteralString = "ALTER TABLE t REPLICA IDENTITY FULL"
ADDED: LiteralString = "ALTER TABLE t ADD "


def copied(dsn: str) -> TableSchema:
    """The one table, as a copy takes it."""
    with connect(dsn) as conn:
        (schema,) = published_schemas(conn, [oid for oid, _ in match_tables(conn, ["*.*"])], PUBLICATION).values()
    return schema


def test_a_deferrable_primary_key_is_none_for_two_rows_may_have_it_at_a_time(either_database: str) -> None:
    run_sql(
        either_database,
        f"CREATE TABLE t (id int, v text, {DEFERRABLE})",
        FULL,
        "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
    )
    with capture_stream(either_database) as capture:
        rows = capture.changes("UPDATE t SET id = 3 - id")
    assert [(row["op"], row["key"], dict(row["before"]), dict(row["after"])) for row in rows] == [
        ("u", None, {1: "1", 2: "a"}, {1: "2", 2: "a"}),
        ("u", None, {1: "2", 2: "b"}, {1: "1", 2: "b"}),
    ]
    assert {row["key"] for row in copy_rows(either_database, copied(either_database))} == {None}


@pytest.mark.parametrize("witnessed", [False, True])
@pytest.mark.parametrize("instead", ["", ADDED + DEFERRABLE])
def test_dropping_the_primary_key_marks_the_table(
    either_database: str, instead: LiteralString, *, witnessed: bool
) -> None:
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY, v text)", FULL)
    with decoding_session(either_database) as session:
        if witnessed:
            session.run(trigger_script("install"))
        session.run("INSERT INTO t VALUES (1, 'a')", "ALTER TABLE t DROP CONSTRAINT t_pkey", *filter(None, [instead]))
        session.run("BEGIN; INSERT INTO t VALUES (1, 'b'); DELETE FROM t WHERE v = 'a'; COMMIT")
        session.catch_up()
    assert session.latest.state is TableState.NEEDS_RESYNC
    assert "the key changed from ['id'] to []" in (session.latest.reason or "")


def test_a_computed_part_that_is_not_sent_leaves_the_rest_no_key(either_database: str) -> None:
    run_sql(
        either_database,
        "CREATE TABLE t (a int, b int, g int GENERATED ALWAYS AS (b % 10) STORED, PRIMARY KEY (a, g))",
        FULL,
        "INSERT INTO t VALUES (1, 1), (1, 2)",
    )
    schema = copied(either_database)
    assert schema.key == ()
    rows = copy_rows(either_database, schema)
    assert [(row["key"], dict(row["after"])) for row in rows] == [(None, {1: "1", 2: "1"}), (None, {1: "1", 2: "2"})]
    with capture_stream(either_database) as capture:
        (row,) = capture.changes("INSERT INTO t VALUES (1, 3)")
    assert (row["key"], dict(row["after"])) == (None, {1: "1", 2: "3"})


def test_a_key_that_gets_such_a_part_marks_the_table(either_database: str) -> None:
    computed: LiteralString = "g int GENERATED ALWAYS AS (b % 10) STORED"
    run_sql(either_database, f"CREATE TABLE t (a int PRIMARY KEY, b int, {computed})")
    with decoding_session(either_database) as session:
        session.run(
            "INSERT INTO t VALUES (1, 1)",
            "ALTER TABLE t DROP CONSTRAINT t_pkey",
            "ALTER TABLE t ADD PRIMARY KEY (a, g)",
            "INSERT INTO t VALUES (1, 2)",
        )
        session.catch_up()
    assert session.latest.state is TableState.NEEDS_RESYNC
    assert session.latest.reason == "the source does not send the generated columns ['g'] of the table's key"
