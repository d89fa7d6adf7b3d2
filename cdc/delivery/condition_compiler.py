"""Compiles the tree of a condition to functions that evaluate it over one row with exactly the result of Spark.

Spark evaluates in ANSI mode: an overflow is an error of the row. The second operand of AND and OR, and the branches of
CASE and coalesce, are evaluated only if they are needed, so an error there counts only then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import Any, Final

from cdc.config.condition_syntax import Literal, Node, Reference
from cdc.delivery.condition_values import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LOCAL_TIMESTAMP,
    MOST_DIGITS,
    NULL,
    SMALLINT,
    TEXT,
    TIMESTAMP,
    ConditionType,
    TypeKind,
    Value,
    decimal_type,
    literal_of,
)

Row = Sequence[Value]
Evaluate = Callable[[Row], Value]
_LARGEST_INT: Final = 2**31 - 1
_LARGEST_BIGINT: Final = 2**63 - 1
_TIME_TYPES: Final = (DATE, TIMESTAMP, LOCAL_TIMESTAMP)


class NotEvaluable(ValueError):
    """The condition does not fit the types of the columns; the message says why."""


class RowFails(ArithmeticError):
    """Spark would end with an error for this row."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """An expression with its type."""

    type: ConditionType
    evaluate: Evaluate
    literal: Literal | None = None
    """The value that is written in the condition, if the expression is one."""


class Compiler:
    """Compiles expressions over given columns. Raises NotEvaluable."""

    def __init__(self, columns: Mapping[Reference, tuple[int, ConditionType]]) -> None:
        """columns: index of the value in a row, and type of each reference."""
        self._columns = columns
        self._lazy: Mapping[str, Callable[[tuple[Node, ...]], Compiled]] = {
            "and": self._and,
            "or": self._or,
            "not": self._not,
            "is null": self._is_null,
            "in": self._in,
            "case": self._case,
            "coalesce": self._coalesce,
            "nullif": self._nullif,
            "like": self._like,
        }
        """Calls whose arguments are not all evaluated, or are not all values."""

    def condition(self, node: Node) -> Evaluate:
        """Return the function that evaluates a condition."""
        return self._boolean(node).evaluate

    def compiled(self, node: Node) -> Compiled:
        """Return an expression of any type."""
        if isinstance(node, Reference):
            index, found = self._columns[node]
            return Compiled(found, lambda row: row[index])
        if isinstance(node, Literal):
            return _literal(node)
        if node.name in self._lazy:
            return self._lazy[node.name](node.arguments)
        arguments = [self.compiled(one) for one in node.arguments]
        if node.name in _COMPARE:
            return _comparison(node.name, *arguments)
        return _FUNCTIONS[node.name](arguments)

    def _boolean(self, node: Node) -> Compiled:
        found = self.compiled(node)
        if found.type.kind not in {TypeKind.BOOLEAN, TypeKind.NULL}:
            raise NotEvaluable(f"expected a condition, got a value of type {found.type.name}")
        return found

    def _and(self, arguments: tuple[Node, ...]) -> Compiled:
        left, right = (self._boolean(one).evaluate for one in arguments)

        def evaluate(row: Row) -> Value:
            first = left(row)
            if first is False:
                return False
            second = right(row)
            return second if first or second is False else None

        return Compiled(BOOLEAN, evaluate)

    def _or(self, arguments: tuple[Node, ...]) -> Compiled:
        left, right = (self._boolean(one).evaluate for one in arguments)

        def evaluate(row: Row) -> Value:
            first = left(row)
            if first:
                return True
            second = right(row)
            return second if first is False or second else None

        return Compiled(BOOLEAN, evaluate)

    def _not(self, arguments: tuple[Node, ...]) -> Compiled:
        inner = self._boolean(arguments[0]).evaluate

        def evaluate(row: Row) -> Value:
            found = inner(row)
            return None if found is None else not found

        return Compiled(BOOLEAN, evaluate)

    def _is_null(self, arguments: tuple[Node, ...]) -> Compiled:
        inner = self.compiled(arguments[0]).evaluate
        return Compiled(BOOLEAN, lambda row: inner(row) is None)

    def _in(self, arguments: tuple[Node, ...]) -> Compiled:
        value, *choices = _of_one_type([self.compiled(one) for one in arguments])
        equals = [_comparison("=", value, one).evaluate for one in choices]

        def evaluate(row: Row) -> Value:
            if value.evaluate(row) is None:
                return None
            result: Value = False
            for one in equals:
                found = one(row)
                if found:
                    return True
                result = None if found is None else result
            return result

        return Compiled(BOOLEAN, evaluate)

    def _case(self, arguments: tuple[Node, ...]) -> Compiled:
        *pairs, otherwise = arguments
        tests = [self._boolean(one) for one in pairs[::2]]
        if any(one.type is NULL for one in tests):
            raise NotEvaluable("NULL is no condition of CASE")
        conditions = [one.evaluate for one in tests]
        results = [self.compiled(one) for one in (*pairs[1::2], otherwise)]
        found = _common_type(results)
        branches = list(zip(conditions, [one.evaluate for one in results], strict=False))
        rest = results[-1].evaluate

        def evaluate(row: Row) -> Value:
            for condition, result in branches:
                if condition(row):
                    return result(row)
            return rest(row)

        return Compiled(found, evaluate)

    def _coalesce(self, arguments: tuple[Node, ...]) -> Compiled:
        values = [self.compiled(one) for one in arguments]
        evaluates = [one.evaluate for one in values]

        def evaluate(row: Row) -> Value:
            for one in evaluates:
                found = one(row)
                if found is not None:
                    return found
            return None

        return Compiled(_common_type(values), evaluate)

    def _nullif(self, arguments: tuple[Node, ...]) -> Compiled:
        value, other = (self.compiled(argument) for argument in arguments)
        is_equal = _comparison("=", value, other).evaluate
        return Compiled(_common_type([value]), lambda row: None if is_equal(row) else value.evaluate(row))

    def _like(self, arguments: tuple[Node, ...]) -> Compiled:
        value, pattern, escape = (self.compiled(argument) for argument in arguments)
        written = [one.literal.value if one.literal is not None else None for one in (pattern, escape)]
        if not all(isinstance(one, str) for one in written) or len(str(written[1])) != 1:
            raise NotEvaluable("expected a text as pattern of LIKE, and one character as ESCAPE")
        _require(TypeKind.TEXT, [value], "LIKE")
        matches = _pattern(str(written[0]), str(written[1])).fullmatch
        return Compiled(BOOLEAN, _strict([value], lambda text: matches(text) is not None))


def _literal(node: Literal) -> Compiled:
    value: Value = node.value
    if node.kind is not None:
        found = next(one for one in _TIME_TYPES if one.name == node.kind)
        return _time_literal(str(value), found)
    if value is None:
        found = NULL
    elif isinstance(value, bool):
        found = BOOLEAN
    elif isinstance(value, float):
        found = DOUBLE
    elif isinstance(value, str):
        found = TEXT
    else:
        found = _number_type(value)
        value = Decimal(value)
    return Compiled(found, lambda _row: value, node)


def _time_literal(text: str, value_type: ConditionType) -> Compiled:
    try:
        value = literal_of(text, value_type)
    except ValueError as exc:
        raise NotEvaluable(f"a text is no {value_type.name}: expected YYYY-MM-DD or YYYY-MM-DD HH:MM:SS") from exc
    return Compiled(value_type, lambda _row: value)


def _number_type(value: int | Decimal) -> ConditionType:
    if isinstance(value, int) and -_LARGEST_INT - 1 <= value <= _LARGEST_INT:
        return INT
    if isinstance(value, int) and -_LARGEST_BIGINT - 1 <= value <= _LARGEST_BIGINT:
        return BIGINT
    _, digits, exponent = Decimal(value).as_tuple()
    scale = max(0, -int(exponent))
    precision = max(len(digits), scale)
    if precision > MOST_DIGITS:
        raise NotEvaluable(f"a number has more than {MOST_DIGITS} digits")
    return decimal_type(precision, scale)


def _require(kind: TypeKind, values: Sequence[Compiled], name: str) -> None:
    for one in values:
        if one.type.kind not in {kind, TypeKind.NULL}:
            raise NotEvaluable(f"{name!r} cannot read a value of type {one.type.name}")


def _strict(values: Sequence[Compiled], function: Callable[..., Value]) -> Evaluate:
    """Return a function that is NULL if one of the values is."""
    evaluates = [one.evaluate for one in values]

    def evaluate(row: Row) -> Value:
        found = [one(row) for one in evaluates]
        return None if None in found else function(*found)

    return evaluate


def _common_type(values: Sequence[Compiled]) -> ConditionType:
    """Return the type of a value that is one of several, whose values that type has unchanged."""
    types = [one.type for one in values if one.type.kind is not TypeKind.NULL]
    for one in types:
        if one.kind in {TypeKind.PADDED, TypeKind.OTHER}:
            raise NotEvaluable(f"a value of type {one.name} can only be compared")
    return reduce(_wider, types) if types else NULL


def _wider(left: ConditionType, right: ConditionType) -> ConditionType:
    if left == right:
        return left
    if left.kind is right.kind is TypeKind.EXACT:
        if left.bits is not None and right.bits is not None:
            return left if left.bits > right.bits else right
        return _wider_decimal(left, right)
    raise NotEvaluable(f"values of types {left.name} and {right.name} cannot be alternatives: choose one type")


def _wider_decimal(left: ConditionType, right: ConditionType) -> ConditionType:
    if left.precision is None or right.precision is None:
        return left if left.precision is None else right
    scale = max(left.scale, right.scale)
    precision = max(left.precision - left.scale, right.precision - right.scale) + scale
    if precision > MOST_DIGITS:
        raise NotEvaluable(
            f"values of types {left.name} and {right.name} have no type in common: it would need {precision} digits"
        )
    return decimal_type(precision, scale)


def _comparison(name: str, left: Compiled, right: Compiled) -> Compiled:
    left, right = _as_times(left, right), _as_times(right, left)
    compare = _COMPARE[name]
    first, second = left.evaluate, right.evaluate
    prepare = _prepared(left, right)
    if prepare is not None:
        own_first, own_second = first, second
        first = _if_known(own_first, prepare)
        second = _if_known(own_second, prepare)
    if name == "<=>":

        def is_same(row: Row) -> Value:
            one, other = first(row), second(row)
            return one is other if one is None or other is None else compare(one, other)

        return Compiled(BOOLEAN, is_same)

    def evaluate(row: Row) -> Value:
        one = first(row)
        other = second(row)
        return None if one is None or other is None else compare(one, other)

    return Compiled(BOOLEAN, evaluate)


def _of_one_type(values: list[Compiled]) -> list[Compiled]:
    """Return the values of an IN in the type that Spark gives all of them. Raises NotEvaluable if there is none."""
    for one in values:
        values = [_as_times(other, one) for other in values]
    kinds = {one.type.kind for one in values} - {TypeKind.NULL}
    if kinds == {TypeKind.EXACT, TypeKind.APPROXIMATE}:
        return [_as_double(one) for one in values]
    if len(kinds) > 1 and kinds != {TypeKind.TEXT, TypeKind.PADDED}:
        raise NotEvaluable(f"values of types {', '.join(sorted({one.type.name for one in values}))} cannot be compared")
    if kinds == {TypeKind.EXACT} and any(one.type.bits is None for one in values):
        reduce(_wider_decimal, [_as_decimal(one) for one in values if one.type is not NULL])
    return values


def _as_double(value: Compiled) -> Compiled:
    if value.type.kind is TypeKind.EXACT and value.type.precision is None:
        raise NotEvaluable("numeric without precision cannot be compared with a floating-point number")
    return Compiled(DOUBLE, _if_known(value.evaluate, float))


def _as_times(value: Compiled, other: Compiled) -> Compiled:
    """Return a text in the condition that is compared with a date or time as such a value."""
    if other.type in _TIME_TYPES and value.literal is not None and isinstance(value.literal.value, str):
        return _time_literal(value.literal.value, other.type)
    return value


def _prepared(left: Compiled, right: Compiled) -> Callable[[Value], Value] | None:
    """Return what makes values of both types comparable; None if they are. Raises NotEvaluable if nothing does."""
    kinds = {left.type.kind, right.type.kind} - {TypeKind.NULL}
    if TypeKind.OTHER in kinds:
        raise NotEvaluable("a column of such a type can only be compared with NULL, by IS NULL")
    if TypeKind.APPROXIMATE in kinds and kinds <= {TypeKind.APPROXIMATE, TypeKind.EXACT}:
        if any(one.type.kind is TypeKind.EXACT and one.type.precision is None for one in (left, right)):
            raise NotEvaluable("numeric without precision cannot be compared with a floating-point number")
        return _floating
    if TypeKind.PADDED in kinds:
        return _padded(left, right)
    if len(kinds) > 1:
        raise NotEvaluable(f"values of types {left.type.name} and {right.type.name} cannot be compared")
    for value, other in ((left, right), (right, left)):
        if value.type.bits is not None and _is_beyond_bigint(other):
            # Spark finds NULL smaller than such a number
            raise NotEvaluable("an integer cannot be compared with a number that no integer reaches")
    if kinds == {TypeKind.EXACT} and (left.type.bits is None or right.type.bits is None):
        _wider_decimal(_as_decimal(left), _as_decimal(right))
    return None


def _is_beyond_bigint(value: Compiled) -> bool:
    number = None if value.literal is None else value.literal.value
    if isinstance(number, bool) or not isinstance(number, int | Decimal):
        return False
    return not -_LARGEST_BIGINT - 1 <= number <= _LARGEST_BIGINT


def _as_decimal(value: Compiled) -> ConditionType:
    """Return the decimal type of a number; an integer in the condition has just its digits."""
    if value.type.bits is None or value.literal is None:
        return value.type
    return decimal_type(len(str(abs(int(value.literal.value or 0)))), 0)


def _floating(value: Value) -> Value:
    number = float(value)
    # NaN equals itself and is the greatest number
    return (1, 0.0) if math.isnan(number) else (0, number)


def _padded(left: Compiled, right: Compiled) -> Callable[[Value], Value]:
    for one in (left, right):
        if one.type.kind is TypeKind.TEXT and one.literal is None:
            raise NotEvaluable(
                "char(n) can be compared only with texts in the condition, and with other columns char(n)"
            )
        if one.type.kind not in {TypeKind.TEXT, TypeKind.PADDED, TypeKind.NULL}:
            raise NotEvaluable(f"values of types {left.type.name} and {right.type.name} cannot be compared")
    width = max(map(_length, (left, right)))
    return lambda text: text.ljust(width)


def _length(value: Compiled) -> int:
    """Return the length of a value of type char(n), or of a text in the condition."""
    if value.type.kind is TypeKind.PADDED:
        return value.type.precision or 0
    return 0 if value.literal is None or value.literal.value is None else len(str(value.literal.value))


def _if_known(evaluate: Evaluate, prepare: Callable[[Value], Value]) -> Evaluate:
    def prepared(row: Row) -> Value:
        found = evaluate(row)
        return None if found is None else prepare(found)

    return prepared


_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": lambda left, right: left == right,
    "<=>": lambda left, right: left == right,
    "<>": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
}


def _pattern(pattern: str, escape: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern of LIKE."""
    parts: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            following = next(characters, "")
            if following not in {"_", "%", escape} or not following:
                raise NotEvaluable("the escape character of LIKE has to be followed by _, % or itself")
            parts.append(re.escape(following))
        else:
            parts.append({"_": ".", "%": ".*"}.get(character, re.escape(character)))
    return re.compile("".join(parts), re.DOTALL)


