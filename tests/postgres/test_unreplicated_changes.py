"""Drift: what pgoutput does not show is seen in the catalogue, and what keeps every row is not taken for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import LiteralString

import pytest

from cdc.table import TableState
from tests.fixtures.postgres import run_sql
from tests.postgres.decoding_session import DecodingSession, decoding_session, within

TABLES: tuple[LiteralString, ...] = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TABLE t (id int PRIMARY KEY, a text, b int, m mood)",
    "INSERT INTO t VALUES (1, 'x', 1, 'sad')",
    "CREATE TABLE other (id int PRIMARY KEY)",
    "CREATE TABLE p (id int, r int, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2)",
    "INSERT INTO p VALUES (1, 1), (2, 2)",
)

DRIFTS: dict[str, tuple[LiteralString, ...]] = {
    "altered": ("ALTER TABLE t ALTER b TYPE int USING b * 2",),
    "values for old rows": ("ALTER TABLE t ADD COLUMN late float8 DEFAULT random()",),
    "labels": ("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",),
    "truncated, but not the whole table": ("TRUNCATE p1",),
    "detached or dropped": ("ALTER TABLE p DETACH PARTITION p1",),
    "dropped with their rows": ("DROP TABLE p1",),
    "attached with rows": (
        (
            "CREATE TABLE p3 (id int, r int NOT NULL, PRIMARY KEY (id, r)); INSERT INTO p3 VALUES (3, 3);"
            "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES IN (3)"
        ),
    ),
    "attached again": (
        (
            "ALTER TABLE p DETACH PARTITION p1; INSERT INTO p1 VALUES (9, 1);"
            "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES IN (1)"
        ),
    ),
    "is unlogged": ("ALTER PUBLICATION pub DROP TABLE t", "ALTER TABLE t SET UNLOGGED"),
    "no longer contains the table": ("ALTER PUBLICATION pub DROP TABLE t",),
    "removed the table and added it again": ("ALTER PUBLICATION pub DROP TABLE t", "ALTER PUBLICATION pub ADD TABLE t"),
}
"""Reason of the mark, and what is done to one table or to its place in the publication."""
OF_ALL: dict[str, tuple[LiteralString, ...]] = {
    "now publishes insert": ("ALTER PUBLICATION pub SET (publish = 'insert')",),
    "altered back": (
        "ALTER PUBLICATION pub SET (publish = 'insert')",
        "ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')",
    ),
    "created again": ("DROP PUBLICATION pub", "CREATE PUBLICATION pub FOR TABLE t, other, p"),
    "row filter": ("ALTER PUBLICATION pub SET TABLE t WHERE (id > 1), other, p",),
    "column list": ("ALTER PUBLICATION pub SET TABLE t (id, a), other, p",),
}
"""Reason of the mark, and what is done to the publication."""
HARMLESS: dict[str, tuple[LiteralString, ...]] = {
    "vacuum full": ("VACUUM FULL t", "VACUUM FULL p1"),
    "cluster": ("CLUSTER t USING t_pkey",),
    "truncate": ("TRUNCATE t", "INSERT INTO t VALUES (2, 'y', 2, 'ok')"),
    "truncate of the root": ("TRUNCATE p",),
    "a constant default": ("ALTER TABLE t ADD COLUMN late int DEFAULT 7", "INSERT INTO t VALUES (2)"),
    "a new label": ("ALTER TYPE mood ADD VALUE 'fine' BEFORE 'ok'",),
    "a new partition": ("CREATE TABLE p3 PARTITION OF p FOR VALUES IN (3)", "INSERT INTO p VALUES (3, 3)"),
    "an empty partition": (
        "CREATE TABLE p3 (id int, r int NOT NULL, PRIMARY KEY (id, r))",
        "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES IN (3)",
    ),
    "another table published": ("CREATE TABLE fresh (id int)", "ALTER PUBLICATION pub ADD TABLE fresh"),
    "statistics": ("ALTER TABLE t ALTER a SET STATISTICS 7", "ANALYZE t", "REINDEX TABLE t"),
    "an index": ("CREATE INDEX ON t (a)", "ALTER TABLE t ALTER a SET NOT NULL"),
}


UNSENT: dict[str, tuple[LiteralString, ...]] = {
    "a computed column": ("ALTER TABLE d ADD late int GENERATED ALWAYS AS (b * 3) STORED",),
    "a virtual column": ("ALTER TABLE d ADD late int GENERATED ALWAYS AS (b * 3) VIRTUAL",),
    "a default": ("ALTER TABLE d ALTER b SET DEFAULT 7",),
    "storage": ("ALTER TABLE d ALTER b SET STORAGE PLAIN",),
    "a sequence": ("ALTER SEQUENCE numbers RESTART WITH 1000",),
    "the default of a domain": ("ALTER DOMAIN price SET DEFAULT 5",),
    "a check of a domain": ("ALTER DOMAIN price ADD CHECK (value < 1000000)",),
}
COMPUTED: LiteralString = "CREATE TABLE d (id int PRIMARY KEY, b int, g int GENERATED ALWAYS AS (b * 2) STORED)"
SENT: tuple[LiteralString, ...] = (
    "CREATE PUBLICATION pub WITH (publish_via_partition_root, publish_generated_columns = stored)",
    "COMMENT ON PUBLICATION pub IS 'made by cdc for pipeline '",
)


def states(session: DecodingSession) -> dict[str, tuple[TableState, str | None]]:
    session.check_catalog()
    return {schema.name: (schema.state, schema.reason) for schema in session.versions}


def made(database: str) -> None:
    run_sql(database, *TABLES)


def changed(
    database: str, tables: tuple[LiteralString, ...], changes: Mapping[str, tuple[LiteralString, ...]]
) -> dict[str, dict[str, tuple[TableState, str]]]:
    """Do each of the changes to tables of its own, all of them in one stream; what was found, by change and table."""
    schemas = {name: f"case_{number}" for number, name in enumerate(changes)}
    for schema in schemas.values():
        run_sql(database, f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
        run_sql(within(database, schema), *tables)
    with decoding_session(database, "case_*.*") as session:
        session.check_catalog()
        for name, schema in schemas.items():
            run_sql(within(database, schema), *changes[name])
        session.catch_up()
        session.check_catalog()
        found = {(version.schema, version.name): version for version in session.versions}
    return {
        name: {
            table: (version.state, version.reason or "") for (where, table), version in found.items() if where == schema
        }
        for name, schema in schemas.items()
    }


def check_marked(found: Mapping[str, Mapping[str, tuple[TableState, str]]], reason: str) -> None:
    """Check that table `d` needs a resync after both changes, and that the table's reason has a text."""
    for name in ("written", "quiet"):
        state, given = found[name]["d"]
        assert state is TableState.NEEDS_RESYNC, name
        assert reason in given, name


