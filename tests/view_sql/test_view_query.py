"""The SQL of a view: its inputs, the whole query over other names, rows of given keys, words, and views over views."""

from __future__ import annotations

from typing import NamedTuple

import duckdb
import pytest
from pyspark.sql import SparkSession

from cdc.errors import ViewCycle, ViewKeyUnknown
from cdc.view_sql.changed_keys import InputsAtCut
from cdc.view_sql.view_query import ViewQuery, queries_of
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


def test_every_mention_of_a_table_has_its_sentence() -> None:
    sql = (
        "SELECT c.id, t.n FROM shop.customers c\n"
        "LEFT JOIN (SELECT customer_id, count(*) AS n FROM shop.orders GROUP BY 1) t ON t.customer_id = c.id"
    )
    groups = "give the groups (customer_id) of the subquery at 2:12"
    outer = "give the key (id); so do rows whose match in an outer join appears or disappears"

    assert ViewQuery.parse("shop.v", sql, ["id"]).explain() == [
        ("shop.customers", f"1:23: changed rows of c, joined with t, {outer}"),
        (
            "shop.orders",
            f"2:51: changed rows of orders {groups}, whose rows, joined with c, {outer}",
        ),
    ]


def test_a_subquery_without_groups_and_a_join_in_parentheses_are_named_by_their_place() -> None:
    sql = "SELECT x.id FROM (SELECT id FROM shop.a) x JOIN (shop.b JOIN shop.c ON c.id = b.c_id) ON b.id = x.id"

    rows = "give rows of the subquery at 1:19"

    assert ViewQuery.parse("shop.v", sql, ["id"]).explain() == [
        (
            "shop.a",
            f"1:34: changed rows of a {rows}, which, joined with the join at 1:49, give the key (id)",
        ),
        ("shop.b", "1:50: changed rows of b, joined with x, give the key (id)"),
        ("shop.c", "1:62: changed rows of c, joined with x, give the key (id)"),
    ]


def test_a_view_that_is_only_refreshed_says_why() -> None:
    view = ViewQuery.parse("shop.v", "SELECT id FROM shop.t LIMIT 3", ["id"])

    (topic, sentence) = view.explain()[0]

    assert (topic, sentence) == ("shop.t", f"only a refresh finds what changed; {view.only_refresh}")


class Defined(NamedTuple):
    name: str
    key: tuple[str, ...]
    sql: str


def view(name: str, sql: str, *key: str) -> Defined:
    return Defined(f"shop.{name}", key or ("id",), sql)


def test_a_view_over_views_reads_their_tables() -> None:
    queries = queries_of(
        [
            view("top", "SELECT p.id, shop.paid.total FROM shop.paid p JOIN shop.paid ON shop.paid.id = p.id -- twice"),
            view("paid", "SELECT id, sum(total) AS total FROM shop.orders o GROUP BY id HAVING sum(total) > 1;"),
        ]
    )
    assert queries["shop.top"].inputs == queries["shop.paid"].inputs == ("shop.orders",)

    connection = duckdb.connect()
    connection.execute("CREATE TABLE orders AS FROM (VALUES (1, 2), (1, 3), (2, 1)) AS t(id, total)")
    found = queries["shop.top"].whole({"shop.orders": "orders"}).replace("`", '"').replace("shop.paid.", "paid.")
    assert connection.execute(found).fetchall() == [(1, 5)]


def test_a_view_that_reads_itself_is_refused() -> None:
    cycle = [view("a", "SELECT id FROM shop.b"), view("b", "SELECT id FROM shop.c"), view("c", "SELECT id FROM shop.a")]
    with pytest.raises(ViewCycle, match=r"reads itself: shop.a → shop.b → shop.c → shop.a$"):
        queries_of(cycle)
    with pytest.raises(ViewCycle):
        queries_of([view("a", "SELECT id FROM shop.a")])


def test_an_error_of_an_inner_view_is_its_own() -> None:
    with pytest.raises(ViewKeyUnknown, match=r"shop\.inner"):
        queries_of([view("inner", "SELECT total FROM shop.orders"), view("outer", "SELECT id FROM shop.inner")])
