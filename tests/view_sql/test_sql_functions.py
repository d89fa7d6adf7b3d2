"""What functions mean for a view: every aggregate of Spark is known, and what depends on the order of rows."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from cdc.view_sql.sql_functions import ANY_ORDER, ORDERED_BY_ROWS, changing_name, depends_on_order, has_aggregate
from cdc.view_sql.sql_text import SqlText


def test_every_aggregate_of_spark_is_known(spark: SparkSession) -> None:
    registry = spark._jsparkSession.sessionState().functionRegistry()  # type: ignore[attr-defined]
    names = registry.listFunction().iterator()
    aggregates = set()
    while names.hasNext():
        name = names.next()
        if registry.lookupFunction(name).get().getGroup() == "agg_funcs":
            aggregates.add(name.funcName())

    assert aggregates == ORDERED_BY_ROWS | ANY_ORDER


@pytest.mark.parametrize(
    "item",
    [
        "sort_array(collect_list(x))",
        "array_sort(collect_list(DISTINCT x) FILTER (WHERE x > 1))",
        "sort_array(transform(collect_list(x), y -> y.name))",
        "array_sort(coalesce(array_distinct(array_agg(x)), array()))",
        "transform(sort_array(collect_list(x)), y -> y.name)",
        "size(collect_set(x))",
        "array_contains(collect_set(x), 1)",
        "listagg(x, ',') WITHIN GROUP (ORDER BY y)",
        "mode() WITHIN GROUP (ORDER BY x)",
        "mode(x, true)",
        "first(x) OVER (PARTITION BY y ORDER BY z)",
        "max(x)",
    ],
)
def test_an_aggregate_with_a_declared_order_is_accepted(item: str) -> None:
    assert not _any(depends_on_order, item)


@pytest.mark.parametrize(
    "item",
    [
        "collect_list(x)",
        "collect_set(x)",
        "sort_array(first(x))",
        "sort_array(slice(collect_list(x), 1, 2))",
        "sort_array(transform(collect_list(x), (y, i) -> i))",
        "array_sort(collect_list(x), (l, r) -> l.a - r.a)",
        "array_contains(a, first(x))",
        "string_agg(x, ',')",
        "max_by(x, y)",
        "mode(x)",
    ],
)
def test_an_aggregate_without_one_depends_on_the_order(item: str) -> None:
    assert _any(depends_on_order, item)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("now()", "now"),
        ("CURRENT_DATE", "current_date"),
        ("current_timestamp()", "current_timestamp"),
        ("localtimestamp", "localtimestamp"),
        ("user", "user"),
        ("rand(5)", "rand"),
        ("unix_timestamp()", "unix_timestamp"),
        ("DATE 'today'", "'today'"),
        ("TIMESTAMP_NTZ'Now UTC'", "'Now UTC'"),
        ('TIMESTAMP "yesterday"', "'yesterday'"),
        ("' tomorrow '::date", "' tomorrow '"),
        ("TRY_CAST(r'today' AS timestamp)", "'today'"),
        ("date('nowZ')", "'nowZ'"),
        ("to_date('tomorrow')", "'tomorrow'"),
        ("try_to_timestamp(('now'))", "'now'"),
        ("date_add('today', 1)", "'today'"),
        ("extract(DAY FROM 'now')", "'now'"),
        ("at >= 'today'", "'today'"),
        ("'today' <=> at", "'today'"),
        ("NOT at BETWEEN '2020-01-01' AND 'now'", "'now'"),
        ("at NOT IN ('2020-01-01', 'yesterday')", "'yesterday'"),
        ("CASE at WHEN 'today' THEN 1 END", "'today'"),
        ("current_path()", "current_path"),
        ("shuffle(x)", "shuffle"),
        ("input_file_name()", "input_file_name"),
        ("sum(uniform(1, 2))", "uniform"),
    ],
)
def test_a_function_that_is_not_deterministic_is_named(item: str, name: str) -> None:
    assert _any(changing_name, item) == name


@pytest.mark.parametrize("item", ["t.user", "unix_timestamp(x)", "DATE '2026-01-01'", "my_function(x)", "'now()'"])
def test_other_names_are_left_to_spark(item: str) -> None:
    assert not _any(changing_name, item)


@pytest.mark.parametrize(
    ("item", "is_one"),
    [
        ("any(x)", True),
        ("1 + count(*)", True),
        ("x LIKE ANY ('a', 'b')", False),
        ("max(x) OVER (PARTITION BY y)", False),
        ("array_max(x)", False),
    ],
)
def test_an_aggregate_is_found_in_an_expression(item: str, is_one: object) -> None:
    (tree,) = SqlText.parse("shop.v", f"SELECT {item} FROM shop.t").tree.selects

    assert has_aggregate(tree) == is_one


def _any(question: object, item: str) -> object:
    assert callable(question)
    tree = SqlText.parse("shop.v", f"SELECT {item} FROM shop.t").tree
    return next((answer for node in tree.walk() if (answer := question(node))), None)


@pytest.mark.parametrize(
    "item",
    ["'today'", "upper('now')", "s LIKE 'now'", "s = CAST('today' AS STRING)", "s = 'nowhere'", "at > '2020-01-01'"],
)
def test_a_text_that_is_no_time_is_accepted(item: str) -> None:
    assert not _any(changing_name, item)


def test_every_function_of_spark_that_is_not_deterministic_is_named(spark: SparkSession) -> None:
    registry = spark._jsparkSession.sessionState().functionRegistry()  # type: ignore[attr-defined]
    find_class = spark._jvm.java.lang.Class.forName  # type: ignore[union-attr]
    package = "org.apache.spark.sql.catalyst.expressions"
    changing = [find_class(f"{package}.{name}") for name in ("Nondeterministic", "ExpressionWithRandomSeed")]
    changing.append(find_class(f"{package}.CurrentTimestampLike"))
    names, unnamed = registry.listFunction().iterator(), []
    while names.hasNext():
        name = names.next()
        info = registry.lookupFunction(name).get()
        if info.getDb() is None and any(one.isAssignableFrom(find_class(info.getClassName())) for one in changing):
            unnamed += [] if _any(changing_name, f"{name.funcName()}()") else [name.funcName()]

    assert unnamed == []
