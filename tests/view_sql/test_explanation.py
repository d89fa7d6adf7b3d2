"""How changes find keys, in words: one sentence for every time that a view reads a table."""

from __future__ import annotations

from cdc.view_sql.view_query import ViewQuery


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