def _arithmetic(name: str, operate: Callable[[Decimal, Decimal], Decimal]) -> Callable[[list[Compiled]], Compiled]:
    def compiled(values: list[Compiled]) -> Compiled:
        types = [one.type for one in values]
        bits = max((one.bits or 0 for one in types), default=0)
        if any(one.bits is None for one in types):
            raise NotEvaluable(f"{name!r} can compute only with integers")
        result = next(one for one in (SMALLINT, INT, BIGINT) if one.bits == bits)
        largest = 2 ** (bits - 1) - 1

        def within(left: Decimal, right: Decimal) -> Decimal:
            found = Decimal(int(operate(int(left), int(right))))  # type: ignore[arg-type]
            if not -largest - 1 <= found <= largest:
                raise RowFails
            return found

        return Compiled(result, _strict(values, within))

    return compiled


def _of_texts(name: str, result: ConditionType, function: Callable[..., Value]) -> Callable[[list[Compiled]], Compiled]:
    def compiled(values: list[Compiled]) -> Compiled:
        _require(TypeKind.TEXT, values, name)
        return Compiled(result, _strict(values, function))

    return compiled


def _substring(values: list[Compiled]) -> Compiled:
    _require(TypeKind.TEXT, values[:1], "substring")
    if any(one.type not in {SMALLINT, INT, NULL} for one in values[1:]):
        raise NotEvaluable("'substring' needs a position and a length that are int")
    return Compiled(TEXT, _strict(values, _part))


