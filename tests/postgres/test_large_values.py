"""Large values: exact as far as the server can send them, and beyond that a clear error.

The server sends a row as one message and a value as one text, each below 1 GiB: a bytea, two letters a byte, ends
below 512 MiB. Here a value costs about six times its size in memory for a moment.
"""

from __future__ import annotations

import hashlib

import pytest

from cdc.errors import Reaction, UndecodableWal, UnreadableRow
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_table
from cdc.postgres.sqlstate import classify_message
from cdc.postgres.tables import match_tables, read_schema
from tests.fixtures.postgres import rows_of, run_sql
from tests.postgres.four_readings import capture_stream, copy_rows

LARGE = 64 << 20
"""Bytes."""


@pytest.mark.slow
def test_a_value_of_64_mib_is_exact(any_database: str):
    run_sql(any_database, "CREATE TABLE t (v text, b bytea)")
    with capture_stream(any_database) as capture:
        with connect(any_database) as conn:
            conn.execute(
                "INSERT INTO t SELECT s, convert_to(s, 'UTF8') FROM (SELECT left(repeat('aé\t\\漢', %s), %s) s) x",
                [LARGE // 4, LARGE // 2],
            )
            schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
        row = rows_of(any_database, "SELECT md5(v), md5(b::text) FROM t")[0]
        frames = capture.frames()
        assert schema is not None
        for told in (capture.rows(ColumnarDecoder(), frames).to_pylist(), copy_rows(any_database, schema)):
            after = dict(told[0]["after"])
            assert tuple(hashlib.md5(after[place].encode()).hexdigest() for place in (1, 2)) == row


@pytest.mark.slow
def test_a_bytea_of_512_mib_is_refused_by_the_server_and_the_error_says_why(any_database: str):
    run_sql(any_database, "CREATE TABLE t (b bytea)")
    with capture_stream(any_database) as capture, connect(any_database) as conn:
        conn.execute("INSERT INTO t SELECT convert_to(repeat('x', 536870912), 'UTF8')")
        with pytest.raises(UndecodableWal, match="XX000") as streamed:
            capture.frames()
        assert "too large to be sent as text" in streamed.value.fix
        schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
        assert schema is not None
        with pytest.raises(UnreadableRow, match=r"a row of 'public\.t'") as copied:
            list(copy_table(conn, schema))
        assert "find it: " in copied.value.fix


@pytest.mark.parametrize(
    ("sqlstate", "text"),
    [
        ("XX000", "invalid memory alloc request size 1073741827"),
        ("54000", "out of memory"),
        ("54000", "string buffer exceeds maximum allowed length (1073741823 bytes)"),
    ],
)
def test_server_errors_for_too_large_values_have_a_remedy(sqlstate: str, text: str):
    found = classify_message(sqlstate, text)
    assert type(found) is UndecodableWal
    assert found.reaction is Reaction.HALT
    assert "512 MiB" in found.fix
