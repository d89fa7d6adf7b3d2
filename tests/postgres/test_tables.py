"""Pattern matching, schemas from the catalogue, and Relation messages of a stream that is behind the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import LiteralString

import pytest

from cdc.lsn import Lsn
from cdc.pgoutput.messages import CommitMessage, Relation
from cdc.postgres.column_identity import schema_from_ddl
from cdc.postgres.connection import connect
from cdc.postgres.publication import ensure_publication
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.system_catalog import Attribute, CatalogTable
from cdc.postgres.tables import TableName, match_tables, read_schema, resolve_relation, table_schema
from cdc.table import UNPROVED, ReplicaIdentity, TableSchema, TableState
from tests.fixtures.postgres import run_sql
from tests.postgres.stream import receive_until, relations

TABLE = "CREATE TABLE t (id int PRIMARY KEY, a text, b int)"


def seen(dsn: str, *changes: LiteralString, table: LiteralString = TABLE) -> tuple[TableSchema, list[Relation]]:
    """The schema at first, and the Relation messages of the changes, when the catalogue shows all of them."""
    run_sql(dsn, table)
    slot = dsn.rpartition("/")[2]
    with connect(dsn) as conn:
        ensure_publication(conn, "pub", [TableName("public", "t")])
        with create_slot(dsn, slot):
            pass
        first = schema_of(dsn)
        run_sql(dsn, *changes)
    # DDL gives empty transactions, which are not sent: only INSERTs count
    commits = sum(change.startswith("INSERT") for change in changes)
    with ReplicationStream.open(dsn, StreamOptions(slot=slot, publication="pub", start=Lsn(0))) as stream:
        messages = receive_until(stream, lambda got: sum(isinstance(m, CommitMessage) for m in got) >= commits)
    return first, relations(messages)


def schema_of(dsn: str) -> TableSchema:
    with connect(dsn) as conn:
        ((oid, _),) = match_tables(conn, ["public.t"])
        schema = read_schema(conn, oid)
    assert schema is not None
    return schema


def resolved(dsn: str, first: TableSchema | None, messages: Sequence[Relation]) -> list[TableSchema]:
    versions, known = [], first
    with connect(dsn) as conn:
        for message in messages:
            known = resolve_relation(conn, message, known)
            versions.append(known)
    return versions


def columns(schema: TableSchema) -> list[tuple[int, str]]:
    return [(c.id, c.name) for c in schema.columns]


def test_patterns_are_globs_and_exclusions_win(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.orders (id int, region text) PARTITION BY LIST (region)",
        "CREATE TABLE shop.orders_eu PARTITION OF shop.orders FOR VALUES IN ('eu')",
        'CREATE TABLE shop."Odd Name" (id int)',
        "CREATE TABLE shop.secrets (id int)",
        "CREATE UNLOGGED TABLE shop.scratch (id int)",
        "CREATE VIEW shop.v AS SELECT 1",
    )
    with connect(any_database) as conn:
        found = match_tables(conn, ["shop.*"], ["*.secrets"])

    assert sorted(str(name) for _, name in found) == ["shop.Odd Name", "shop.orders"]


def test_a_schema_shows_key_order_domains_defaults_and_computed_columns(any_database: str) -> None:
    run_sql(
        any_database,
        "CREATE DOMAIN price AS numeric(10,2)",
        "CREATE DOMAIN offer AS price CHECK (VALUE > 0)",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE t (a int, gone int, b int, p offer, m mood[], g int GENERATED ALWAYS AS (a * 2) STORED, "
        "PRIMARY KEY (b, a) INCLUDE (p))",
        "ALTER TABLE t DROP COLUMN gone",
        "ALTER TABLE t ADD COLUMN late text DEFAULT 'ü, \"x\"'",
    )
    schema = schema_of(any_database)
    by_name = {c.name: c for c in schema.columns}

    assert columns(schema) == [(1, "a"), (3, "b"), (4, "p"), (5, "m"), (6, "g"), (7, "late")]
    assert [c.name for c in schema.key] == ["b", "a"]
    assert by_name["p"].value_type == (1700, (10 << 16 | 2) + 4)
    assert by_name["p"].type_name == "public.offer"
    assert by_name["m"].type_name == "public.mood[]"
    assert by_name["late"].missing == 'ü, "x"'
    assert by_name["late"].default == "'ü, \"x\"'::text"
    assert by_name["g"].default == "(a * 2)"
    assert by_name["m"].labels == ("sad", "ok")
    assert schema.root is None
    assert [c.name for c in schema.sent] == ["a", "b", "p", "m", "late"]


def test_the_key_follows_the_replica_identity(database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, b int NOT NULL, a int NOT NULL)",
        "CREATE UNIQUE INDEX other ON t (a, b)",
    )
    keys: dict[LiteralString, list[str]] = {
        "FULL": ["id"],
        "NOTHING": [],
        "USING INDEX other": ["a", "b"],
        "DEFAULT": ["id"],
    }
    for identity, key in keys.items():
        run_sql(database, "ALTER TABLE t REPLICA IDENTITY " + identity)
        assert [c.name for c in schema_of(database).key] == key


def test_a_table_that_is_gone_has_no_schema(database: str) -> None:
    with connect(database) as conn:
        assert read_schema(conn, 1) is None


def test_an_unchanged_table_is_exact_at_first_sight(either_database: str) -> None:
    first, messages = seen(either_database, "INSERT INTO t VALUES (1)")
    assert resolved(either_database, None, messages) == [replace(first, standing=None)]
    assert resolved(either_database, first, messages) == [first]


def test_each_of_several_versions_is_found_when_the_catalogue_is_ahead(any_database: str) -> None:
    first, messages = seen(
        any_database,
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ADD COLUMN c text DEFAULT 'old'",
        "INSERT INTO t VALUES (2)",
        "ALTER TABLE t RENAME COLUMN a TO spare",
        "ALTER TABLE t RENAME COLUMN b TO a",
        "INSERT INTO t VALUES (3)",
        "ALTER TABLE t RENAME COLUMN spare TO b",
        "INSERT INTO t VALUES (4)",
    )
    versions = resolved(any_database, first, messages)

    assert [columns(v) for v in versions] == [
        [(1, "id"), (2, "a"), (3, "b")],
        [(1, "id"), (2, "a"), (3, "b"), (4, "c")],
        [(1, "id"), (2, "spare"), (3, "a"), (4, "c")],
        [(1, "id"), (2, "b"), (3, "a"), (4, "c")],
    ]
    assert [v.state for v in versions] == [TableState.LIVE] * 4
    assert versions[1].column("c").missing == "old"  # type: ignore[union-attr]
    assert versions[-1].columns == schema_of(any_database).columns


def test_a_column_added_and_dropped_between_two_versions_is_identified_by_counting(either_database: str) -> None:
    first, messages = seen(
        either_database,
        "ALTER TABLE t ADD COLUMN brief int",
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t DROP COLUMN brief",
        "INSERT INTO t VALUES (2)",
    )
    versions = resolved(either_database, first, messages)

    assert columns(versions[0]) == [(1, "id"), (2, "a"), (3, "b"), (4, "brief")]
    assert versions[1] == first.following(versions[0])


def test_a_column_dropped_and_added_again_under_its_name_is_another_column(either_database: str) -> None:
    first, messages = seen(
        either_database,
        "ALTER TABLE t DROP COLUMN b",
        "ALTER TABLE t ADD COLUMN b int",
        "INSERT INTO t VALUES (1)",
    )
    (version,) = resolved(either_database, first, messages)

    assert columns(version) == [(1, "id"), (2, "a"), (1603, "b")]
    assert version.state is TableState.NEEDS_RESYNC


def test_a_column_is_not_taken_for_another_that_has_its_name_now(either_database: str) -> None:
    first, messages = seen(
        either_database,
        "ALTER TABLE t DROP COLUMN b",
        "ALTER TABLE t ADD COLUMN b int",
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t RENAME COLUMN b TO late",
    )
    (version,) = resolved(either_database, first, messages)

    assert columns(version) == [(1, "id"), (2, "a"), (1603, "b")]
    assert version.state is TableState.NEEDS_RESYNC


UNSTREAMED: tuple[LiteralString, ...] = (
    "ALTER TABLE {} ALTER COLUMN b TYPE text USING 'x' || b",
    "ALTER TABLE {} ADD COLUMN c float8 DEFAULT random()",
    "ALTER TABLE {} ADD COLUMN c int GENERATED ALWAYS AS IDENTITY",
    "ALTER TABLE {0} DROP CONSTRAINT {0}_pkey, ALTER COLUMN b SET NOT NULL, ADD PRIMARY KEY (id, b)",
)


def test_a_change_that_the_stream_does_not_contain_needs_a_resync(either_database: str) -> None:
    slot = either_database.rpartition("/")[2]
    names = [TableName("public", f"t{number}") for number in range(len(UNSTREAMED))]
    with connect(either_database) as conn:
        for table in names:
            conn.execute(TABLE.replace("TABLE t", f"TABLE {table.name}").encode())
        ensure_publication(conn, "pub", names)
        with create_slot(either_database, slot):
            pass
        first = {oid: read_schema(conn, oid) for oid, _ in match_tables(conn, ["public.*"])}
        for change, table in zip(UNSTREAMED, names, strict=True):
            conn.execute(change.format(table.name).encode())
            conn.execute(f"INSERT INTO {table.name} VALUES (1, 'a', 2)".encode())
    with ReplicationStream.open(either_database, StreamOptions(slot=slot, publication="pub", start=Lsn(0))) as stream:
        messages = relations(
            receive_until(stream, lambda got: sum(isinstance(m, CommitMessage) for m in got) >= len(names))
        )

    assert [message.name for message in messages] == [table.name for table in names]
    for message in messages:
        (version,) = resolved(either_database, first[message.oid], [message])
        assert version.state is TableState.NEEDS_RESYNC, message.name
        assert version.reason


def test_a_mark_stays_until_somebody_takes_it_away(database: str) -> None:
    first, messages = seen(database, "INSERT INTO t VALUES (1)")
    marked = first.flagged(TableState.NEEDS_RESYNC, "why")

    assert resolved(database, marked, messages) == [marked]


def test_a_dropped_table_is_known_from_before_or_needs_a_resync(either_database: str) -> None:
    first, messages = seen(either_database, "INSERT INTO t VALUES (1)", "DROP TABLE t")

    assert resolved(either_database, first, messages)[0].columns == first.columns
    (unknown,) = resolved(either_database, None, messages)
    assert unknown.state is TableState.NEEDS_RESYNC
    assert [c.name for c in unknown.key] == ["id"]


def test_longer_text_types_need_no_resync(database: str) -> None:
    table: LiteralString = "CREATE TABLE t (id int PRIMARY KEY, a varchar(5), b numeric(4, 1))"
    first, messages = seen(
        database, "ALTER TABLE t ALTER a TYPE varchar(9), ALTER b TYPE numeric(9, 1)", "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ALTER a TYPE text", "INSERT INTO t VALUES (2)", table=table,
    )  # fmt: skip

    assert [v.state for v in resolved(database, first, messages)] == [TableState.LIVE] * 2


def test_a_partitioned_table_is_seen_as_its_root(either_database: str) -> None:
    table: LiteralString = (
        "CREATE TABLE t (id int, r text, PRIMARY KEY (id, r)) PARTITION BY LIST (r);"
        "CREATE TABLE leaf PARTITION OF t FOR VALUES IN ('eu')"
    )
    first, messages = seen(
        either_database, "ALTER TABLE t ADD COLUMN c int DEFAULT 7", "INSERT INTO t VALUES (1, 'eu')", table=table
    )
    # the leaf is announced as well, though no row comes under its name
    (version,) = resolved(either_database, first, [message for message in messages if message.oid == first.oid])

    assert version.topic == "public.t"
    assert version.root == version.oid
    assert version.state is TableState.LIVE
    assert version.column("c").missing == "7"  # type: ignore[union-attr]


@pytest.mark.parametrize("names", [("id", "pub", "secret"), ("id", "hidden", "pub", "secret")])
def test_a_name_that_another_column_has_in_a_later_epoch_proves_nothing(names: tuple[str, ...]) -> None:
    earlier = catalogued("id", "secret", "pub")
    old = replace(table_schema(earlier, 77, 77), oid=16384)

    version = schema_from_ddl(catalogued(*names), old, 16384, epoch=1)

    assert version.state is TableState.NEEDS_RESYNC
    assert {c.id for c in version.columns}.isdisjoint({1, 2, 3})
    assert {name for number, name in version.former_names if number >= UNPROVED} >= {"secret", "pub"}


def catalogued(*names: str) -> CatalogTable:
    """A table in the system catalogs with these columns."""
    attributes = [
        Attribute(
            number=number,
            name=name,
            dropped=False,
            type_oid=25,
            typmod=-1,
            not_null=False,
            generated=False,
            has_default=False,
            default=None,
            type=None,
            missing=None,
        )
        for number, name in enumerate(names, 1)
    ]
    return CatalogTable("public", "t", ReplicaIdentity.DEFAULT, tuple(attributes), key=(1,))


def test_a_later_epoch_finds_columns_by_name_and_numbers_new_ones_above_all(database: str) -> None:
    run_sql(database, "CREATE TABLE t (b int, id int PRIMARY KEY, fresh text)")
    now = schema_of(database)
    old = replace(
        now, relation=77, oid=77, columns=tuple(replace(c, id=c.id + 3) for c in now.columns if c.name != "fresh")
    )
    slot = database.rpartition("/")[2]
    with connect(database) as conn:
        ensure_publication(conn, "pub", [TableName("public", "t")])
    with create_slot(database, slot):
        pass
    run_sql(database, "INSERT INTO t VALUES (1, 2)")
    with ReplicationStream.open(database, StreamOptions(slot=slot, publication="pub", start=Lsn(0))) as stream:
        (message,) = relations(receive_until(stream, lambda got: any(isinstance(m, CommitMessage) for m in got)))
    with connect(database) as conn:
        version = resolve_relation(conn, message, old, epoch=1)

    assert version.relation == 77
    assert columns(version) == [(4, "b"), (5, "id"), (1601, "fresh")]
    assert version.oid == now.oid