def _part(text: str, position: Decimal, length: Decimal = Decimal(_LARGEST_INT)) -> str:
    first = int(position)
    start = first - 1 if first > 0 else len(text) + first if first < 0 else 0
    end = max(start + int(length), -_LARGEST_INT - 1)
    return text[max(start, 0) : max(end, 0)] if end > start else ""


def _isnan(values: list[Compiled]) -> Compiled:
    if values[0].type not in {FLOAT, DOUBLE}:
        raise NotEvaluable("'isnan' needs a floating-point number")
    inner = values[0].evaluate

    def evaluate(row: Row) -> Value:
        found = inner(row)
        return found is not None and math.isnan(found)

    return Compiled(BOOLEAN, evaluate)


_FUNCTIONS: Final[Mapping[str, Callable[[list[Compiled]], Compiled]]] = {
    "+": _arithmetic("+", lambda left, right: left + right),
    "-": _arithmetic("-", lambda left, right: left - right),
    "*": _arithmetic("*", lambda left, right: left * right),
    "concat": _of_texts("concat", TEXT, lambda *texts: "".join(texts)),
    "contains": _of_texts("contains", BOOLEAN, lambda text, part: part in text),
    "endswith": _of_texts("endswith", BOOLEAN, str.endswith),
    "isnan": _isnan,
    "length": _of_texts("length", INT, lambda text: Decimal(len(text))),
    "ltrim": _of_texts("ltrim", TEXT, lambda text: text.lstrip(" ")),
    "rtrim": _of_texts("rtrim", TEXT, lambda text: text.rstrip(" ")),
    "startswith": _of_texts("startswith", BOOLEAN, str.startswith),
    "substring": _substring,
    "trim": _of_texts("trim", TEXT, lambda text: text.strip(" ")),
}
