"""What a view's SQL may not contain, and what lets Spark only refresh the view."""

from __future__ import annotations

import pytest

from cdc.errors import CdcError, ViewKeyUnknown, ViewNotDeterministic, ViewOrderUndeclared, ViewTableUnqualified
from cdc.view_sql.view_query import ViewQuery


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("SELECT id,\n now() AS t FROM shop.t", ViewNotDeterministic, "2:2: now is not deterministic"),
        ("SELECT id FROM shop.t TABLESAMPLE (5 ROWS)", ViewNotDeterministic, "1:23: TABLESAMPLE"),
        ("SELECT id, first(x) AS x FROM shop.t GROUP BY id", ViewOrderUndeclared, "1:12: the result of first"),
        ("SELECT id FROM shop.t JOIN orders ON orders.id = t.id", ViewTableUnqualified, "1:28: table 'orders'"),
        ("SELECT id FROM lake.shop.t", ViewTableUnqualified, "1:16: table 'lake.shop.t'"),
        ("SELECT order_id, idd FROM shop.t", ViewKeyUnknown, "column 'id' of the key; did you mean 'idd'"),
    ],
)
def test_an_error_names_its_cause_and_its_place(sql: str, error: type[CdcError], message: str) -> None:
    with pytest.raises(error, match=message):
        ViewQuery.parse("shop.v", sql, ["id"])


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT id, row_number() OVER (ORDER BY x) AS n FROM shop.t", "1:12: a window function"),
        ("SELECT id FROM shop.t ORDER BY x LIMIT 5", "1:34: LIMIT reads all rows"),
        ("SELECT id FROM shop.t OFFSET 5", "1:23: OFFSET"),
        ("SELECT id FROM shop.t UNION SELECT id FROM shop.u", "1:23: UNION without ALL"),
        ("SELECT id FROM shop.t EXCEPT SELECT id FROM shop.u", "1:23: EXCEPT"),
        ("SELECT id FROM shop.t INTERSECT SELECT id FROM shop.u", "1:23: INTERSECT"),
        ("SELECT id, count(*) AS n FROM shop.t GROUP BY ROLLUP (id)", "1:47: one row belongs to several groups"),
        ("SELECT id FROM shop.t WHERE x NOT IN (SELECT y FROM shop.u)", "a subquery is only analysed in FROM"),
        ("SELECT id FROM shop.t WHERE EXISTS (SELECT 1 FROM shop.u)", "a subquery is only analysed in FROM"),
        ("SELECT id, (SELECT max(y) FROM shop.u) AS y FROM shop.t", "a subquery is only analysed in FROM"),
        ("SELECT id FROM shop.t JOIN shop.u ON t.x > u.y", "1:28: no equality joins 'u'"),
        ("SELECT id FROM shop.t JOIN shop.u ON t.x = t.y", "no equality joins 'u'"),
        ("SELECT id FROM shop.t JOIN shop.u ON u.y = 5", "no equality joins 'u'"),
        ("SELECT id FROM shop.t JOIN shop.u ON t.x = u.x OR t.y = u.y", "no equality joins 'u'"),
        ("SELECT id FROM shop.t CROSS JOIN shop.u", "no equality joins 'u'"),
        ("SELECT id FROM shop.t, shop.u WHERE t.x = 5", "no equality joins 'u'"),
        ("SELECT t.id FROM shop.t, shop.u RIGHT JOIN shop.w ON w.x = u.x WHERE t.x = u.x", "write CROSS JOIN"),
        ("SELECT t.id FROM shop.t, shop.u FULL JOIN shop.w ON w.x = u.x WHERE t.x = u.x", "write CROSS JOIN"),
        ("SELECT id FROM shop.t NATURAL JOIN shop.u", "NATURAL"),
        ("SELECT id FROM shop.t, LATERAL (SELECT 1)", "LATERAL"),
        ("SELECT id FROM range(5)", "a table function"),
        ("SELECT id FROM (VALUES (1)) AS t(id)", "VALUES"),
        ("SELECT count(*) AS id FROM shop.t", "1:8: column 'id' of the key is an aggregate"),
        ("SELECT t.id FROM shop.t JOIN (SELECT max(x) AS x FROM shop.u) u ON u.x = t.x", "no named column"),
        ("SELECT session_window(x, '5 minutes') AS id FROM shop.t GROUP BY 1", "a session"),
        ("FROM shop.t |> SELECT id", "begins with SELECT"),
    ],
)
def test_what_is_not_incremental_has_a_reason_with_its_place(sql: str, reason: str) -> None:
    assert reason in (ViewQuery.parse("shop.v", sql, ["id"]).only_refresh or "")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM shop.t, shop.u WHERE t_key = u_key AND x > 5",
        "SELECT t.id FROM shop.t CROSS JOIN shop.u WHERE t.x = u.x",
        "SELECT t.id FROM shop.t JOIN shop.u ON (lower(t.x) = u.x AND t.y > u.y)",
        "SELECT t.id FROM shop.t FULL JOIN shop.u ON t.x <=> u.x",
        "SELECT t.id FROM shop.t JOIN shop.u USING (id)",
        "SELECT * FROM shop.t",
        "(SELECT id FROM shop.t) ORDER BY id",
        "SELECT DISTINCT id FROM shop.t LATERAL VIEW explode(tags) v AS tag",
        "SELECT window(ts, '5 minutes') AS id, count(*) AS n FROM shop.t GROUP BY 1",
        "SELECT id FROM (SELECT id FROM shop.t UNION ALL (SELECT id FROM shop.u)) t",
    ],
)
def test_other_shapes_are_incremental(sql: str) -> None:
    assert ViewQuery.parse("shop.v", sql, ["id"]).only_refresh is None
