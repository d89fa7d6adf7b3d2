"""Equal columns of the tables of a SELECT, and how the rows of one are found from those of another."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from cdc.view_sql.join_graph import ColumnOf, Equality, JoinGraph, Lookup

COLUMNS = {
    "shop.orders": ["id", "customer_id", "Status"],
    "shop.customers": ["id", "name"],
    "shop.items": ["id", "order_id", "sku"],
}
FROM = "FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id LEFT JOIN shop.items i"


def graph(sql: str, *key: str) -> JoinGraph:
    found = JoinGraph.of(sql, key, COLUMNS)
    assert found is not None
    return found


def test_equal_columns_come_from_conditions_that_and_joins() -> None:
    sql = f"SELECT o.id AS n, status {FROM} ON (i.order_id = o.id AND (i.sku > 'a' OR i.id = c.id)) WHERE name = sku"
    found = graph(sql, "n", "status")

    assert found.tables == {"o": "shop.orders", "c": "shop.customers", "i": "shop.items"}
    assert found.equal == (
        Equality(ColumnOf("c", "name"), ColumnOf("i", "sku"), None),
        Equality(ColumnOf("c", "id"), ColumnOf("o", "customer_id"), "c"),
        Equality(ColumnOf("i", "order_id"), ColumnOf("o", "id"), "i"),
    )
    assert found.required == {"o", "c"}
    assert found.key == {"n": ColumnOf("o", "id"), "status": ColumnOf("o", "Status")}


def test_rows_are_found_from_each_table() -> None:
    found = graph(f"SELECT o.id {FROM} ON i.order_id = o.id", "id")

    assert found.steps("i") == [
        Lookup(ColumnOf("i", "order_id"), ColumnOf("o", "id")),
        Lookup(ColumnOf("o", "customer_id"), ColumnOf("c", "id")),
    ]
    assert found.steps("c") == [
        Lookup(ColumnOf("c", "id"), ColumnOf("o", "customer_id")),
        Lookup(ColumnOf("o", "id"), ColumnOf("i", "order_id")),
    ]
    assert found.path("c", "o") == [Lookup(ColumnOf("c", "id"), ColumnOf("o", "customer_id"))]
    assert found.path("o", "o") == []


def test_a_table_that_may_show_nulls_is_followed_after_those_before_it() -> None:
    items = "LEFT JOIN shop.items i ON i.id = c.id AND i.order_id = o.id"
    for sql in (
        f"SELECT o.id FROM shop.orders o JOIN shop.customers c ON c.name = o.status {items}",
        f"SELECT o.id FROM shop.orders o, shop.customers c {items} WHERE c.name = o.status",
    ):
        assert graph(sql, "id").steps("c") == [
            Lookup(ColumnOf("c", "name"), ColumnOf("o", "Status")),
            Lookup(ColumnOf("c", "id"), ColumnOf("i", "id")),
        ]


def test_an_equality_that_joins_nulls_is_not_followed() -> None:
    assert (
        JoinGraph.of("SELECT o.id FROM shop.orders o JOIN shop.items i ON i.order_id <=> o.id", ["id"], COLUMNS) is None
    )


def test_using_names_equal_columns() -> None:
    found = graph("SELECT * FROM shop.orders JOIN shop.customers USING (id)", "id")
    assert found.equal == (Equality(ColumnOf("orders", "id"), ColumnOf("customers", "id"), "customers"),)


def test_using_means_the_first_table_with_the_column_that_is_visible() -> None:
    joined = "LEFT JOIN shop.items i USING (id) WHERE o.customer_id = c.id"
    for sql, alias in (
        (f"SELECT 1 FROM shop.orders o, shop.customers c {joined}", "o"),
        (f"SELECT 1 FROM shop.orders o JOIN shop.customers c ON c.name = o.status {joined}", "o"),
    ):
        assert [one for one in graph(sql).equal if one.join == "i"] == [
            Equality(ColumnOf(alias, "id"), ColumnOf("i", "id"), "i")
        ]
    semi = "SELECT 1 FROM shop.orders o LEFT SEMI JOIN shop.items s ON s.order_id = o.id"
    found = graph(f"{semi} JOIN shop.items i ON i.order_id = o.id JOIN shop.items j USING (sku)")
    assert found.equal[-1] == Equality(ColumnOf("i", "sku"), ColumnOf("j", "sku"), "j")


def test_spark_joins_relations_with_a_comma_before_the_joins_that_follow(spark: SparkSession) -> None:
    tables = "VALUES (1) AS a(id), VALUES (2) AS b(id)"
    values = "(VALUES (1, 'of a'), (2, 'of b')) AS c(id, v)"

    assert [row.v for row in spark.sql(f"SELECT v FROM {tables} LEFT JOIN {values} USING (id)").collect()] == ["of a"]
    filled = spark.sql(f"SELECT a.id FROM {tables} RIGHT JOIN {values} ON c.id = b.id WHERE b.id IS NULL")
    assert [row.id for row in filled.collect()] == [None]


@pytest.mark.parametrize("join", ["LEFT JOIN", "LEFT ANTI JOIN"])
def test_an_equality_of_two_earlier_tables_is_not_true_in_rows_without_a_match(join: str) -> None:
    between = f"{join} shop.items i ON i.order_id = o.id AND c.name = o.status"
    joined = "SELECT o.id FROM shop.orders o JOIN shop.customers c ON"

    assert JoinGraph.of(f"{joined} lower(c.name) = lower(o.status) {between}", ["id"], COLUMNS) is None
    found = graph(f"{joined} c.id = o.customer_id {between}")
    assert found.steps("o")[0] == Lookup(ColumnOf("o", "customer_id"), ColumnOf("c", "id"))


@pytest.mark.parametrize(
    ("join", "where"), [("LEFT SEMI JOIN", ""), ("JOIN", ""), ("LEFT JOIN", " WHERE i.sku = c.name")]
)
def test_an_equality_of_two_earlier_tables_is_true_in_rows_with_a_match(join: str, where: str) -> None:
    sql = (
        "SELECT o.id FROM shop.orders o JOIN shop.customers c ON lower(c.name) = lower(o.status)"
        f" {join} shop.items i ON i.order_id = o.id AND c.id = o.customer_id{where}"
    )

    assert {step.wanted.alias for step in graph(sql).steps("o")} == {"c", "i"}


def test_rows_of_an_earlier_table_are_not_found_from_a_join_that_may_have_no_match() -> None:
    items = "LEFT JOIN shop.items i ON i.order_id = o.id AND i.id = c.id"
    sql = f"SELECT o.id FROM shop.orders o CROSS JOIN shop.customers c {items}"

    assert JoinGraph.of(sql, ["id"], COLUMNS) is None
    assert len(graph(f"{sql} WHERE i.sku = o.status").steps("o")) == 2


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM shop.orders WHERE id IN (SELECT order_id FROM shop.items)",
        "SELECT id FROM (SELECT id FROM shop.orders)",
        "WITH o AS (SELECT id FROM shop.orders) SELECT id FROM o",
        "SELECT id FROM shop.orders UNION ALL SELECT id FROM shop.items",
        "SELECT id FROM shop.orders NATURAL JOIN shop.items",
        "SELECT id FROM shop.orders o RIGHT JOIN shop.items i ON i.order_id = o.id",
        "SELECT id FROM shop.orders o FULL JOIN shop.items i ON i.order_id = o.id",
        "SELECT o.id FROM shop.orders o, shop.items i WHERE i.sku = 'a'",
        f"SELECT o.id {FROM} ON i.order_id = o.id AND i.id = c.id".replace("o.customer_id", "o.id + 1"),
        "SELECT id FROM shop.unknown",
    ],
)
def test_only_a_select_of_known_tables_with_equal_columns_has_a_graph(sql: str) -> None:
    assert JoinGraph.of(sql, ["id"], COLUMNS) is None


def test_a_key_that_is_computed_is_no_column() -> None:
    assert graph("SELECT id + 1 AS id FROM shop.orders", "id").key == {}


def test_a_star_shows_the_columns_of_its_table() -> None:
    assert graph(f"SELECT o.*, c.name AS customer {FROM} ON i.order_id = o.id", "id", "customer").key == {
        "id": ColumnOf("o", "id"),
        "customer": ColumnOf("c", "name"),
    }
    assert graph("SELECT * FROM shop.orders", "status").key == {"status": ColumnOf("orders", "Status")}
    assert graph(f"SELECT * {FROM} ON i.order_id = o.id", "id").key == {}
    assert graph(f"SELECT o.* EXCEPT (id), i.* {FROM} ON i.order_id = o.id", "id").key == {}


def test_a_field_of_a_column_is_no_column_of_the_table_with_its_name() -> None:
    sql = "SELECT c.id FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id AND o.c.name = c.name"
    assert len(graph(sql).equal) == 1
