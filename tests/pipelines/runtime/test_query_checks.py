"""Which results of queries differ from one evaluation to the next, as Spark understands the queries."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from pipelines.runtime.query_checks import changes_with_time, float_aggregates

ROWS = (
    "SELECT CAST(id AS INT) AS id, CAST(id AS DOUBLE) AS f, CAST(id AS FLOAT) AS r, CAST(id AS DECIMAL(10, 2)) AS d,"
    " DATE '2020-01-01' AS day, 'today' AS s FROM range(3)"
)


def query(spark: SparkSession, sql: str) -> DataFrame:
    return spark.sql(sql.replace("rows", f"({ROWS})"))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM rows WHERE day >= 'today'",
        "SELECT id FROM rows WHERE day >= concat('to', 'day')",
        "SELECT id FROM rows WHERE day >= CAST('today' AS STRING)",
        "SELECT to_timestamp(concat('to', 'day')) AS x FROM rows",
        "SELECT CASE WHEN id = 1 THEN day ELSE 'now' END AS x FROM rows",
        "SELECT coalesce(day, 'yesterday UTC') AS x FROM rows",
        "SELECT id, (SELECT max(day) FROM rows WHERE day < 'now') AS x FROM rows",
        "WITH late AS (SELECT array_max(array(day, 'tomorrow')) AS x FROM rows) SELECT x FROM late",
        "SELECT id, now() AS x FROM rows",
        "SELECT id, rand() AS x FROM rows",
    ],
)
def test_a_query_that_contains_the_time_of_its_evaluation_changes(spark: SparkSession, sql: str) -> None:
    assert changes_with_time(query(spark, sql))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, s = 'today' AS x, 'now' AS y FROM rows WHERE s <> 'today'",
        "SELECT id FROM rows WHERE day >= '2020-01-01' AND to_date('1970-01-01') < day",
        "SELECT day, sum(f) AS x FROM rows GROUP BY day",
    ],
)
def test_other_queries_do_not(spark: SparkSession, sql: str) -> None:
    assert not changes_with_time(query(spark, sql))


def test_a_text_of_a_row_is_no_special_time(spark: SparkSession) -> None:
    texts = query(spark, "SELECT try_cast(concat('to', substring(s, 3)) AS DATE) AS x FROM rows")

    assert not changes_with_time(texts)
    assert {row.x for row in texts.collect()} == {None}


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("sum(f)", ["sum"]),
        ("1 + try_sum(DISTINCT r)", ["try_sum"]),
        ("avg(f) FILTER (WHERE id > 1)", ["avg"]),
        ("mean(CAST(d AS DOUBLE))", ["mean"]),
        ("stddev(id)", ["stddev"]),
        ("corr(id, d)", ["corr"]),
        ("regr_slope(d, id)", ["regr_slope"]),
        ("sum(d)", []),
        ("sum(id) + avg(id) + avg(d)", []),
        ("sum(CAST(f AS DECIMAL(38, 9)))", []),
        ("max(f) - min(r)", []),
        ("count(f) + count(DISTINCT r) + approx_count_distinct(f)", []),
        ("median(f) + percentile(f, 0.5)", []),
        ("count_if(f > 1) + regr_count(f, f)", []),
        ("regr_avgx(f, f)", ["regr_avgx"]),
        ("any_value(f)", []),
    ],
)
def test_aggregates_that_add_floats_are_named(spark: SparkSession, sql: str, names: list[str]) -> None:
    whole = f"SELECT id, {sql} AS x FROM rows GROUP BY id"

    assert float_aggregates(query(spark, whole)) == names
    assert float_aggregates(query(spark, f"SELECT t.id FROM ({whole}) AS t WHERE t.x > 1")) == names
