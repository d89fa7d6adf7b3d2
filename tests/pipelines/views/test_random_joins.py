"""Random joins with conditions of every kind in the view engine: each view is its SQL over the tables after any change.

Spark compiles the code of the queries, as in production.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from cdc.table import TableSchema
from tests.fixtures.spark import compiling
from tests.pipelines.views.duckdb_rows import comparable, rows_by_duckdb, typed
from tests.pipelines.views.view_pipeline import SOURCE, Change, Values, ViewPipeline, table_of
from tests.view_sql.random_joins import COLUMNS, TYPES, random_join_view, random_value

pytestmark = pytest.mark.usefixtures("with_delta")

_DECLARED: Final = {"INT": "integer", "DOUBLE": "double precision", "STRING": "text"}
_IDS: Final = 8
_TABLES: Final = 3
"""Tables that a view joins at most: Spark plans the changes of more for many seconds."""
_LONGEST_COMPUTATION: Final = 600.0
"""Seconds until a view counts as behind; on a busy machine Spark plans some of these joins for more than a minute."""


def _tables() -> Iterator[TableSchema]:
    for relation, (topic, columns) in enumerate(COLUMNS.items(), 300):
        yield table_of(relation, topic, *(f"{name} {_DECLARED[TYPES.get(name, 'INT')]}" for name in columns))


def _text(value: Any) -> str | None:
    """A value as pgoutput sends it."""
    if isinstance(value, float):
        return {"nan": "NaN", "-0.0": "-0"}.get(str(value), f"{value:g}")
    return None if value is None else str(value)


class JoinedTables:
    """One pipeline whose views are random joins of its tables."""

    def __init__(self, folder: Path, spark: SparkSession, seed: int, views: int) -> None:
        self.random = Random(seed)
        # Spark plans the changes of RIGHT and FULL JOIN for a long time: few views have one
        written = [random_join_view(self.random, has_outer=not number % 8, tables=_TABLES) for number in range(views)]
        self.views: dict[str, dict[str, Any]] = {
            f"shop.v_{number}": {"name": f"shop.v_{number}", "key": list(key), "sql": sql}
            for number, (sql, key) in enumerate(written)
        }
        self.pipeline = ViewPipeline(folder, compiling(spark), _tables(), list(self.views.values()))
        self.pipeline.engine.patience = _LONGEST_COMPUTATION
        self.write(*(self._change(topic, number) for topic in COLUMNS for number in range(_IDS)))

    def write(self, *changes: Change) -> None:
        self.pipeline.write(*changes)
        self.pipeline.engine.advance(self.pipeline.publish(), SOURCE)

    def change(self) -> None:
        """Change some rows of the tables, each at most once."""
        chosen = {(self.random.choice(list(COLUMNS)), self.random.randrange(_IDS)) for _ in range(3)}
        self.write(*(self._change(topic, number) for topic, number in sorted(chosen)))

    def assert_equal(self) -> None:
        for name, view in self.views.items():
            figures = self.pipeline.engine.figures[name]
            assert figures.state == "live", f"{view['sql']}: {figures.reason}"
            rows = typed(self.pipeline.views.schemas()[name], self.pipeline.rows(name))
            assert rows == comparable(rows_by_duckdb(self.pipeline, view["sql"])), view["sql"]

    def _change(self, topic: str, number: int) -> Change:
        key = (str(number),)
        earlier = self.pipeline.tables[topic].get(key)
        if earlier is None:
            return Change(topic, "c", (*key, *self._values(topic)))
        if self.random.random() < 0.25:
            return Change(topic, "d", earlier)
        place = self.random.randrange(1, len(earlier))
        values = self._values(topic)
        return Change(topic, "u", (*earlier[:place], values[place - 1], *earlier[place + 1 :]))

    def _values(self, topic: str) -> Values:
        return tuple(_text(random_value(self.random, name)) for name in COLUMNS[topic][1:])


def _check(joined: JoinedTables, changed_cuts: int) -> None:
    try:
        joined.assert_equal()
        for _ in range(changed_cuts):
            joined.change()
            joined.assert_equal()
    finally:
        joined.pipeline.close()


def test_views_of_random_joins_follow_their_tables(tmp_path: Path, spark: SparkSession) -> None:
    _check(JoinedTables(tmp_path / "shop", spark, seed=2, views=2), changed_cuts=2)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(100, 110))
def test_views_of_random_joins_follow_many_changes(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    """A view at a cut with changed rows is one case: all seeds have 800."""
    _check(JoinedTables(tmp_path / "shop", spark, seed, views=8), changed_cuts=10)
