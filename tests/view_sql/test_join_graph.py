"""Equal columns of the tables of a SELECT, and how the rows of one are found from those of another."""

from __future__ import annotations

import pytest

from cdc.view_sql.join_graph import ColumnOf, JoinGraph, Lookup

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
    assert set(found.equal) == {
        (ColumnOf("c", "id"), ColumnOf("o", "customer_id")),
        (ColumnOf("i", "order_id"), ColumnOf("o", "id")),
        (ColumnOf("c", "name"), ColumnOf("i", "sku")),
    }
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
    assert graph("SELECT o.id FROM shop.orders o, shop.items i WHERE i.sku = 'a'", "id").steps("o") is None


def test_an_equality_that_joins_nulls_is_not_followed() -> None:
    assert graph("SELECT o.id FROM shop.orders o JOIN shop.items i ON i.order_id <=> o.id", "id").equal == ()


def test_using_names_equal_columns() -> None:
    found = graph("SELECT * FROM shop.orders JOIN shop.customers USING (id)", "id")
    assert found.equal == ((ColumnOf("orders", "id"), ColumnOf("customers", "id")),)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM shop.orders WHERE id IN (SELECT order_id FROM shop.items)",
        "SELECT id FROM (SELECT id FROM shop.orders)",
        "WITH o AS (SELECT id FROM shop.orders) SELECT id FROM o",
        "SELECT id FROM shop.orders UNION ALL SELECT id FROM shop.items",
        "SELECT id FROM shop.orders NATURAL JOIN shop.items",
        "SELECT id FROM shop.unknown",
    ],
)
def test_only_a_select_directly_over_known_tables_has_a_graph(sql: str) -> None:
    assert JoinGraph.of(sql, ["id"], COLUMNS) is None


def test_a_key_that_is_computed_is_no_column() -> None:
    assert graph("SELECT id + 1 AS id FROM shop.orders", "id").key == {}
