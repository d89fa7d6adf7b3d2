"""Ranges of keys at the source: what the server says of rows is what the rows themselves say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.key_range_digests import (
    Digest,
    DigestColumn,
    KeyRange,
    count_rows,
    digest_rows,
    is_ordered_by_bytes,
    next_range_start,
    range_rows,
)
from cdc.postgres.tables import match_tables, read_schema
from cdc.table import Column, TableSchema
from pipelines.verification.canonical_text import source_batch
from pipelines.verification.checksum import digest_column, digest_of
from tests.postgres.samples import SAMPLES

KINDS = {
    "float4": pa.float32(),
    "float8": pa.float64(),
    "numeric(20,4)": pa.decimal128(20, 4),
}
MORE = {"numeric(20,4)": ("1.5", "-0.0001", "0")}


@pytest.fixture
def conn(database: str) -> Iterator[Any]:
    with connect(database) as opened:
        yield opened


def schema_of(conn: Any, name: str) -> TableSchema:
    ((oid, _),) = match_tables(conn, [f"public.{name}"])
    found = read_schema(conn, oid)
    assert found is not None
    return found


def digests(conn: Any, schema: TableSchema, kinds: list[pa.DataType]) -> tuple[Digest, Digest]:
    """The server's, and that of the rows that COPY sends."""
    columns = [digest_column(c, kind) for c, kind in zip(schema.sent, kinds, strict=True)]
    server = digest_rows(conn, schema, "none", [column for column in columns if column is not None])
    decoder = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    batches = map(decoder.feed, range_rows(conn, schema, "none", None))
    return server, digest_of(source_batch(b, range(len(kinds)), kinds) for b in batches if b is not None)


def test_the_digest_of_the_server_is_that_of_the_rows_that_copy_sends_for_values_of_every_type(conn: Any) -> None:
    different = []
    samples = {**SAMPLES, **MORE}
    del samples["xml"]  # an option of the server's build, and text as any other
    for place, (kind, values) in enumerate(samples.items()):
        conn.execute(f"CREATE TABLE s{place} (id int PRIMARY KEY, v {kind})")
        for number, value in enumerate((*values, None)):
            conn.execute(f"INSERT INTO s{place} VALUES (%s, %s)", [number, value])
        server, copied = digests(conn, schema_of(conn, f"s{place}"), [pa.int32(), KINDS.get(kind, pa.string())])
        if server != copied or server.rows != len(values) + 1:
            different.append(kind)
    assert different == []


def test_digests_differ_for_different_values_with_the_same_characters(conn: Any) -> None:
    seen = set()
    for rows in (
        "(NULL, '')",
        "('', NULL)",
        "('ab', 'c')",
        "('a', 'bc')",
        "('-', '1:a')",
        "('1:a', '-')",
        "('a','b'),('a','b')",
    ):
        conn.execute("DROP TABLE IF EXISTS pair; CREATE TABLE pair (a text, b text)")
        conn.execute(f"INSERT INTO pair VALUES {rows}")
        server, copied = digests(conn, schema_of(conn, "pair"), [pa.string(), pa.string()])
        assert server == copied
        seen.add(server)
    assert len(seen) == 7


def test_types_that_server_and_target_print_differently_have_no_digest() -> None:
    money = Column(id=1, name="a", type_oid=1700, type_name="numeric", typmod=(20 << 16 | 4) + 4)
    assert digest_column(money, pa.decimal128(20, 4)) == DigestColumn("a")
    assert digest_column(money, pa.decimal128(20, 5)) is None
    assert digest_column(replace(money, typmod=-1), pa.decimal128(20, 4)) is None
    text = Column(id=1, name="a", type_oid=25, type_name="text")
    none = (pa.float64(), pa.decimal128(4, 2), pa.list_(pa.float32()), pa.struct([("a", pa.string())]))
    assert [digest_column(text, kind) for kind in none] == [None] * 4
    assert digest_column(text, pa.list_(pa.list_(pa.string()))) == DigestColumn("a")


@pytest.mark.parametrize(
    ("column", "values", "ends"),
    [
        ("k int, n int", "(1,1),(2,1),(2,2),(2,3),(2,4),(7,1),(9,1)", ["2", "7", None]),
        ('k text COLLATE "C", n int', "('Z',1),('a',1),('a''b',1),('é',1),('é',2)", ["a'b", "é", None]),
        (
            "k uuid, n int",
            "('00000000-0000-0000-0000-00000000000a',1),('ffffffff-ffff-ffff-ffff-ffffffffffff',1)",
            [None],
        ),
    ],
)
def test_ranges_follow_one_another_and_together_are_the_table(
    conn: Any, column: str, values: str, ends: list[str | None]
) -> None:
    conn.execute(f"CREATE TABLE keyed ({column}, PRIMARY KEY (k, n)); INSERT INTO keyed VALUES {values}")
    schema, found, first, rows = schema_of(conn, "keyed"), [], None, 0
    while True:
        within = KeyRange("k", first)
        within = KeyRange("k", first, next_range_start(conn, schema, within, 2))
        rows += count_rows(conn, schema, "none", within)
        found.append(within.ended)
        if within.ended is None:
            break
        first = within.ended
    assert found == ends
    assert rows == count_rows(conn, schema, "none")


def test_text_is_in_the_order_of_its_bytes_only_under_a_collation_that_says_so(conn: Any) -> None:
    conn.execute("CREATE COLLATION other (LOCALE = 'C.utf8')")
    conn.execute('CREATE TABLE words (a text COLLATE "C" PRIMARY KEY, b text COLLATE other, c text)')
    schema = schema_of(conn, "words")
    assert [is_ordered_by_bytes(conn, schema, name) for name in "ab"] == [True, False]
    # whatever the database has, the answer is what its own order is
    own = conn.execute("SELECT 'a' < 'B', 'é' < 'f'").fetchone()
    assert is_ordered_by_bytes(conn, schema, "c") is (own == (False, False))
