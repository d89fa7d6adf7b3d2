"""ensure_publication: what an older transaction wrote is in the snapshot that follows."""

from __future__ import annotations

from typing import LiteralString

import pytest

from cdc.errors import SlotBlocked
from cdc.postgres.connection import connect
from cdc.postgres.publication import (
    PublicationControl,
    drop_table,
    ensure_publication,
    published_rows,
    published_schemas,
)
from cdc.postgres.tables import TableName, match_tables
from tests.fixtures.postgres import rows_of, run_sql

NAMES = [TableName("public", "t")]


def test_a_table_is_not_ready_while_a_transaction_is_open_that_wrote_it_before(either_database: str) -> None:
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub")
    ours = PublicationControl(alter=True)
    with connect(either_database, autocommit=False) as older, connect(either_database) as conn:
        older.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(SlotBlocked):
            ensure_publication(conn, "pub", NAMES, control=ours, timeout=0.2)
        with pytest.raises(SlotBlocked):  # the table is in the publication by now, and still not ready
            ensure_publication(conn, "pub", NAMES, control=ours, timeout=0.2)
        older.commit()
        ensure_publication(conn, "pub", NAMES, control=ours)

        assert conn.execute("SELECT id FROM t").fetchall() == [(1,)]
    assert rows_of(either_database, "SELECT tablename FROM pg_publication_tables WHERE pubname = 'pub'") == [("t",)]


def test_a_table_is_published_and_withdrawn_without_its_children(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE wanted (PRIMARY KEY (id)) INHERITS (t)",
        "CREATE TABLE other (PRIMARY KEY (id)) INHERITS (t)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root DEFAULT",
    )
    listed: LiteralString = "SELECT tablename FROM pg_publication_tables WHERE pubname = 'pub' ORDER BY 1"
    with connect(any_database) as conn:
        ensure_publication(conn, "pub", [*NAMES, TableName("public", "root")])
        assert rows_of(any_database, listed) == [("root",), ("t",)]
        ensure_publication(conn, "pub", [TableName("public", "wanted")])
        drop_table(conn, "pub", NAMES[0])
    assert rows_of(any_database, listed) == [("root",), ("wanted",)]


def test_published_rows_are_those_of_all_partitions_and_of_no_child(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (t)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root DEFAULT",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO child VALUES (2)",
        "INSERT INTO root VALUES (3)",
    )
    names = [NAMES[0], TableName("public", "root")]
    with connect(any_database) as conn:
        ensure_publication(conn, "pub", names)
        oids = [oid for oid, name in match_tables(conn, ["public.*"]) if name in names]
        rows_of_table = published_rows(conn, "pub")
        found = {
            schema.name: b"".join(rows_of_table(schema)) for schema in published_schemas(conn, oids, "pub").values()
        }
    assert found == {"t": b"1\n", "root": b"3\n"}
