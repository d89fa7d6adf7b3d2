"""The structure of a query: what each SELECT reads, and where that is in the text."""

from __future__ import annotations

import pytest

from cdc.errors import ViewTableUnqualified
from cdc.view_sql.query_structure import JoinKind, structure_of
from cdc.view_sql.sql_text import SqlText

SQL = """WITH recent(id, n) AS (SELECT customer_id, count(*) FROM shop.orders GROUP BY 1)
SELECT c.id, c.name IS DISTINCT FROM 'x' AS other
FROM shop.customers c, shop.regions LEFT OUTER JOIN (shop.a JOIN shop.b ON a.id = b.id) ON a.id = c.id
  FULL JOIN (SELECT * FROM recent) AS r(x, y) USING (id) LATERAL VIEW explode(c.tags) v AS tag
WHERE c.id > 0 GROUP BY ALL HAVING count(*) > 1 ORDER BY 1"""


def test_relations_have_their_joins_and_aliases() -> None:
    (select,) = structure_of(SqlText.parse("shop.v", SQL)).branches

    assert [[(one.kind, one.alias, one.topic) for one in chain] for chain in select.chains] == [  # type: ignore[union-attr]
        [(JoinKind.FIRST, "c", "shop.customers")],
        [(JoinKind.FIRST, "regions", "shop.regions"), (JoinKind.LEFT, "", None), (JoinKind.FULL, "r", None)],
    ]


def test_tables_in_parentheses_subqueries_and_common_table_expressions_are_read() -> None:
    query = structure_of(SqlText.parse("shop.v", SQL))

    assert [leaf.topic for leaf in query.leaves()] == [
        "shop.customers", "shop.regions", "shop.a", "shop.b", "shop.orders",
    ]  # fmt: skip


def test_a_select_is_cut_where_its_clauses_begin() -> None:
    (select,) = structure_of(SqlText.parse("shop.v", SQL)).selects

    assert SQL[select.start : select.head_end].endswith("AS other\nFROM")
    tail = SQL[select.tail_start : select.tail_end].replace("\n", " ")
    assert tail == " LATERAL VIEW explode(c.tags) v AS tag WHERE c.id > 0 GROUP BY ALL"
    assert SQL[: select.end].endswith("HAVING count(*) > 1")


def test_columns_have_the_names_that_the_sql_gives_them() -> None:
    (select,) = structure_of(
        SqlText.parse("shop.v", "SELECT t.a, b AS c, upper(d), posexplode(e) AS (p, q), f.g.h FROM shop.t")
    ).selects

    assert [name for name, _ in select.columns] == ["a", "c", "", "p", "q", "h"]


def test_a_common_table_expression_is_visible_only_where_spark_sees_it() -> None:
    sql = "SELECT 1 FROM (WITH x AS (SELECT 1 FROM shop.t) SELECT * FROM x) y, x"

    with pytest.raises(ViewTableUnqualified, match="1:69: table 'x'"):
        structure_of(SqlText.parse("shop.v", sql))
