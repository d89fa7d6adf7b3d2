"""Column ids under random changes of a real table, with the reader behind by any number of them.

Each value names the attribute that it was written to, so a value under another id is seen at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, LiteralString

import psycopg
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from psycopg import sql

from cdc.errors import HiddenColumnRenamed
from cdc.log_row import Operation
from cdc.postgres.connection import connect
from cdc.postgres.ddl_messages import trigger_script
from cdc.postgres.tables import read_schema
from cdc.table import UNPROVED, TableSchema, TableState
from cdc.targets.hidden_columns import ColumnRules, check_hidden
from tests.fixtures.examples import examples
from tests.fixtures.postgres import run_sql
from tests.postgres.decoding_session import DecodingSession, decoding_session

NAMES = "abcd"
"""Few, so that a name comes back on another column."""
TYPES = ("text", "varchar", "varchar(40)")

steps = st.lists(
    st.tuples(
        st.sampled_from(("add", "drop", "replace", "rename", "swap", "type", "insert", "insert", "read")),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=3,
    max_size=14,
)
tables = count(1)


class Source:
    """A table of its own, changed by steps; knows what every inserted row must look like in the log."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self.table = f"t{next(tables)}"
        self.expected: dict[str, dict[int, str]] = {}
        self.retyped = False
        self._conn = conn
        self._do("CREATE TABLE {} (id int PRIMARY KEY, a text, b text)")
        self._do("ALTER PUBLICATION pub ADD TABLE {}")
        self.oid: int = self._rows("SELECT %s::regclass::oid::bigint")[0][0]

    def take(self, step: str, first: int, second: int) -> None:
        live = self._live()
        names = [name for _, name in live]
        free = [name for name in NAMES if name not in names]
        if step == "insert":
            self._insert(live)
        elif step == "add" and free:
            self._do("ALTER TABLE {} ADD COLUMN {} text", free[first % len(free)])
        elif names:
            self._alter(step, names[first % len(names)], names[second % len(names)], free[second % max(1, len(free)) :])

    def _alter(self, step: str, place: str, other: str, free: list[str]) -> None:
        if step == "drop":
            self._do("ALTER TABLE {} DROP COLUMN {}", place)
        elif step == "replace":
            self._do("ALTER TABLE {} DROP COLUMN {}", place)
            self._do("ALTER TABLE {} ADD COLUMN {} text", place)
        elif step == "rename" and free:
            self._do("ALTER TABLE {} RENAME COLUMN {} TO {}", place, free[0])
        elif step == "swap" and place != other:
            for before, after in ((place, "spare"), (other, place), ("spare", other)):
                self._do("ALTER TABLE {} RENAME COLUMN {} TO {}", before, after)
        elif step == "type":
            self.retyped = True
            self._do("ALTER TABLE {} ALTER {} TYPE " + TYPES[NAMES.index(other) % 3], place)

    def _insert(self, live: list[tuple[int, str]]) -> None:
        key = str(len(self.expected))
        values = {number: f"row {key} column {number}" for number, _ in live}
        self.expected[key] = {1: key, **values}
        names = [name for _, name in live]
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            sql.Identifier(self.table),
            sql.SQL(", ").join(map(sql.Identifier, ["id", *names])),
            sql.SQL(", ").join(map(sql.Literal, [key, *values.values()])),
        )
        self._conn.execute(statement)

    def _live(self) -> list[tuple[int, str]]:
        return self._rows(
            "SELECT attnum, attname FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 1 AND NOT attisdropped ORDER BY attnum"
        )

    def _rows(self, query: LiteralString) -> list[tuple[Any, ...]]:
        return self._conn.execute(query, [self.table]).fetchall()

    def _do(self, statement: LiteralString, *columns: str) -> None:
        self._conn.execute(sql.SQL(statement).format(*map(sql.Identifier, (self.table, *columns))))


@pytest.fixture(params=["told", "concluded"])
def session(request: pytest.FixtureRequest, database: str) -> Iterator[DecodingSession]:
    """A stream with the event triggers, or without."""
    run_sql(database, "CREATE TABLE t0 (id int PRIMARY KEY)")
    if request.param == "told":
        run_sql(database, trigger_script("install"))
    with decoding_session(database) as made:
        yield made


@example(taken=[("replace", 1, 0), ("insert", 0, 0)])
@example(taken=[("replace", 1, 0), ("insert", 0, 0), ("rename", 1, 0)])
@example(taken=[("add", 0, 0), ("drop", 0, 0), ("insert", 0, 0), ("read", 0, 0), ("add", 0, 0), ("insert", 0, 0)])
@examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(taken=steps)
def test_no_value_has_the_id_of_another_column(session: DecodingSession, taken: list[tuple[str, int, int]]) -> None:
    told = False
    with connect(session.dsn) as conn:
        source = Source(conn)
        schema = read_schema(conn, source.oid)
        assert schema is not None
        told = schema.witness is not None
        session.relations.set_schema(schema)
        for step in taken:
            if step[0] == "read":
                session.catch_up()
            else:
                source.take(*step)
    session.catch_up()
    mine = [row for row in session.rows if row["relation"] == source.oid]
    found = list(pictured(mine, schema))

    assert [key for key, _, _ in found] == list(source.expected)
    for key, image, version in found:
        state = version.state
        assert not [text for text in shown(image, version) if text.endswith(" column 2")]
        proved = {column: text for column, text in image.items() if column < UNPROVED}
        assert proved.items() <= source.expected[key].items()
        if state is TableState.LIVE or told:
            assert image == source.expected[key]
        if told:
            assert state is TableState.LIVE or source.retyped


def pictured(rows: list[dict[str, Any]], schema: TableSchema) -> Iterator[tuple[str, dict[int, str], TableSchema]]:
    """Key, image and the table's version there of every row that was inserted."""
    for row in rows:
        if row["op"] == Operation.SCHEMA.value:
            schema = TableSchema.from_json(row["payload"])
        elif row["op"] == Operation.CREATE.value:
            yield row["key"][0], dict(row["after"]), schema


def shown(image: dict[int, str], version: TableSchema) -> list[str]:
    """The values that a rule shows which hides column a, whose attribute number was 2 when the capture began."""
    try:
        check_hidden(version, lambda _topic: ColumnRules(omitted=frozenset({"a"})))
    except HiddenColumnRenamed:
        return []
    return [image[column.id] for column in version.sent if column.name != "a" and column.id in image]
