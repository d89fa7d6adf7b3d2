"""The SQL of a view: its inputs, the whole query over other names, and the rows of given keys."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from cdc.view_sql.changed_keys import InputsAtCut
from cdc.view_sql.view_query import ViewQuery
from tests.view_sql.random_views import COLUMNS, Case, Row
from tests.view_sql.view_engines import Spark, tables

A: list[Row] = [(1, 1, 5, 10), (2, 1, 5, 20), (3, None, None, 30)]
B: list[Row] = [(1, 1, 5, 7)]


def _spark(session: SparkSession) -> Spark:
    rows: dict[str, list[Row]] = {"shop.a": A, "shop.b": B, "shop.c": []}
    return Spark(session, Case("", (), rows, rows))


def test_the_inputs_are_all_tables_that_the_sql_names_each_once() -> None:
    sql = (
        "WITH b AS (SELECT * FROM shop.b) SELECT a.id FROM shop.c a JOIN b ON b.id = a.id JOIN shop.c d ON d.id = a.id"
    )

    assert ViewQuery.parse("shop.v", sql, ["id"]).inputs == ("shop.b", "shop.c")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT g AS k, count(*) AS n FROM shop.a GROUP BY g -- of a\n;",
        "SELECT a.id AS k, `b`.x FROM shop.a LEFT JOIN `shop`.`b` ON b.id = a.b_id",
        "WITH w AS (SELECT * FROM shop.a) SELECT w.id AS k, v.x FROM w JOIN w v ON v.id = w.id",
        "SELECT id AS k, x, row_number() OVER (ORDER BY id) AS n FROM shop.a",
        "SELECT id AS k, x FROM shop.a WHERE x > (SELECT min(x) FROM shop.b) UNION ALL SELECT g, x FROM shop.b",
    ],
)
def test_rows_of_keys_are_those_of_the_whole_query(spark: SparkSession, sql: str) -> None:
    engine, view = _spark(spark), ViewQuery.parse("shop.v", sql, ["k"])
    spark.sql("SELECT * FROM VALUES (2), (5), (NULL) AS t(k)").createOrReplaceTempView("wanted")

    whole = engine.rows(view.whole(tables("before")))
    found = engine.rows(view.of_keys(tables("before"), "wanted"))

    assert whole
    assert sorted(found, key=str) == sorted((row for row in whole if row[0] in {2, 5, None}), key=str)


def test_a_column_may_name_the_schema_of_its_table(spark: SparkSession) -> None:
    sql = "SELECT shop.a.id, count(shop.a.x) AS n FROM shop.a JOIN shop.b ON shop.b.id = shop.a.b_id GROUP BY shop.a.id"
    view = ViewQuery.parse("shop.v", sql, ["id"])

    assert sorted(_spark(spark).rows(view.whole(tables("before")))) == [(1, 1), (2, 1)]


def test_names_of_views_are_quoted(spark: SparkSession) -> None:
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW `the-table` AS SELECT 1 AS id")
    view = ViewQuery.parse("shop.v", "SELECT `the table`.id FROM shop.`the table`", ["id"])

    assert spark.sql(view.whole({"shop.the table": "the-table"})).collect() == [(1,)]


def test_a_view_that_is_only_refreshed_has_no_affected_keys() -> None:
    view = ViewQuery.parse("shop.v", "SELECT id FROM shop.a LIMIT 5", ["id"])
    cut = InputsAtCut(tables("before"), "changed")

    with pytest.raises(ValueError, match="LIMIT reads all rows"):
        view.affected_keys("shop.a", cut, cut)


def test_columns_are_those_of_the_tables() -> None:
    assert set(COLUMNS) == set(tables("before"))
