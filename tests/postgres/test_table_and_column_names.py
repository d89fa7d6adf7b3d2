"""Tables and columns with names of every kind pass publication, matching, copy and stream."""

from __future__ import annotations

from psycopg import sql

from cdc.postgres.connection import connect
from cdc.postgres.tables import TableName, match_tables
from cdc.table import topic
from tests.postgres.four_readings import read_four_ways

NAMES = (
    "select",
    "Order",
    "order",
    'quo"te',
    "o'clock",
    "dot.ted",
    "a/b",
    "../../etc/passwd",
    "tab\tnew\nline",
    "%s{0}",
    "$1",
    "user%data",
    "user_test_data",
    " leading",
    "trailing ",
    " ",
    "back\\slash",
    "*?[a-z]",
    "é",
    "e\u0301",
    "\U0001f600" * 15 + "abc",
    "x" * 63,
    "CON",
    "_delta_log",
    ".hidden",
    "_position",
    "ctid2",
    "a,b;c",
    "(é)",
    "\u202eabc",
)


def create(dsn: str, tables: list[TableName], columns: tuple[str, ...]) -> None:
    """Tables of those names, each with text columns of those names."""
    listed = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(column)) for column in columns)
    with connect(dsn) as conn:
        for table in tables:
            conn.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(table.schema)))
            conn.execute(sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(*table), listed))


def insertion(table: TableName, values: tuple[str, ...]) -> bytes:
    """The INSERT of one row."""
    row = sql.SQL(", ").join(map(sql.Literal, values))
    return sql.SQL("INSERT INTO {} VALUES ({})").format(sql.Identifier(*table), row).as_bytes(None)


def test_tables_of_any_name_come_to_topics_of_their_own(either_database: str):
    tables = [TableName("public", name) for name in NAMES]
    create(either_database, tables, ("v",))
    agreed = read_four_ways(either_database, [insertion(table, (table.name,)) for table in tables]).agree()
    assert agreed == {topic("public", name): [(name.encode(),)] for name in NAMES}
    assert len(agreed) == len(NAMES)


def test_schemas_of_any_name_come_to_topics_of_their_own(either_database: str):
    tables = [TableName(name, "t") for name in NAMES]
    create(either_database, tables, ("v",))
    agreed = read_four_ways(either_database, [insertion(table, (table.schema,)) for table in tables]).agree()
    assert agreed == {topic(name, "t"): [(name.encode(),)] for name in NAMES}


def test_tables_whose_names_differ_in_the_place_of_a_dot_have_two_topics(either_database: str):
    tables = [TableName("s.x", "y"), TableName("s", "x.y"), TableName("s", 'x".y'), TableName('"s"', "x.y")]
    create(either_database, tables, ("v",))
    agreed = read_four_ways(either_database, [insertion(table, (table.name,)) for table in tables]).agree()
    assert agreed.keys() == {'"s.x".y', 's."x.y"', 's."x"".y"', '"""s"""."x.y"'}


def test_columns_of_any_name_keep_their_values_apart(either_database: str):
    table = TableName("public", "t")
    create(either_database, [table], NAMES)
    agreed = read_four_ways(either_database, [insertion(table, NAMES)]).agree()
    assert agreed == {"public.t": [tuple(name.encode() for name in NAMES)]}


def test_a_pattern_is_case_sensitive(either_database: str):
    create(either_database, [TableName("public", name) for name in ("Order", "order", "%s{0}")], ("v",))
    with connect(either_database) as conn:
        assert [str(name) for _, name in match_tables(conn, ["public.[!A-Z]*"])] == ["public.%s{0}", "public.order"]
