from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.view_sql.semi_joins import with_semi_joins
from cdc.view_sql.sql_text import SqlText
from cdc.view_sql.view_query import ViewQuery
from tests.fixtures.examples import examples
from tests.view_sql.random_views import Case, Row, random_case
from tests.view_sql.view_engines import DuckDb, Spark, tables


def rewritten(sql: str) -> str:
    return with_semi_joins(SqlText.parse("shop.v", sql)).sql


def test_a_condition_becomes_a_join_with_its_subquery() -> None:
    sql = "SELECT o.id FROM shop.o o WHERE o.x > 1 AND lower(o.y) IN (SELECT i.y FROM shop.i i) GROUP BY o.id"

    assert rewritten(sql) == (
        "SELECT o.id FROM shop.o o LEFT SEMI JOIN (SELECT i.y FROM shop.i i) AS _in_0(_value)"
        " ON lower(o.y) IN (_in_0._value) WHERE o.x > 1 AND true GROUP BY o.id"
    )


def test_what_follows_a_condition_keeps_its_line() -> None:
    sql = "SELECT id FROM shop.o\nWHERE x\n IN\n (\n  SELECT y\n  FROM shop.i)\n  AND z = 1 -- last\n"
    found = rewritten(sql)

    assert found.count("\n", 0, found.index("z = 1")) == sql.count("\n", 0, sql.index("z = 1")) == 6


@pytest.mark.parametrize(
    ("sql", "number"),
    [
        ("SELECT id FROM shop.o WHERE x IN (SELECT y FROM shop.i WHERE z IN (SELECT w FROM shop.k))", 2),
        ("SELECT id FROM shop.o WHERE x IN (SELECT y FROM shop.i) AND z IN (SELECT y FROM shop.i)", 2),
        ("SELECT id FROM shop.o WHERE x IN (SELECT 1) UNION ALL SELECT id FROM shop.i WHERE y IN (SELECT 2)", 2),
        ("SELECT id FROM (SELECT id FROM shop.o WHERE x IN (SELECT y FROM shop.i)) t", 1),
        ("WITH w AS (SELECT id FROM shop.o WHERE x IN (SELECT y FROM shop.i)) SELECT id FROM w", 1),
        ("SELECT id FROM shop.o WHERE x BETWEEN 1 AND 2 AND y IN (WITH w AS (SELECT 1 AS a) SELECT a FROM w)", 1),
        ("SELECT id FROM shop.o LEFT JOIN shop.i USING (id) WHERE x IN (SELECT i.y FROM shop.i)", 1),
    ],
)
def test_each_condition_becomes_a_join(sql: str, number: int) -> None:
    assert rewritten(sql).count("LEFT SEMI JOIN") == number
    assert ViewQuery.parse("shop.v", sql, ["id"]).only_refresh is None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM shop.o WHERE x NOT IN (SELECT y FROM shop.i)",
        "SELECT id FROM shop.o WHERE x IN (SELECT y FROM shop.i) OR z = 1",
        "SELECT id FROM shop.o WHERE NOT (x IN (SELECT y FROM shop.i))",
        "SELECT id FROM shop.o WHERE (x, z) IN (SELECT y, w FROM shop.i)",
        "SELECT id FROM shop.o o WHERE x IN (SELECT i.y FROM shop.i i WHERE i.o_id = o.id)",
        "SELECT id FROM shop.o, shop.k WHERE x IN (SELECT y FROM shop.i)",
        "SELECT id FROM shop.o LATERAL VIEW explode(tags) t AS tag WHERE tag IN (SELECT y FROM shop.i)",
        "SELECT id FROM shop.o WHERE CASE WHEN z AND x IN (SELECT y FROM shop.i) AND w THEN true ELSE false END",
        "SELECT id FROM shop.o WHERE x IN (SELECT * FROM shop.i)",
        "SELECT id FROM shop.o WHERE (SELECT max(y) FROM shop.i) IN (SELECT y FROM shop.i)",
        "SELECT id, x IN (SELECT y FROM shop.i) AS found FROM shop.o",
        "SELECT id FROM shop.o GROUP BY id HAVING max(x) IN (SELECT y FROM shop.i)",
    ],
)
def test_other_conditions_stay(sql: str) -> None:
    assert rewritten(sql) == sql
    assert ViewQuery.parse("shop.v", sql, ["id"]).only_refresh is not None


@pytest.mark.parametrize("sql", ["SELECT id FROM shop.o WHERE x IN (1, 2)", "SELECT id FROM shop.o"])
def test_a_list_of_values_is_no_subquery(sql: str) -> None:
    assert rewritten(sql) == sql
    assert ViewQuery.parse("shop.v", sql, ["id"]).only_refresh is None


def as_written(case: Case) -> str:
    """The SQL of a random view, which gives every table an alias, over the tables of a case."""
    names = tables("before")
    return re.sub(r"shop\.\w\b", lambda found: names[found[0]], case.sql)


@given(st.randoms(use_true_random=False))
@examples(25)
def test_joins_give_the_rows_of_the_conditions(random: Random) -> None:
    case = random_case(random, depth=1)
    assume("IN (SELECT" in case.sql)
    engine, view = DuckDb(case), ViewQuery.parse("shop.v", case.sql, case.key)

    assert Counter(engine.rows(view.whole(tables("before")))) == Counter(engine.rows(as_written(case)))


@pytest.mark.parametrize(
    "condition",
    [
        "x IN (SELECT CAST(x AS STRING) FROM shop.b)",
        "CAST(x AS DECIMAL(5, 1)) IN (SELECT x FROM shop.b)",
        "x IN (SELECT CAST(x AS DOUBLE) FROM shop.b)",
    ],
)
def test_spark_converts_the_types_of_a_join_as_those_of_the_condition(spark: SparkSession, condition: str) -> None:
    rows: list[Row] = [(number, 0, 0, value) for number, value in enumerate((None, 1, 2, 2, 7, 30))]
    contents: dict[str, list[Row]] = {"shop.a": rows, "shop.b": [*rows[:1], *rows[2:5]], "shop.c": []}
    case = Case(f"SELECT t.id FROM shop.a t WHERE {condition}", ("id",), contents, contents)
    engine, view = Spark(spark, case), ViewQuery.parse("shop.v", case.sql, case.key)
    found = [sorted(engine.rows(sql)) for sql in (view.whole(tables("before")), as_written(case))]

    assert found == [[(2,), (3,), (4,)]] * 2
