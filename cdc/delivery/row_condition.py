"""The condition `when` of a rule over `before`, `after` and `op`, in a subset of Spark SQL with exactly its meaning.

The result of a combination of values is remembered: most conditions read columns with few different values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from cdc.config.condition_syntax import Call, ConditionSyntaxError, Literal, Node, Reference, parse_condition
from cdc.delivery.condition_compiler import Compiler, NotEvaluable, RowFails
from cdc.delivery.condition_values import TEXT, Value, reader_of, type_of
from cdc.delivery.formats.table_changes import Image, TableChanges
from cdc.errors import EventNotEncodable, TransformFailed
from cdc.log_row import Operation
from cdc.table import Column, ReplicaIdentity, TableSchema

_OP: Final = Reference("", "op")
_SIDES: Final = ("before", "after")
_REMEMBERED: Final = 10_000
"""Combinations of values whose results are remembered."""
_FAILED: Final = object()
_ANY: Final = frozenset({True, False, None})


@dataclass(frozen=True, slots=True)
class Matches:
    """Result of a condition. A change that is in neither array does not match."""

    kept: np.ndarray
    """Numbers of the changes for which the condition is true, or unknown because a column was not sent."""
    failed: np.ndarray
    """Numbers of the changes with values for which Spark would end with an error."""


class RowCondition:
    """A condition over the changes of one version of a table. Raises TransformFailed if it does not fit the table."""

    def __init__(self, text: str, schema: TableSchema) -> None:
        self._topic = schema.topic
        try:
            self._tree = parse_condition(text)
            columns = {one: self._column(one, schema) for one in dict.fromkeys(_references(self._tree))}
            types = {one: TEXT if column is None else type_of(column) for one, column in columns.items()}
            places = {one: (place, found) for place, (one, found) in enumerate(types.items())}
            self._evaluate = Compiler(places).condition(self._tree)
        except (NotEvaluable, ConditionSyntaxError) as exc:
            raise TransformFailed(
                f"the condition of a delivery cannot be evaluated for table {self._topic!r}: {exc}",
                remedy="correct 'when' in the rule of the delivery, then run 'cdc doctor'",
            ) from exc
        self._columns = columns
        self._readers = [reader_of(found) for found in types.values()]
        self._results: dict[tuple[str | None, ...], object] = {}

    def matches(self, changes: TableChanges) -> Matches:
        """Evaluate the condition."""
        texts: list[list[str | None]] = []
        is_unknown = np.zeros(changes.count, dtype=bool)
        for reference, column in self._columns.items():
            if column is None:
                texts.append(changes.array("op").to_pylist())
                continue
            values = _side(changes, reference).columns[column.id]
            texts.append(values.texts.to_pylist())
            if values.unsent is not None:
                is_unknown |= values.unsent
        rows = zip(*texts, strict=True) if texts else iter([()] * changes.count)
        results = [self._result(row) for row in rows]
        is_true = np.array([result is True for result in results], dtype=bool)
        is_failed = np.array([result is _FAILED for result in results], dtype=bool)
        return Matches(np.flatnonzero(is_true | is_unknown), np.flatnonzero(is_failed & ~is_unknown))

    @property
    def can_match_deletes(self) -> bool:
        """False if the condition is true for no delete, whatever the row contained."""
        return True in _possible(self._tree)

    def refusal(self) -> EventNotEncodable:
        """Return the error of changes for which the condition has no result."""
        return EventNotEncodable(
            f"the condition of a delivery has no result for a row of table {self._topic!r}: a value is not in the type "
            "of its column in Spark, or a computation overflows",
            remedy="correct 'when' in the rule of the delivery, then run 'cdc dlq retry SINK'",
        )

    def _result(self, texts: tuple[str | None, ...]) -> object:
        """Return True, False, None or _FAILED for a row."""
        if texts in self._results:
            return self._results[texts]
        try:
            row = [None if text is None else read(text) for read, text in zip(self._readers, texts, strict=True)]
            result: object = self._evaluate(row)
        except (RowFails, ValueError, ArithmeticError):
            result = _FAILED
        if len(self._results) >= _REMEMBERED:
            self._results.clear()
        self._results[texts] = result
        return result

    def _column(self, found: Reference, schema: TableSchema) -> Column | None:
        if found == _OP:
            return None
        column = schema.column(found.name)
        if found.side not in _SIDES or column is None or column.generated:
            raise TransformFailed(
                f"the condition of a delivery for table {self._topic!r} reads {str(found)!r}: expected op, or a column "
                "of the table as before.NAME or after.NAME",
                remedy="correct 'when' in the rule of the delivery, then run 'cdc doctor'",
            )
        if found.side == "before" and schema.replica_identity is not ReplicaIdentity.FULL:
            raise TransformFailed(
                f"the condition of a delivery reads {str(found)!r}, but table {self._topic!r} does not send old rows",
                remedy="run ALTER TABLE … REPLICA IDENTITY FULL at the source, or write a condition over 'after' alone",
            )
        return column


def _side(changes: TableChanges, reference: Reference) -> Image:
    return changes.before if reference.side == "before" else changes.after


def _references(node: Node) -> Iterator[Reference]:
    if isinstance(node, Reference):
        yield node
    elif isinstance(node, Call):
        for one in node.arguments:
            yield from _references(one)


def _possible(node: Node) -> frozenset[Value]:
    """Return what a condition can be for a delete, of which `after` is null; too many results are no mistake."""
    if not isinstance(node, Call):
        return frozenset({_value_of_delete(node)}) if _is_fixed(node) else _ANY
    if node.name in {"and", "or"}:
        left, right = (_possible(one) for one in node.arguments)
        wins = node.name == "or"
        return frozenset(_connected(one, other, wins=wins) for one, other in product(left, right))
    if node.name == "not":
        return frozenset(None if one is None else not one for one in _possible(node.arguments[0]))
    return _possible_of_values(node)


def _possible_of_values(node: Call) -> frozenset[Value]:
    """Return the same of a condition over values."""
    values = [_value_of_delete(one) if _is_fixed(one) else _ANY for one in node.arguments]
    is_known = _ANY not in values
    if node.name == "is null":
        return frozenset({values[0] is None}) if is_known else _ANY - {None}
    if node.name == "in" and values[0] is None:
        return frozenset({None})
    if node.name in {"=", "<>", "<", "<=", ">", ">=", "like"} and None in values:
        return frozenset({None})
    if node.name in {"=", "<>", "in"} and is_known:
        is_equal = values[0] in values[1:]
        is_unknown = not is_equal and None in values
        return frozenset({None if is_unknown else is_equal is not (node.name == "<>")})
    return _ANY


def _is_fixed(node: Node) -> bool:
    """Whether a value is the same for every delete."""
    return isinstance(node, Literal) or (isinstance(node, Reference) and node.side != "before")


def _value_of_delete(node: Node) -> Value:
    if isinstance(node, Literal):
        return node.value
    return Operation.DELETE.value if node == _OP else None


def _connected(left: Value, right: Value, *, wins: bool) -> Value:
    """Return `left AND right`, or, if True wins, `left OR right`."""
    if wins in {left, right}:
        return wins
    return None if None in {left, right} else not wins
