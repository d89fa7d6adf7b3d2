"""Key and images of log rows under every replica identity, from a real server, by both decoders."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.pgoutput.message_parser import parse_frame
from cdc.pgoutput.messages import UNCHANGED, Update
from cdc.postgres.connection import connect
from cdc.postgres.tables import match_tables, read_schema
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.postgres_programs import needs_version
from tests.postgres.four_readings import capture_stream, copy_rows

LONG = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n)"
"""An expression of 9,600 letters, which do not compress: stored out of line."""
OTHER = "(SELECT string_agg(md5(n::text), '') FROM generate_series(301, 600) n)"


@pytest.fixture
def values(either_database: str) -> tuple[str, str]:
    """LONG and OTHER."""
    row = rows_of(either_database, f"SELECT {LONG}, {OTHER}")[0]  # type: ignore[arg-type]
    return row[0], row[1]


def columns_of(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Those columns of the rows, maps as dicts."""
    images = {"before", "after"}
    return [tuple(dict(row[n]) if n in images and row[n] is not None else row[n] for n in names) for row in rows]


def changes(dsn: str, *statements: str) -> list[dict[str, Any]]:
    """The log rows of the statements."""
    with capture_stream(dsn) as capture:
        return capture.changes(*statements)


def test_the_key_is_that_of_the_replica_identity_and_not_the_primary_key(either_database: str):
    run_sql(
        either_database,
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE, v int)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key",
        "INSERT INTO t VALUES (1, 'a', 0)",
    )
    statements = ("UPDATE t SET id = 2", "UPDATE t SET code = 'b'", "DELETE FROM t")
    assert columns_of(changes(either_database, *statements), "op", "key", "old_key", "before", "after") == [
        ("u", ["a"], None, None, {1: "2", 2: "a", 3: "0"}),
        ("d", ["a"], None, {2: "a"}, None),
        ("u", ["b"], ["a"], {2: "a"}, {1: "2", 2: "b", 3: "0"}),
        ("d", ["b"], None, {2: "b"}, None),
    ]


def test_under_full_the_key_is_the_primary_key_and_a_change_of_it_two_rows(either_database: str):
    run_sql(
        either_database,
        "CREATE TABLE t (v int, id int PRIMARY KEY)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (0, 1)",
    )
    statements = ("UPDATE t SET v = NULL", "UPDATE t SET id = 2", "DELETE FROM t")
    assert columns_of(changes(either_database, *statements), "op", "key", "old_key", "before", "after") == [
        ("u", ["1"], None, {1: "0", 2: "1"}, {1: None, 2: "1"}),
        ("d", ["1"], None, {1: None, 2: "1"}, None),
        ("u", ["2"], ["1"], {1: None, 2: "1"}, {1: None, 2: "2"}),
        ("d", ["2"], None, {1: None, 2: "2"}, None),
    ]


def test_an_unchanged_long_value_under_full_comes_from_the_old_image(either_database: str, values: tuple[str, str]):
    run_sql(
        either_database,
        "CREATE TABLE t (id int PRIMARY KEY, v int, long text, other text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"INSERT INTO t VALUES (1, 0, {LONG}, NULL)",  # type: ignore[arg-type]
    )
    found = changes(either_database, "UPDATE t SET v = 1", f"UPDATE t SET other = {OTHER}", "UPDATE t SET id = 2")
    long, other = values
    assert columns_of(found, "op", "key", "partial", "after") == [
        ("u", ["1"], False, {1: "1", 2: "1", 3: long, 4: None}),
        ("u", ["1"], False, {1: "1", 2: "1", 3: long, 4: other}),
        ("d", ["1"], False, None),
        ("u", ["2"], False, {1: "2", 2: "1", 3: long, 4: other}),
    ]


