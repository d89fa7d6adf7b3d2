"""Columns of a view's key that can be NULL, as far as the SQL shows it."""

from __future__ import annotations

import pytest

from cdc.view_sql.view_query import ViewQuery

JOINED = "FROM shop.a a LEFT JOIN shop.b b ON b.id = a.b_id"


def causes(sql: str) -> list[str]:
    """The alias of a relation that an outer join fills with NULLs, or table and column."""
    found = ViewQuery.parse("shop.v", sql, ["k"]).null_causes()
    assert {one.column for one in found} <= {"k"}
    return [one.joined or f"{one.topic}.{one.source_column}" for one in found]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (f"SELECT b.id AS k {JOINED}", ["b", "shop.b.id"]),
        (f"SELECT a.id AS k {JOINED}", ["shop.a.id"]),
        (f"SELECT lower(b.name) AS k, count(*) AS n {JOINED} GROUP BY 1", ["b", "shop.b.name"]),
        (f"SELECT b.id + 1 AS k {JOINED}", ["b", "shop.b.id"]),
        ("SELECT a.id AS k FROM shop.a a RIGHT JOIN shop.b b ON b.id = a.b_id", ["a", "shop.a.id"]),
        ("SELECT b.id AS k FROM shop.a a FULL JOIN shop.b b ON b.id = a.b_id", ["b", "shop.b.id"]),
        ("SELECT k FROM shop.a", ["shop.a.k"]),
        ("SELECT * FROM shop.a", ["shop.a.k"]),
        (f"SELECT t.x AS k FROM (SELECT b.id AS x {JOINED}) t", ["b", "shop.b.id"]),
        (f"WITH t AS (SELECT b.id AS x {JOINED}) SELECT t.x AS k FROM t", ["b", "shop.b.id"]),
        ("SELECT a.id AS k FROM shop.a a UNION ALL SELECT b.x FROM shop.b b", ["shop.a.id", "shop.b.x"]),
        (
            "SELECT b.id AS k FROM shop.a a LEFT JOIN (shop.b b JOIN shop.c c ON c.id = b.id) ON b.x = a.x",
            ["b", "shop.b.id"],
        ),
        ("SELECT a.g AS k, count(*) AS n FROM shop.a a WHERE a.g IS NULL OR a.g > 1 GROUP BY a.g", ["shop.a.g"]),
        (f"SELECT b.id AS k {JOINED} WHERE b.id <=> a.id", ["b", "shop.b.id"]),
    ],
)
def test_a_key_that_can_be_null_has_its_causes(sql: str, expected: list[str]) -> None:
    assert causes(sql) == expected


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT coalesce(b.id, 0) AS k {JOINED}",
        f"SELECT b.id AS k {JOINED} WHERE b.id IS NOT NULL",
        f"SELECT b.id AS k {JOINED} WHERE b.id > 1 AND a.x = 5",
        f"SELECT b.id AS k {JOINED} WHERE NOT b.id IN (1, 2)",
        f"SELECT b.id AS k {JOINED} WHERE b.id = 1 OR b.id BETWEEN 5 AND 6",
        f"SELECT b.id AS k, count(*) AS n {JOINED} GROUP BY b.id HAVING b.id IS NOT NULL",
        f"SELECT b.id AS k {JOINED} JOIN shop.c c ON c.id = b.id",
        "SELECT a.g AS k, count(*) AS n FROM shop.a a WHERE lower(a.g) = 'x' GROUP BY a.g",
        "SELECT struct(a.g) AS k FROM shop.a a",
        "SELECT CASE WHEN a.g IS NULL THEN 0 ELSE 1 END AS k FROM shop.a a",
    ],
)
def test_conditions_and_replacements_leave_null_out(sql: str) -> None:
    assert causes(sql) == []


def test_a_condition_on_another_column_shows_that_the_join_has_a_match() -> None:
    assert causes(f"SELECT b.x AS k {JOINED} WHERE b.id > 0") == ["shop.b.x"]


def test_an_outer_join_after_a_condition_fills_its_table_with_nulls_again() -> None:
    sql = "SELECT a.id AS k FROM shop.a a JOIN shop.b b ON b.id = a.id RIGHT JOIN shop.c c ON c.id = a.id"
    assert causes(sql) == ["a", "shop.a.id"]


def test_a_right_join_after_a_comma_fills_the_tables_before_it_too() -> None:
    sql = "SELECT a.id AS k FROM shop.a a, shop.b b RIGHT JOIN shop.c c ON c.id = b.id"
    assert causes(sql) == ["a", "shop.a.id"]


def test_a_cause_has_its_place() -> None:
    (cause, _) = ViewQuery.parse("shop.v", f"SELECT a.id,\n  b.id AS k {JOINED}", ["k"]).null_causes()
    assert (cause.place, cause.joined) == ("2:3", "b")
