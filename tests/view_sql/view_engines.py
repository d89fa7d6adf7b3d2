"""DuckDB and Spark with the tables of a case, to run the SQL texts of a view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import duckdb
import pyarrow as pa
from hypothesis import reject
from pyspark.sql import SparkSession

from cdc.view_sql.changed_keys import InputsAtCut
from cdc.view_sql.view_query import ViewQuery
from tests.view_sql.random_joins import JoinCase, comparable
from tests.view_sql.random_views import COLUMNS, Case

_DIALECT: Final = {
    "`": '"',
    "<=>": "IS NOT DISTINCT FROM",
    "LEFT SEMI JOIN": "SEMI JOIN",
    "LEFT ANTI JOIN": "ANTI JOIN",
    "/*+ BROADCAST(_keys) */": "",
    # a query with a name is otherwise inlined, and planned again for every reader
    " AS (\n": " AS MATERIALIZED (\n",
}
"""What the SQL of random views has in Spark → in DuckDB."""


AnyCase = Case | JoinCase
_DUCKDB_TYPES: Final = {"INT": "INTEGER", "STRING": "VARCHAR"}


class Engine(Protocol):
    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query of Spark SQL over the tables of the case."""


def tables(cut: str) -> dict[str, str]:
    """Names of the tables at the cut `before` or `after`; `old` and `new` have the changed rows."""
    return {topic: _name(topic, cut) for topic in COLUMNS}


def affected_keys(engine: Engine, view: ViewQuery) -> set[tuple[Any, ...]]:
    """The keys that the changes of all inputs affect."""
    found: set[tuple[Any, ...]] = set()
    for topic in view.inputs:
        before = InputsAtCut(tables("before"), _name(topic, "old"))
        found.update(engine.rows(view.affected_keys(topic, before, InputsAtCut(tables("after"), _name(topic, "new")))))
    return found


def differing_keys(engine: Engine, view: ViewQuery) -> set[tuple[Any, ...]]:
    """The keys that have other rows at the cut after than before."""
    before, after = (comparable(engine.rows(view.whole(tables(cut)))) for cut in ("before", "after"))
    return {row[: len(view.key)] for row in (before - after) + (after - before)}


class DuckDb:
    def __init__(self, case: AnyCase) -> None:
        self._engine = duckdb.connect(config={"threads": 1})
        for name, columns, rows in _contents(case):
            types = ", ".join(f"{name} {_DUCKDB_TYPES.get(kind, kind)}" for name, kind in columns.items())
            self._engine.execute(f"CREATE TABLE {name} ({types})")
            if rows:
                self._engine.execute(f"INSERT INTO {name} VALUES {_values(rows)}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        for spark, duck in _DIALECT.items():
            sql = sql.replace(spark, duck)
        try:
            return self._engine.execute(sql).fetchall()
        except duckdb.InternalException:
            reject()  # DuckDB 2.0.1 cannot bind some outer joins of joins in parentheses

    def put(self, name: str, rows: pa.Table) -> None:
        """Create a table of these rows, or replace it."""
        self._engine.register("put", rows)
        self._engine.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM put")
        self._engine.unregister("put")


class Spark:
    def __init__(self, session: SparkSession, case: AnyCase) -> None:
        self._session = session
        for name, columns, rows in _contents(case):
            typed = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in columns.items())
            values = _values(rows or [(None,) * len(columns)])
            where = "" if rows else " WHERE false"
            query = f"SELECT {typed} FROM VALUES {values} AS t({', '.join(columns)}){where}"
            session.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS {query}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._session.sql(sql).collect()]


def _contents(case: AnyCase) -> Iterator[tuple[str, Mapping[str, str], Sequence[tuple[Any, ...]]]]:
    """Yield name, columns with their types in Spark, and rows of every table."""
    for topic, columns in case.columns.items():
        old, new = case.changed(topic)
        for cut, rows in (("before", case.before[topic]), ("after", case.after[topic]), ("old", old), ("new", new)):
            yield _name(topic, cut), columns, rows


def _values(rows: Sequence[tuple[Any, ...]]) -> str:
    return ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else f"'{value}'"


def _name(topic: str, cut: str) -> str:
    return f"{topic.replace('.', '_')}_{cut}"
