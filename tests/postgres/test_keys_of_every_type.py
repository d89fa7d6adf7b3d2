"""Keys of every type that can be a key: a listed key, a range and a walk select their rows, whatever the text is."""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.backfill_selection import check_keys, missing_keys
from cdc.postgres.chunk_queries import KeyBounds, key_range_query, snapshot_transaction
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_rows
from cdc.postgres.publication import ensure_publication
from cdc.postgres.tables import match_tables, read_schema
from cdc.table import TableSchema
from tests.fixtures.postgres import run_sql
from tests.postgres.samples import SAMPLES

DEFINED: Final = (
    "CREATE TYPE mood AS ENUM ('low', 'Über', 'a,b')",
    'CREATE SCHEMA "s.S"',
    'CREATE TYPE "s.S"."pair""s" AS (a int, "b c" text)',
    'CREATE TYPE nested AS (p "s.S"."pair""s", m mood)',
    'CREATE DOMAIN paired AS "s.S"."pair""s" CHECK ((VALUE).a > 0)',
    "CREATE DOMAIN paired_again AS paired",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    'CREATE TYPE pairs AS RANGE (SUBTYPE = "s.S"."pair""s", MULTIRANGE_TYPE_NAME = many_pairs)',
)
CONTAINERS: Final = {
    "mood": ("low", "Über", "a,b"),
    "positive": ("1", "2"),
    '"s.S"."pair""s"': ("(1,x)", '(2,"a,""b"" \\\\")', "(,)", '(3,"")'),
    "nested": ('("(1,x)",low)', '("(,\\"a b\\")","a,b")'),
    "paired": ("(1,x)", '(2,"a,b")'),
    "paired_again": ("(1,x)", '(2,"a,b")'),
    "pairs": ('["(1,x)","(2,y)")', "empty", '("(1,x)",)'),
    "many_pairs": ('{["(1,x)","(2,y)")}', "{}"),
    '"s.S"."pair""s"[]': ('{"(1,x)",NULL}', "{}"),
    "int[]": ("{}", "{1,NULL}", "[2:3]={1,2}"),
    "mood[]": ('{"a,b",low}',),
    "positive[]": ("{1,2}",),
    "int4range": ("[1,5)", "empty", "(,)"),
    "int4multirange": ("{[1,5),[7,9)}", "{}"),
    "numrange": ("[1.0,2.50]",),
}
LONGEST: Final = 500
"""Characters of a value; longer ones do not fit into an index."""


def schema_of(conn: psycopg.Connection[Any]) -> TableSchema:
    ((oid, name),) = match_tables(conn, ["public.t"])
    ensure_publication(conn, "pub", [name])
    schema = read_schema(conn, oid, publication="pub")
    assert schema is not None
    return schema


def read(conn: psycopg.Connection[Any], schema: TableSchema, bounds: KeyBounds) -> list[tuple[str, ...]]:
    """The keys of the selected rows, in their order."""
    decoder = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    with snapshot_transaction(conn, schema):
        chunks = list(copy_rows(conn, key_range_query(conn, schema, bounds, 1_000, "pub")))
    batches = [batch for chunk in chunks if (batch := decoder.feed(chunk)) is not None]
    return [tuple(row["key"]) for batch in batches for row in batch.to_pylist()]


def filled(conn: psycopg.Connection[Any], kind: str, values: tuple[str, ...]) -> bool:
    """Make the table with a key of this type and its values; False if the type cannot be a key."""
    conn.execute("DROP TABLE IF EXISTS t")
    try:
        conn.execute(sql.SQL("CREATE TABLE t (k {} NOT NULL, n int, PRIMARY KEY (k, n))").format(sql.SQL(kind)))
    except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidTableDefinition):
        return False
    insert = sql.SQL("INSERT INTO t VALUES ({}::{}, {})")
    for number, value in enumerate(values):
        if len(value) <= LONGEST:
            conn.execute(insert.format(sql.Literal(value), sql.SQL(kind), sql.Literal(number)))
    return True


def wrong_selections(conn: psycopg.Connection[Any], schema: TableSchema) -> list[Any]:
    """What each way to select rows by key gets wrong."""
    wrong: list[Any] = []
    keys = read(conn, schema, KeyBounds())
    absent = [(k, "999") for k, _ in keys]
    check_keys(conn, schema, [*keys, *absent])
    if (missing := sorted(missing_keys(conn, schema, [*keys, *absent], "pub"))) != sorted(set(absent)):
        wrong.append(("missing", missing))
    for place, key in enumerate(keys):
        for name, bounds, expected in (
            ("listed", KeyBounds(keys=(key, (key[0], "999"))), [key]),
            ("range", KeyBounds(first=key, last=key), [key]),
            ("after", KeyBounds(after=key), keys[place + 1 :]),
        ):
            if (selected := read(conn, schema, bounds)) != expected:
                wrong.append((name, key, selected))
    return wrong


def test_keys_of_every_type_select_their_rows(database: str) -> None:
    run_sql(database, *DEFINED)  # type: ignore[arg-type]
    failures, tried = {}, 0
    with connect(database) as conn:
        for kind, values in {**SAMPLES, **CONTAINERS}.items():
            if not filled(conn, kind, values):
                continue
            tried += 1
            try:
                wrong = wrong_selections(conn, schema_of(conn))
            except Exception as exc:
                wrong = [repr(exc)]
            if wrong:
                failures[kind] = wrong
    assert not failures, "\n".join(f"{kind}: {wrong}" for kind, wrong in failures.items())
    assert tried > len(CONTAINERS) + 20