def test_an_unchanged_long_value_is_absent_and_neither_null_nor_a_placeholder(
    either_database: str, values: tuple[str, str]
):
    run_sql(
        either_database,
        "CREATE TABLE t (id int PRIMARY KEY, v int, long text, none text)",
        f"INSERT INTO t VALUES (1, 0, {LONG}, NULL)",  # type: ignore[arg-type]
    )
    statements = (
        "UPDATE t SET v = 1",
        "UPDATE t SET id = 2",
        f"UPDATE t SET long = {OTHER}",
        "UPDATE t SET long = NULL",
    )
    assert columns_of(changes(either_database, *statements), "op", "key", "old_key", "partial", "after") == [
        ("u", ["1"], None, True, {1: "1", 2: "1", 4: None}),
        ("d", ["1"], None, False, None),
        ("u", ["2"], ["1"], True, {1: "2", 2: "1", 4: None}),
        ("u", ["2"], None, False, {1: "2", 2: "1", 3: values[1], 4: None}),
        ("u", ["2"], None, False, {1: "2", 2: "1", 3: None, 4: None}),
    ]


def test_an_unchanged_long_part_of_a_key_comes_from_the_old_key(either_database: str):
    # an index entry holds at most 2,700 bytes, so the value is stored out of line by decree
    run_sql(
        either_database,
        "CREATE TABLE t (n int, part text, v text, PRIMARY KEY (part, n))",
        "ALTER TABLE t ALTER part SET STORAGE EXTERNAL, ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t VALUES (1, repeat('k', 2200), repeat('v', 5000))",
    )
    part = "k" * 2200
    with capture_stream(either_database) as capture:
        found = capture.changes("UPDATE t SET n = 2", "DELETE FROM t")
        (update,) = [message for message in map(parse_frame, capture.received) if isinstance(message, Update)]
    assert update.new == ("2", UNCHANGED, UNCHANGED)
    assert columns_of(found, "op", "key", "old_key", "after", "partial") == [
        ("d", [part, "1"], None, None, False),
        ("u", [part, "2"], [part, "1"], {1: "2", 2: part}, True),
        ("d", [part, "2"], None, None, False),
    ]


def test_a_keyless_table_under_full_keeps_equal_rows_apart(either_database: str):
    run_sql(
        either_database,
        "CREATE TABLE t (a int, b text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (1, NULL), (1, NULL), (1, NULL)",
    )
    one = "t WHERE ctid = (SELECT min(ctid) FROM t)"
    statements = ("UPDATE t SET b = 'x' WHERE ctid = (SELECT min(ctid) FROM t)", f"DELETE FROM {one}")
    assert columns_of(changes(either_database, *statements), "op", "key", "before", "after") == [
        ("u", None, {1: "1", 2: None}, {1: "1", 2: "x"}),
        ("d", None, {1: "1", 2: None}, None),
    ]


def test_the_stream_has_the_inserts_of_a_table_without_identity(either_database: str):
    run_sql(either_database, "CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY NOTHING")
    found = changes(either_database, "INSERT INTO t VALUES (1, NULL), (1, NULL)")
    assert columns_of(found, "op", "key", "after") == [("c", None, {1: "1", 2: None})] * 2


def test_a_key_has_the_order_of_its_index_and_not_of_the_columns(either_database: str):
    run_sql(
        either_database,
        "CREATE TABLE t (a int, b int, c int, d int, PRIMARY KEY (d, a, c))",
        "INSERT INTO t VALUES (1, 2, 3, 4)",
    )
    with connect(either_database) as conn:
        schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
    assert schema is not None
    assert copy_rows(either_database, schema)[0]["key"] == ["4", "1", "3"]
    assert columns_of(changes(either_database, "UPDATE t SET a = 9", "DELETE FROM t"), "op", "key", "old_key") == [
        ("d", ["4", "1", "3"], None),
        ("u", ["4", "9", "3"], ["4", "1", "3"]),
        ("d", ["4", "9", "3"], None),
    ]


