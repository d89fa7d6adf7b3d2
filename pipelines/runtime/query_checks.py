"""Which results of Spark's queries differ from one evaluation over the same rows to the next.

The text of a query does not show all of them: only with the types of its columns does Spark know that it compares a
text such as 'today' with a time, or that it adds floating-point numbers, whose sum depends on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RULES: Final = ("SpecialDatetimeValues", "ComputeCurrentTime")
"""Rules of Spark's optimizer that put the time of the evaluation into a query."""
_AGGREGATE: Final = "AggregateExpression"
_REPLACEABLE: Final = "org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable"
"""Aggregates that Spark computes by another one."""
_CHOOSES: Final = frozenset({"First", "Last", "Max", "Min"})
"""Aggregates that choose a value instead of computing one."""
_FLOATS: Final = frozenset({"float", "double"})


def changes_with_time(frame: DataFrame) -> bool:
    """Return whether the result of a query depends on when, or in which session, it is evaluated."""
    optimizer = frame.sparkSession._jvm.org.apache.spark.sql.catalyst.optimizer  # type: ignore[union-attr]  # noqa: SLF001
    for plan in _plans(frame):
        computed = optimizer.ReplaceExpressions.apply(plan)  # to_date becomes a cast
        if not plan.deterministic():
            return True
        if not all(computed.fastEquals(getattr(optimizer, rule).apply(computed)) for rule in _RULES):
            return True
    return False


def float_aggregates(frame: DataFrame) -> list[str]:
    """Return names of the aggregates of a query that add floating-point numbers, in any order.

    The average of integers is not among them: its sum is exact up to 2^53.
    """
    replaceable = frame.sparkSession._jvm.java.lang.Class.forName(_REPLACEABLE)  # type: ignore[union-attr]  # noqa: SLF001
    names: dict[str, None] = {}
    for function in _aggregates(frame):
        computed = function
        while replaceable.isInstance(computed):
            computed = computed.replacement()
        if _adds_floats(computed):
            names[function.prettyName()] = None
    return list(names)


def _aggregates(frame: DataFrame) -> Iterator[Any]:
    for plan in _plans(frame):
        for node in _below(plan):
            for expression in _sequence(node.expressions()):
                parts = (part for part in _below(expression) if part.getClass().getSimpleName() == _AGGREGATE)
                yield from (part.aggregateFunction() for part in parts)


def _adds_floats(function: Any) -> bool:
    kind = function.getClass().getSimpleName()
    if kind in _CHOOSES or not any(map(_is_float, _sequence(function.aggBufferAttributes()))):
        return False
    return kind != "Average" or any(map(_is_float, _sequence(function.children())))


def _is_float(expression: Any) -> bool:
    return expression.dataType().simpleString() in _FLOATS


def _plans(frame: DataFrame) -> list[Any]:
    """Return the analysed plans of a query and of the subqueries in its expressions."""
    plan = frame._jdf.queryExecution().analyzed()  # noqa: SLF001 - only the plan has the types
    return [plan, *_sequence(plan.subqueriesAll())]


def _below(node: Any) -> Iterator[Any]:
    yield node
    for child in _sequence(node.children()):
        yield from _below(child)


def _sequence(values: Any) -> list[Any]:
    return [values.apply(number) for number in range(values.size())]
