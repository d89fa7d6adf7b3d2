"""Views over views: their SQL over tables alone, and views that read themselves."""

from __future__ import annotations

from typing import NamedTuple

import duckdb
import pytest

from cdc.errors import ViewCycle, ViewKeyUnknown
from cdc.view_sql.views_over_views import queries_of


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