def test_keys_moved_within_one_statement_come_in_their_order(either_database: str):
    run_sql(
        either_database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one'), (2, 'two')"
    )
    moves = ((1, -1), (2, 1), (-1, 2))
    swap = "; ".join(["BEGIN", *(f"UPDATE t SET id = {new} WHERE id = {old}" for old, new in moves), "COMMIT"])
    again = "BEGIN; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'new'); COMMIT"
    assert columns_of(changes(either_database, swap, again), "op", "key", "old_key", "ordinal") == [
        ("d", ["1"], None, 0),
        ("u", ["-1"], ["1"], 1),
        ("d", ["2"], None, 2),
        ("u", ["1"], ["2"], 3),
        ("d", ["-1"], None, 4),
        ("u", ["2"], ["-1"], 5),
        ("d", ["1"], None, 0),
        ("c", ["1"], None, 1),
    ]


def test_partitions_with_another_column_order_send_rows_of_their_root(either_database: str):
    run_sql(
        either_database,
        "CREATE TABLE root (x int, id int, region text, v text, PRIMARY KEY (region, id)) PARTITION BY LIST (region)",
        "ALTER TABLE root DROP x",
        "CREATE TABLE eu (v text, x int, region text NOT NULL, id int NOT NULL, PRIMARY KEY (region, id))",
        "ALTER TABLE eu DROP x",
        "ALTER TABLE root ATTACH PARTITION eu FOR VALUES IN ('eu')",
        "CREATE TABLE us PARTITION OF root FOR VALUES IN ('us')",
    )
    statements = (
        "INSERT INTO root VALUES (1, 'eu', 'a'), (2, 'us', 'b')",
        "UPDATE root SET v = 'c' WHERE id = 1",
        "UPDATE root SET region = 'us' WHERE id = 1",
        "DELETE FROM root WHERE id = 2",
    )
    found = changes(either_database, *statements)
    assert {row["topic"] for row in found} == {"public.root"}
    assert columns_of(found, "op", "key", "after") == [
        ("c", ["eu", "1"], {2: "1", 3: "eu", 4: "a"}),
        ("c", ["us", "2"], {2: "2", 3: "us", 4: "b"}),
        ("u", ["eu", "1"], {2: "1", 3: "eu", 4: "c"}),
        ("d", ["eu", "1"], None),
        ("c", ["us", "1"], {2: "1", 3: "us", 4: "c"}),
        ("d", ["us", "2"], None),
    ]


GENERATED = "CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text)"


def test_a_generated_column_is_neither_streamed_nor_copied(either_database: str):
    run_sql(either_database, GENERATED)
    found = changes(either_database, "INSERT INTO t (id, v) VALUES (1, 'a')", "UPDATE t SET v = 'b'")
    assert columns_of(found, "after", "partial") == [({1: "1", 3: "a"}, False), ({1: "1", 3: "b"}, False)]
    with connect(either_database) as conn:
        schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
    assert schema is not None
    assert dict(copy_rows(either_database, schema)[0]["after"]) == {1: "1", 3: "b"}


@needs_version(18)
def test_a_generated_column_is_streamed_where_the_publication_says_so(database: str):
    run_sql(database, GENERATED)
    with capture_stream(database) as capture:
        run_sql(database, f"ALTER PUBLICATION {capture.publication} SET (publish_generated_columns = stored)")  # type: ignore[arg-type]
        found = capture.changes("INSERT INTO t (id, v) VALUES (1, 'a')", "UPDATE t SET id = 2")
    assert columns_of(found, "op", "key", "after") == [
        ("c", ["1"], {1: "1", 2: "2", 3: "a"}),
        ("d", ["1"], None),
        ("u", ["2"], {1: "2", 2: "4", 3: "a"}),
    ]


def test_a_row_filter_turns_updates_into_inserts_and_deletes(either_database: str):
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY, seen bool)", "ALTER TABLE t REPLICA IDENTITY FULL")
    with capture_stream(either_database) as capture:
        filtered = f"ALTER PUBLICATION {capture.publication} SET TABLE t WHERE (seen)"
        run_sql(either_database, filtered, "INSERT INTO t VALUES (1, false)")  # type: ignore[arg-type]
        found = capture.changes("UPDATE t SET seen = true", "UPDATE t SET id = 2", "UPDATE t SET seen = false")
    assert columns_of(found, "op", "key") == [("c", ["1"]), ("d", ["1"]), ("u", ["2"]), ("d", ["2"])]
