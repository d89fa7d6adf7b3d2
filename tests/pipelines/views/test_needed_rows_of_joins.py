"""The rows that the driver reads for random joins with conditions of every kind: none is missing at either cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.config import DeltaSinkDefinition
from cdc.view_sql.changed_keys import InputsAtCut
from cdc.view_sql.join_graph import JoinGraph
from cdc.view_sql.view_query import ViewQuery
from pipelines.sinks.delta.merge_source import comparable
from pipelines.sinks.delta.table_version import PLACE, RowsNotReadable
from pipelines.views.needed_rows import ChangedRows, NeededRows, RowsOfCuts
from pipelines.views.view_inputs import ViewInputs
from tests.fixtures.examples import examples
from tests.view_sql import random_joins
from tests.view_sql.random_joins import COLUMNS, JoinCase, Row, random_join_case
from tests.view_sql.view_engines import DuckDb, differing_keys, tables

RANDOMS: Final = st.randoms(use_true_random=False)
_ARROW: Final = {"INT": pa.int32(), "DOUBLE": pa.float64(), "STRING": pa.string()}
_OLD: Final = 1
_NEW: Final = 2
_KEYS: Final = "wanted"
SPARK_CASES: Final = 2_000


@dataclass(frozen=True)
class TableInMemory:
    """One version of a table; it reads rows by values as a target on disk does."""

    contents: pa.Table

    @property
    def columns(self) -> pa.Schema:
        return self.contents.schema

    def rows(self, column: str, values: pa.ChunkedArray) -> pa.Table:
        own = self.contents[column]
        return self.contents.filter(pc.is_in(comparable(own), comparable(values.drop_null().cast(own.type))))


class SmallStep:
    """One step of a view whose rows the driver reads, and DuckDB with the rows that it has read."""

    def __init__(self, case: JoinCase) -> None:
        self.case, self.view = case, ViewQuery.parse("shop.v", case.sql, case.key)
        self.engine = DuckDb(case)
        graph = JoinGraph.of(self.view.sql, self.view.key, COLUMNS)
        self.is_analysed = graph is not None
        changed = {topic: case.changed(topic) for topic in COLUMNS}
        self._changes = {
            topic: ChangedRows(_placed(topic, old, _OLD), _placed(topic, new, _NEW))
            for topic, (old, new) in changed.items()
            if topic in self.view.inputs and (old or new)
        }
        self._later = {topic: _later(case, topic, changed[topic][1]) for topic in self.view.inputs}
        if graph is not None:
            later = {topic: TableInMemory(rows) for topic, rows in self._later.items()}
            self._needed = NeededRows(graph, later, self._changes)

    def affected_keys(self) -> set[Row]:
        """The keys that the SQL finds in the rows that changed rows can meet."""
        before, after = self._put(self._needed.meeting(), "meet")
        found: set[Row] = set()
        for topic in self._changes:
            old, new = (
                InputsAtCut(names, f"{_name(topic)}_{side}") for names, side in ((before, "old"), (after, "new"))
            )
            found.update(self.engine.rows(self.view.affected_keys(topic, old, new)))
        return found

    def keys_without_sql(self) -> set[Row] | None:
        """The keys that the driver finds; None if it cannot."""
        found = self._needed.affected_keys(self.view.key)
        return None if found is None else set(zip(*(column.to_pylist() for column in found.columns), strict=True))

    def rows_of_keys(self, keys: Iterable[Row]) -> list[tuple[Counter[Row], Counter[Row]]]:
        """For each cut: the rows with these keys of the rows that were read, and those of the whole tables."""
        wanted = self._table_of_keys(keys)
        read = self._put(self._needed.of_keys(wanted), "read")
        return [(self._rows(named), whole) for named, whole in zip(read, self._whole_rows(wanted), strict=True)]

    def rows_by_spark(self, inputs: ViewInputs, keys: Iterable[Row]) -> list[tuple[Counter[Row], Counter[Row]]]:
        """For each cut: the rows with these keys that Spark computes as in a step, and those of DuckDB."""
        wanted = self._table_of_keys(keys)
        try:
            read = self._needed.of_keys(wanted) if self.is_analysed else self._later
        except RowsNotReadable:
            read = self._later
        cuts = {topic: RowsOfCuts.of(rows, self._changes.get(topic)) for topic, rows in read.items()}
        names = inputs.register_cuts(
            {topic: RowsOfCuts(*(part.drop_columns([*PLACE]) for part in parts)) for topic, parts in cuts.items()}
        )
        inputs.register_table(wanted, _KEYS)
        queries = [self.view.of_keys(named, _KEYS) for named in (names.before, names.after)]
        computed = [_tuples(rows) for rows in inputs.both(*queries, are_few=True)]
        return list(zip(computed, self._whole_rows(wanted), strict=True))

    def every_key(self) -> set[Row]:
        """The keys of the view at both cuts."""
        rows = [row for cut in ("before", "after") for row in self.engine.rows(self.view.whole(tables(cut)))]
        return {row[: len(self.view.key)] for row in rows}

    def _table_of_keys(self, keys: Iterable[Row]) -> pa.Table:
        columns = [pa.array(column) for column in zip(*keys, strict=True)]
        wanted = pa.table(dict(zip(self.view.key, columns, strict=True)))
        self.engine.put(_KEYS, wanted)
        return wanted

    def _whole_rows(self, wanted: pa.Table) -> list[Counter[Row]]:
        self.engine.put(_KEYS, wanted)
        return [self._rows(tables(cut)) for cut in ("before", "after")]

    def _rows(self, names: Mapping[str, str]) -> Counter[Row]:
        return random_joins.comparable(self.engine.rows(self.view.of_keys(names, _KEYS)))

    def _put(self, rows: Mapping[str, pa.Table], name: str) -> tuple[dict[str, str], dict[str, str]]:
        """Create tables of the rows at both cuts; return topic → name of each."""
        names: tuple[dict[str, str], dict[str, str]] = ({}, {})
        for topic, its_rows in rows.items():
            cuts = RowsOfCuts.of(its_rows, self._changes.get(topic))
            for named, own, side in zip(names, (cuts.earlier, cuts.later), "ab", strict=True):
                named[topic] = f"{_name(topic)}_{name}_{side}"
                self.engine.put(named[topic], pa.concat_tables([cuts.both, own]).drop_columns([*PLACE]))
        return names


def _name(topic: str) -> str:
    return topic.replace(".", "_")


def _tuples(rows: pa.Table) -> Counter[Row]:
    return random_joins.comparable(list(zip(*(column.to_pylist() for column in rows.columns), strict=True)))


def _placed(topic: str, rows: Iterable[Row], position: int) -> pa.Table:
    listed = list(rows)
    kinds = [_ARROW[random_joins.TYPES.get(name, "INT")] for name in COLUMNS[topic]]
    columns: list[Any] = [[row[place] for row in listed] for place in range(len(kinds))]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    # the id is unique among the old rows and among the new ones
    places = [pa.array([position] * len(listed), pa.int64()), arrays[0].cast(pa.int64())]
    return pa.table([*arrays, *places], names=[*COLUMNS[topic], *PLACE])


def _later(case: JoinCase, topic: str, new: list[Row]) -> pa.Table:
    ids = {row[0] for row in new}
    unchanged = [row for row in case.after[topic] if row[0] not in ids]
    return pa.concat_tables([_placed(topic, unchanged, _OLD), _placed(topic, new, _NEW)])


def check(case: JoinCase) -> bool:
    """Check that no row is missing; return whether the view has a join graph, without which Spark reads the tables."""
    step = SmallStep(case)
    if not step.is_analysed:
        return False
    differing = differing_keys(step.engine, step.view)
    found = step.affected_keys()
    assert differing <= found, case.sql
    without_sql = step.keys_without_sql()
    assert without_sql is None or differing <= without_sql, case.sql
    keys = sorted(found | (without_sql or set()), key=repr)
    if keys:
        try:
            pairs = step.rows_of_keys(keys)
        except RowsNotReadable:
            return True
        for few, whole in pairs:
            assert few == whole, case.sql
    return True


@given(RANDOMS)
@examples(25)
def test_the_rows_that_the_driver_reads_give_the_rows_of_the_view(random: Random) -> None:
    check(random_join_case(random, has_outer=False))


def check_in_spark(case: JoinCase, inputs: ViewInputs) -> None:
    """Check that the rows of a step, computed by Spark, are those of the SQL over the whole tables."""
    step = SmallStep(case)
    keys = step.every_key() | differing_keys(step.engine, step.view)
    if keys:
        for computed, whole in step.rows_by_spark(inputs, sorted(keys, key=repr)):
            assert computed == whole, case.sql


@pytest.fixture(scope="module")
def inputs(spark: SparkSession) -> ViewInputs:
    """In a session that compiles the code of queries, as in production."""
    sink = DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": "/lake/{table}"})
    return ViewInputs(spark.newSession(), sink)


@given(RANDOMS)
@examples(4)
def test_spark_computes_the_rows_of_the_view_from_them(inputs: ViewInputs, random: Random) -> None:
    check_in_spark(random_join_case(random), inputs)


@pytest.mark.slow
@pytest.mark.timeout(6_000)
def test_spark_computes_the_rows_of_many_views_from_them(inputs: ViewInputs) -> None:
    for seed in range(SPARK_CASES):
        check_in_spark(random_join_case(Random(seed)), inputs)


@pytest.mark.parametrize(
    ("select", "join"),
    [("a.id AS k, b.id AS other, c.y AS v", "LEFT JOIN"), ("a.id AS k, b.id AS other", "LEFT ANTI JOIN")],
)
def test_rows_without_a_match_are_found_although_a_condition_compares_earlier_tables(select: str, join: str) -> None:
    sql = (
        f"SELECT {select} FROM shop.a a JOIN shop.b b ON lower(a.t) = lower(b.t)"
        f" {join} shop.c c ON c.id = a.id AND a.g = b.g"
    )
    before: dict[str, list[Row]] = {
        "shop.a": [(1, 1, 0, None, "p")],
        "shop.b": [(5, 2, 0, None, "p")],
        "shop.c": [(1, 0, 0, None)],
    }
    case = JoinCase(sql, ("k",), before, before | {"shop.a": [(1, 3, 0, None, "p")]})

    check(case)
