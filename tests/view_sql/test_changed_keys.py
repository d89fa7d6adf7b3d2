"""The keys that changed rows affect: every key whose rows differ between two cuts is one of them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.view_sql.changed_keys import InputsAtCut
from cdc.view_sql.view_query import ViewQuery
from tests.fixtures.examples import examples
from tests.view_sql.random_joins import random_join_case
from tests.view_sql.random_views import COLUMNS, Case, Row, random_case
from tests.view_sql.view_engines import AnyCase, DuckDb, Engine, Spark, affected_keys, differing_keys

RANDOMS = st.randoms(use_true_random=False)


def _affected(sql: str, before: dict[str, list[Row]], after: dict[str, list[Row]]) -> set[int | None]:
    """The values of the key `k` that are affected; tables that `after` omits do not change."""
    empty: dict[str, list[Row]] = {topic: [] for topic in COLUMNS}
    case = Case(sql, ("k",), empty | before, empty | before | after)
    return {key for (key,) in affected_keys(DuckDb(case), ViewQuery.parse("shop.v", sql, case.key))}


def test_of_a_row_that_moves_both_groups_are_affected() -> None:
    sql = "SELECT a.g AS k, sum(b.x) AS total FROM shop.b b JOIN shop.a a ON a.id = b.id GROUP BY a.g"
    groups: list[Row] = [(1, 0, 10, 0), (2, 0, 20, 0), (3, 0, 30, 0)]

    moved = _affected(sql, {"shop.a": groups, "shop.b": [(1, 0, 0, 5)]}, {"shop.b": [(2, 0, 0, 5)]})

    assert moved == {10, 20}


def test_a_row_that_an_outer_join_filled_with_nulls_is_found_when_its_match_appears() -> None:
    sql = "SELECT a.id AS k FROM shop.a a LEFT JOIN shop.b b ON b.id = a.b_id WHERE b.id IS NULL"

    assert _affected(sql, {"shop.a": [(7, 1, 0, 0), (8, 2, 0, 0)]}, {"shop.b": [(1, 0, 0, 0)]}) == {7}


def test_two_matches_that_appear_at_once_do_not_hide_the_row_without_them() -> None:
    sql = (
        "SELECT a.id AS k FROM shop.a a LEFT JOIN shop.b b ON b.id = a.b_id LEFT JOIN shop.c c ON c.id = a.g "
        "WHERE b.id IS NULL AND c.id IS NULL"
    )

    assert _affected(sql, {"shop.a": [(7, 1, 2, 0)]}, {"shop.b": [(1, 0, 0, 0)], "shop.c": [(2, 0, 0)]}) == {7}


def test_a_group_of_a_subquery_is_affected_with_its_value_before_the_change() -> None:
    sql = "SELECT t.n AS k, count(*) AS groups FROM (SELECT g, count(*) AS n FROM shop.a GROUP BY g) t GROUP BY t.n"
    rows: list[Row] = [(1, 0, 5, 0), (2, 0, 5, 0), (3, 0, 6, 0)]

    assert _affected(sql, {"shop.a": rows}, {"shop.a": [*rows, (4, 0, 5, 0)]}) == {2, 3}


def test_a_change_that_the_condition_of_the_view_excludes_affects_no_key() -> None:
    sql = "SELECT a.id AS k FROM shop.a a JOIN shop.b b ON b.id = a.b_id WHERE b.x > 5"

    assert _affected(sql, {"shop.a": [(7, 1, 0, 0)]}, {"shop.b": [(1, 0, 0, 3)]}) == set()


def test_a_having_that_the_changed_row_alone_does_not_meet_is_ignored() -> None:
    sql = "SELECT a.g AS k, count(*) AS n FROM shop.a a GROUP BY a.g HAVING count(*) > 1"

    assert _affected(sql, {"shop.a": [(1, 0, 5, 0)]}, {"shop.a": [(1, 0, 5, 0), (2, 0, 5, 0)]}) == {5}


NESTED_SQL = """
WITH tagged AS (
  SELECT o.id, o.customer.name AS name, tag FROM shop.orders o LATERAL VIEW OUTER explode(o.tags) v AS tag
)
SELECT named_struct('name', name, 'tag', tag) AS k, count(*) AS n, sort_array(collect_list(id)) AS ids
FROM tagged GROUP BY ALL
UNION ALL
SELECT named_struct('name', r.name, 'tag', 'refund'), r.amount, array(r.id) FROM shop.refunds r WHERE r.amount > 1.5
"""


def test_nested_values_exploded_rows_and_branches_of_other_types_are_found(spark: SparkSession) -> None:
    orders = "CAST({} AS INT) AS id, named_struct('name', {}) AS customer, {} AS tags"
    refunds = "CAST(7 AS BIGINT) AS id, 'zoe' AS name, CAST({} AS DECIMAL(10, 2)) AS amount"
    for name, columns in {
        "orders_before": orders.format(1, "'ann'", "array('x', 'y')"),
        "orders_after": orders.format(1, "'bob'", "CAST(NULL AS ARRAY<STRING>)"),
        "refunds_before": refunds.format(1.25),
        "refunds_after": refunds.format(1.75),
    }.items():
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS SELECT {columns}")
    view = ViewQuery.parse("shop.v", NESTED_SQL, ["k"])

    found: set[object] = set()
    for topic in view.inputs:
        cuts = []
        for side in ("before", "after"):
            names = {"shop.orders": f"orders_{side}", "shop.refunds": f"refunds_{side}"}
            cuts.append(InputsAtCut(names, names[topic]))
        found.update(tuple(row.k) for row in spark.sql(view.affected_keys(topic, *cuts)).collect())

    assert found == {("ann", "x"), ("ann", "y"), ("bob", None), ("zoe", "refund")}


def _missed(engine: Engine, case: AnyCase) -> object:
    """The keys with other rows that are not affected."""
    view = ViewQuery.parse("shop.v", case.sql, case.key)
    assert view.only_refresh is None
    return differing_keys(engine, view) - affected_keys(engine, view)


@given(RANDOMS)
@examples(10)
def test_every_key_with_other_rows_is_affected(random: Random) -> None:
    case = random_case(random, depth=1)

    assert _missed(DuckDb(case), case) == set()


@given(RANDOMS)
@examples(20)
def test_every_key_with_other_rows_is_affected_by_joins_with_any_condition(random: Random) -> None:
    case = random_join_case(random)

    assert _missed(DuckDb(case), case) == set()


@given(RANDOMS)
@examples(3)
def test_spark_finds_them_as_well(spark: SparkSession, random: Random) -> None:
    case = random_case(random, depth=0, joins=1)

    assert _missed(Spark(spark, case), case) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(RANDOMS)
@examples(1000)
def test_every_key_with_other_rows_is_affected_in_many_cases(random: Random) -> None:
    case = random_case(random, depth=2)

    assert _missed(DuckDb(case), case) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(RANDOMS)
@examples(200)
def test_spark_finds_them_in_many_cases(spark: SparkSession, random: Random) -> None:
    case = random_case(random, depth=1)

    assert _missed(Spark(spark, case), case) == set()
