"""Random views of random tables under random changes: each is its SQL over the tables, and no change is spurious."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import duckdb
import pytest
from pyspark.sql import SparkSession

from cdc import failpoint
from cdc.table import TableSchema
from tests.pipelines.views.duckdb_rows import comparable, rows_by_duckdb, typed
from tests.pipelines.views.view_pipeline import SOURCE, Change, Values, ViewPipeline, table_of
from tests.view_sql.random_views import COLUMNS, random_view

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]

ROUNDS: Final = 6
POINTS: Final = ("view_rows_added", "views_staged", "views_committed")
Rows = Mapping[tuple[str | None, ...], tuple[str | None, ...]]


def tables() -> Iterator[TableSchema]:
    for relation, (topic, columns) in enumerate(COLUMNS.items(), 300):
        yield table_of(relation, topic, *(f"{name} integer" for name in columns))


def views(random: Random) -> Iterator[dict[str, Any]]:
    sql, key = random_view(random, depth=random.choice((0, 1)))
    yield {"name": "shop.v_0", "key": list(key), "sql": sql}
    over = "SELECT t.k0 % 2 AS parity, count(*) AS n FROM shop.v_0 t GROUP BY t.k0 % 2"
    yield {"name": "shop.v_over", "key": ["parity"], "sql": over}


class Scenario:
    """One pipeline with its views, and random operations."""

    def __init__(self, folder: Path, spark: SparkSession, seed: int) -> None:
        self.random = Random(seed)
        self.views = {view["name"]: view for view in views(self.random)}
        self.pipeline = ViewPipeline(folder, spark.newSession(), tables(), list(self.views.values()))
        self._renamed: TableSchema | None = None
        """The version of a table before one of its columns was renamed."""

    def write(self) -> bool:
        """Change the tables; return whether columns changed."""
        altered = self.random.random() < 0.2 and bool(self.pipeline.views.position)
        if altered:
            self._alter()
        for _ in range(self.random.choice((1, 1, 2, 4))):
            self.pipeline.write(*(self._change() for _ in range(self.random.choice((1, 1, 3)))))
        return altered

    def compute(self) -> bool:
        """Compute the views, perhaps only after a crash; return whether there was none."""
        record = self.pipeline.publish()
        is_cut_off = self.random.random() < 0.2
        if is_cut_off:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(failpoint.VARIABLE, f"{self.random.choice(POINTS)}:1:abandon")
                with suppress(failpoint.Abandoned):
                    self.pipeline.engine.advance(record, SOURCE)
            self.pipeline.reopen()
            self.write()
            record = self.pipeline.publish()
        self.pipeline.engine.advance(record, SOURCE)
        return not is_cut_off

    def rows(self, name: str) -> Rows:
        """Key → row of a view in its log."""
        schema = self.pipeline.views.schemas().get(name)
        if schema is None:
            return {}
        places = [schema.columns.index(column) for column in schema.key]
        return {tuple(row[place] for place in places): row for row in self.pipeline.rows(name)}

    def assert_equal(self, name: str) -> None:
        sql, figures = self.views[name]["sql"], self.pipeline.engine.figures[name]
        text = sql.replace("shop.v_0", f"({self.views['shop.v_0']['sql']})")
        try:
            expected = comparable(rows_by_duckdb(self.pipeline, text))
        except duckdb.BinderException:
            assert figures.state == "failed", f"{name}: {sql}"
            return
        assert figures.state == "live", f"{name}: {figures.reason}\n{sql}"
        assert typed(self.pipeline.views.schemas()[name], self.rows(name).values()) == expected, f"{name}: {sql}"

    def assert_only_differences(self, name: str, before: Rows) -> None:
        after, logged = self.rows(name), self.pipeline.changes(name)
        if any(change["op"] == "s" for change in logged):
            return  # another version of the view has all rows
        differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert sorted(tuple(change["key"]) for change in logged) == sorted(differing), f"{name}: {self.views[name]}"

    def _change(self) -> Change:
        random, topic = self.random, self.random.choice(list(COLUMNS))
        known, columns = self.pipeline.tables[topic], self.pipeline.schemas[topic].columns
        key = (str(random.randrange(5)),)
        if random.random() < 0.03:
            return Change(topic, "t", ())
        if key not in known:
            if known and random.random() < 0.4:
                old = random.choice(sorted(known))
                return Change(topic, "u", (*key, *self._changed(known[old])[1:]), old_key=old)
            return Change(topic, "c", (*key, *(self._value() for _ in columns[1:])))
        if random.random() < 0.3:
            return Change(topic, "d", known[key])
        values = self._changed(known[key])
        same = [column.id for number, column in enumerate(columns) if number and values[number] == known[key][number]]
        unsent = frozenset(random.sample(same, random.randrange(len(same) + 1)))
        return Change(topic, "u", values, unsent=unsent)

    def _changed(self, values: Values) -> Values:
        place = self.random.randrange(1, len(values))
        return tuple(self._value() if number == place else value for number, value in enumerate(values))

    def _value(self) -> str | None:
        return self.random.choice((None, "0", "1", "1", "1", "2", "2"))

    def _alter(self) -> None:
        """Rename a column, add one, or widen the type of one; a renamed column gets its name back first."""
        if self._renamed is not None:
            schema, self._renamed = self._renamed, None
            self.pipeline.alter(schema, self.pipeline.tables[schema.topic])
            return
        topic = self.random.choice(list(COLUMNS))
        schema, rows = self.pipeline.schemas[topic], dict(self.pipeline.tables[topic])
        column = self.random.choice(schema.columns[1:])
        kind = self.random.choice(("rename", "add", "widen"))
        if kind == "add":
            number = max(one.id for one in schema.columns) + 1
            missing = self.random.choice((None, "5"))
            added = replace(
                column, id=number, name=f"added_{number}", type_oid=23, type_name="integer", missing=missing
            )
            schema = replace(schema, columns=(*schema.columns, added))
            rows = {key: (*values, missing) for key, values in rows.items()}
        else:
            other = replace(column, name=f"{column.name}_{column.id}")
            if kind == "widen":
                other = replace(column, type_oid=20, type_name="bigint")
            else:
                self._renamed = schema
            schema = replace(schema, columns=tuple(other if one is column else one for one in schema.columns))
        self.pipeline.alter(schema, rows)


@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", range(12))
def test_random_views_follow_random_changes(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    scenario = Scenario(tmp_path / "shop", spark, seed)
    try:
        for _ in range(ROUNDS):
            before = {name: scenario.rows(name) for name in scenario.views}
            is_altered = scenario.write()
            is_whole = scenario.compute()
            for name in scenario.views:
                scenario.assert_equal(name)
                if is_whole and not is_altered:
                    scenario.assert_only_differences(name, before[name])
    finally:
        scenario.pipeline.close()