QUICK = {"altered back", "row filter"}


def test_an_unstreamed_change_of_rows_marks_its_table_and_says_why(either_database: str) -> None:
    for reason, found in changed(either_database, TABLES, DRIFTS).items():
        marked = {name: why for name, (state, why) in found.items() if state is TableState.NEEDS_RESYNC}
        assert len(marked) == 1, (reason, found)
        assert all(reason in why for why in marked.values()), (reason, marked)


@pytest.mark.parametrize(
    "reason", [pytest.param(reason, marks=() if reason in QUICK else pytest.mark.slow) for reason in OF_ALL]
)
def test_a_change_of_the_publication_marks_the_tables_of_which_it_may_have_left_out_rows(
    either_database: str, reason: str
) -> None:
    made(either_database)
    with decoding_session(either_database) as session:
        session.check_catalog()
        session.run(*OF_ALL[reason])
        found = states(session)

    marked = {name: why for name, (state, why) in found.items() if state is TableState.NEEDS_RESYNC}
    assert marked
    assert all(reason in (why or "") for why in marked.values()), marked


def test_a_statement_that_keeps_every_row_marks_nothing(either_database: str) -> None:
    for name, found in changed(either_database, TABLES, HARMLESS).items():
        assert {state for state, _ in found.values()} <= {TableState.LIVE}, (name, found)


def test_a_check_of_the_catalogue_reports_a_dropped_table(either_database: str) -> None:
    made(either_database)
    with decoding_session(either_database) as session:
        session.run("DROP TABLE other")
        found = states(session)

    assert found["other"] == (TableState.DROPPED, "the table no longer exists at the source")


def test_a_table_that_moved_to_another_schema_is_renamed_without_a_row(either_database: str) -> None:
    made(either_database)
    with decoding_session(either_database) as session:
        session.run("INSERT INTO other VALUES (1)", "CREATE SCHEMA store", "ALTER TABLE other SET SCHEMA store")
        session.catch_up()
        session.check_catalog()
        session.run("INSERT INTO store.other VALUES (2)")
        rows = session.catch_up()

    assert [row["topic"] for row in rows if row["op"] == "c"] == ["store.other"]
    assert session.latest.state is TableState.LIVE


def test_a_rewrite_after_the_copy_is_found_by_the_fingerprint_of_the_copy(either_database: str) -> None:
    made(either_database)
    with decoding_session(either_database) as session:  # its schemas are those of the copy, no look was made since
        session.run("ALTER TABLE t ALTER b TYPE int USING b * 2")
        session.run("INSERT INTO t VALUES (2, 'y', 2, 'ok')")
        session.catch_up()

    assert session.latest.state is TableState.NEEDS_RESYNC
    assert "altered" in (session.latest.reason or "")


def test_a_column_that_is_no_longer_generated_marks_the_table_in_the_stream_and_in_the_catalogue(
    either_database: str,
) -> None:
    """One of the tables is written after the change, of the other the stream says nothing."""
    alter: LiteralString = "ALTER TABLE d ALTER g DROP EXPRESSION"
    found = changed(
        either_database,
        (COMPUTED, "INSERT INTO d VALUES (1, 1)"),
        {"written": (alter, "INSERT INTO d VALUES (2, 2, 5)"), "quiet": (alter,)},
    )

    check_marked(found, "generated")


def test_a_computed_column_that_is_sent_and_comes_later_marks_the_table_in_the_stream_and_in_the_catalogue(
    database: str,
) -> None:
    run_sql(database, *SENT)
    late: LiteralString = "ALTER TABLE d ADD late int GENERATED ALWAYS AS (b * 3) STORED"
    found = changed(
        database,
        (COMPUTED, "INSERT INTO d VALUES (1, 1)"),
        {"written": (late, "INSERT INTO d VALUES (2, 2)"), "quiet": (late,)},
    )

    check_marked(found, "for old rows")


def test_a_change_of_unsent_values_marks_nothing(database: str) -> None:
    tables: tuple[LiteralString, ...] = (
        COMPUTED,
        "CREATE SEQUENCE numbers",
        "CREATE DOMAIN price AS int DEFAULT 1",
        "ALTER TABLE d ADD p price, ADD n int DEFAULT nextval('numbers')",
        "INSERT INTO d VALUES (1, 1)",
    )
    row: LiteralString = "INSERT INTO d (id, b) VALUES (2, 2)"
    found = changed(database, tables, {name: (*change, row) for name, change in UNSENT.items()})

    for name, states_of in found.items():
        assert set(states_of.values()) <= {(TableState.LIVE, "")}, (name, states_of)
