"""Definitions of tables in the system catalogue: dropped columns, key order, types that are not built in."""

from __future__ import annotations

from cdc.postgres.connection import connect
from cdc.postgres.system_catalog import read_catalog_tables, read_types, unknown_type
from cdc.table import ReplicaIdentity
from tests.fixtures.postgres import run_sql


def test_a_table_has_its_dropped_columns_and_its_key_in_index_order(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (a int, b text, c int NOT NULL, d int GENERATED ALWAYS AS (a * 2) STORED, PRIMARY KEY (c, a))",
        "ALTER TABLE t DROP COLUMN b",
        "ALTER TABLE t ADD COLUMN e text DEFAULT 'old'",
    )
    with connect(database) as conn:
        ((oid,),) = conn.execute("SELECT 't'::regclass::oid::bigint").fetchall()
        table = read_catalog_tables(conn, [oid, 1])[oid]

    assert (table.schema, table.name, table.replica_identity) == ("public", "t", ReplicaIdentity.DEFAULT)
    assert [(a.number, a.dropped) for a in table.attributes] == [
        (1, False), (2, True), (3, False), (4, False), (5, False)
    ]  # fmt: skip
    assert [a.name for a in table.live] == ["a", "c", "d", "e"]
    assert table.key == (3, 1)
    assert [a.generated for a in table.live] == [False, False, True, False]
    assert table.live[-1].missing == "old"


def test_a_domain_has_its_base_type_and_an_enum_its_labels(database: str) -> None:
    run_sql(
        database,
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN short AS varchar(9)",
        "CREATE DOMAIN shorter AS short",
    )
    with connect(database) as conn:
        oids = [oid for (oid,) in conn.execute("SELECT unnest(ARRAY['mood', 'shorter']::regtype[])::oid::bigint")]
        types = read_types(conn, [*oids, 1])

    mood, shorter = (types[oid] for oid in oids)
    assert (mood.name, mood.kind, mood.labels) == ("public.mood", "e", ("sad", "ok"))
    assert (shorter.name, shorter.kind, shorter.base, shorter.base_typmod) == ("public.shorter", "d", 1043, 9 + 4)
    assert 1 not in types
    assert unknown_type(1).name == "oid 1"
