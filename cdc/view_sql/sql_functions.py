"""What the functions of Spark SQL mean for a view: aggregates, dependence on the order of rows, and non-determinism."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from sqlglot import exp

from cdc.config.sql_expression import BARE, CHANGING

ORDERED_BY_ROWS: Final = frozenset(
    {
        "any_value",
        "approx_percentile",
        "approx_top_k",
        "approx_top_k_accumulate",
        "approx_top_k_combine",
        "array_agg",
        "collect_list",
        "collect_set",
        "first",
        "first_value",
        "histogram_numeric",
        "hll_sketch_agg",
        "hll_union_agg",
        "kll_merge_agg_bigint",
        "kll_merge_agg_double",
        "kll_merge_agg_float",
        "kll_sketch_agg_bigint",
        "kll_sketch_agg_double",
        "kll_sketch_agg_float",
        "last",
        "last_value",
        "listagg",
        "max_by",
        "min_by",
        "mode",
        "percentile_approx",
        "string_agg",
        "theta_intersection_agg",
        "theta_sketch_agg",
        "theta_union_agg",
        "tuple_intersection_agg_double",
        "tuple_intersection_agg_integer",
        "tuple_sketch_agg_double",
        "tuple_sketch_agg_integer",
        "tuple_union_agg_double",
        "tuple_union_agg_integer",
    }
)
"""Aggregates with a result that depends on the order of the rows, or on which of several equal rows comes first."""
ANY_ORDER: Final = frozenset(
    {
        "any",
        "approx_count_distinct",
        "avg",
        "bit_and",
        "bit_or",
        "bit_xor",
        "bitmap_and_agg",
        "bitmap_construct_agg",
        "bitmap_or_agg",
        "bool_and",
        "bool_or",
        "corr",
        "count",
        "count_if",
        "count_min_sketch",
        "covar_pop",
        "covar_samp",
        "every",
        "grouping",
        "grouping_id",
        "kurtosis",
        "max",
        "mean",
        "measure",
        "median",
        "min",
        "percentile",
        "percentile_cont",
        "percentile_disc",
        "regr_avgx",
        "regr_avgy",
        "regr_count",
        "regr_intercept",
        "regr_r2",
        "regr_slope",
        "regr_sxx",
        "regr_sxy",
        "regr_syy",
        "skewness",
        "some",
        "std",
        "stddev",
        "stddev_pop",
        "stddev_samp",
        "sum",
        "try_avg",
        "try_sum",
        "var_pop",
        "var_samp",
        "variance",
    }
)
"""Aggregates with the same result for every order of the rows."""
_COLLECTING: Final = frozenset({"array_agg", "collect_list", "collect_set"})
"""Aggregates with the same elements for every order of the rows, in some order."""
_ORDERING: Final = frozenset({"array_sort", "sort_array"})
_INDIFFERENT: Final = frozenset({"array_contains", "array_max", "array_min", "array_size", "cardinality", "size"})
_BY_ELEMENT: Final = frozenset(
    {"array_compact", "array_distinct", "coalesce", "filter", "flatten", "ifnull", "nvl", "transform"}
)
"""Functions of an array that give the same elements for every order of the array, in some order."""
_NOT_DETERMINISTIC: Final = (CHANGING | {"aes_encrypt", "curdate", "current_path", "raise_error"}) - BARE
_SPECIAL_TIME: Final = re.compile(
    r"\s*(now|today|tomorrow|yesterday)(\s+\S+|z|ut\S*|gmt\S*|[+-]\d\S*|[a-z]+/\S+)?\s*", re.IGNORECASE
)
"""A text that Spark converts to another date or time every day; a time zone may follow."""
_READS_TIMES: Final = frozenset(
    {
        "add_months",
        "convert_timezone",
        "date",
        "date_add",
        "date_diff",
        "date_format",
        "date_part",
        "date_sub",
        "date_trunc",
        "dateadd",
        "datediff",
        "datepart",
        "day",
        "dayname",
        "dayofmonth",
        "dayofweek",
        "dayofyear",
        "from_utc_timestamp",
        "hour",
        "last_day",
        "minute",
        "month",
        "monthname",
        "months_between",
        "next_day",
        "quarter",
        "second",
        "timestamp",
        "timestamp_ltz",
        "timestamp_ntz",
        "to_date",
        "to_timestamp",
        "to_timestamp_ltz",
        "to_timestamp_ntz",
        "to_unix_timestamp",
        "to_utc_timestamp",
        "trunc",
        "try_to_date",
        "try_to_timestamp",
        "unix_date",
        "unix_micros",
        "unix_millis",
        "unix_seconds",
        "unix_timestamp",
        "weekday",
        "weekofyear",
        "window",
        "year",
    }
)
"""Functions that convert a text to a date or a time."""
_COMPARES: Final = (exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.NullSafeNEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
_TIMES: Final = ("DATE", "TIME")
"""How names of the types of dates and times begin."""


def name_of(node: exp.Expr) -> str:
    """Return the name of a called function in lower case; empty for anything else."""
    return node.name.lower() if isinstance(node, exp.Anonymous) else ""


def is_aggregate(node: exp.Expr) -> bool:
    """Whether the node itself is the call of an aggregate function, and no window function."""
    if isinstance(node.parent, exp.Window):
        return False
    if isinstance(node, exp.Any):
        return not isinstance(node.parent, exp.Like | exp.ILike | exp.Not)
    return name_of(node) in ORDERED_BY_ROWS | ANY_ORDER


def has_aggregate(node: exp.Expr) -> bool:
    """Whether an aggregate function is called in an expression, outside of its subqueries."""
    return any(is_aggregate(one) for one in node.walk(prune=lambda one: isinstance(one, exp.Query)))


def changing_name(node: exp.Expr) -> str | None:
    """Return the name of a function whose result another evaluation may change; None for any other node.

    For a text such as 'today', which Spark may convert to a time, return the text in quotes.
    """
    name = name_of(node)
    if name == "unix_timestamp" and not node.expressions:
        return name
    if name in _NOT_DETERMINISTIC | BARE | {"curdate"}:
        return name
    if isinstance(node, exp.Column) and len(node.parts) == 1 and node.name.lower() in BARE:
        return node.name.lower()
    text = next((text for text in _converted_texts(node) if _SPECIAL_TIME.fullmatch(text)), None)
    return None if text is None else repr(text)


def _converted_texts(node: exp.Expr) -> Iterator[str]:
    """Yield the literals that are operands of a node which may convert them to a date or a time."""
    operands: list[exp.Expr | None] = []
    if isinstance(node, exp.Cast) and node.to.this.value.startswith(_TIMES):
        operands = [node.this]
    elif isinstance(node, _COMPARES):
        operands = [node.this, node.expression]
    elif isinstance(node, exp.Between):
        operands = [node.this, node.args["low"], node.args["high"]]
    elif isinstance(node, exp.In):
        operands = [node.this, *node.expressions]
    elif isinstance(node, exp.Case) and node.this is not None:
        operands = [node.this, *(branch.this for branch in node.args["ifs"])]
    elif isinstance(node, exp.Extract):
        operands = [node.expression]
    elif name_of(node) in _READS_TIMES:
        operands = list(node.expressions)
    for operand in operands:
        literal = None if operand is None else operand.unnest()
        if isinstance(literal, exp.RawString) or (isinstance(literal, exp.Literal) and literal.is_string):
            yield literal.name


def depends_on_order(node: exp.Expr) -> bool:
    """Whether the node is an aggregate whose result depends on the order of the rows, with nothing that decides it."""
    name = name_of(node)
    if name not in ORDERED_BY_ROWS or not is_aggregate(node) or isinstance(node.parent, exp.WithinGroup):
        return False
    if name == "mode" and len(node.expressions) > 1:
        return False  # with `true`, the lowest of several most frequent values
    if name not in _COLLECTING:
        return True
    inner, outer = node, node.parent
    while isinstance(outer, exp.Filter | exp.Paren) or (outer is not None and _keeps_elements(outer, inner)):
        inner, outer = outer, outer.parent
    return not (outer is not None and _ignores_order(outer, inner))


def _keeps_elements(call: exp.Expr, array: exp.Expr) -> bool:
    if name_of(call) not in _BY_ELEMENT or array not in call.expressions:
        return False
    # a lambda with a second parameter gets the index of the element
    return all(len(one.expressions) == 1 for one in call.expressions if isinstance(one, exp.Lambda))


def _ignores_order(call: exp.Expr, array: exp.Expr) -> bool:
    name, arguments = name_of(call), call.expressions
    is_sorted = name in _ORDERING and not any(isinstance(one, exp.Lambda) for one in arguments)
    return (is_sorted or name in _INDIFFERENT) and arguments[0] is array
