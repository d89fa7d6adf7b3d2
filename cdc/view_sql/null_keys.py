"""Which columns of a view's key can be NULL, as far as the SQL shows it: no key in the log has a NULL.

A column of the key can be NULL in two ways. An outer join fills its table with NULLs in rows without a match, or the
column of the table itself can be NULL, which only the source knows. Neither counts if a condition that every row meets
leaves NULL out: one of WHERE or HAVING, or the ON of a later JOIN.

An expression that this module does not know counts as never NULL, so that no view is refused for a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sqlglot import exp

from cdc.view_sql.query_structure import JoinKind, Query, Select, TableReference
from cdc.view_sql.sql_functions import name_of
from cdc.view_sql.sql_text import SqlText, offset_of, qualifier_of

_ARITHMETIC: Final = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.Paren, exp.Cast, exp.Trim)
_COMPARISONS: Final = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
_TESTS: Final = (exp.In, exp.Between, exp.Like, exp.ILike, exp.RegexpLike)
_NULL_FOR_NULL: Final = frozenset(
    {"concat", "date", "date_trunc", "day", "lower", "month", "to_date", "trunc", "upper", "year"}
)
"""Functions whose result is NULL if one of their arguments is, and never otherwise."""
_FIRST_VALUE: Final = frozenset({"coalesce", "ifnull", "nvl"})


class NullCause(NamedTuple):
    """One way in which a column of the key can be NULL."""

    column: str
    """Name of the column of the key."""
    place: str
    """line:column in the SQL of what can be NULL."""
    joined: str
    """Alias of the relation that an outer join fills with NULLs; empty: the column of the table is the cause."""
    topic: str = ""
    """Table that has the column."""
    source_column: str = ""


def null_causes(text: SqlText, query: Query, key: Sequence[str]) -> Iterator[NullCause]:
    """Yield every way in which a column of the key can be NULL."""
    for name in key:
        for joined, topic, column in _causes_of_output(query, name):
            place = text.place(offset_of(column) or 0)
            yield NullCause(name, place, joined, topic, column.name)


_Cause = tuple[str, str, exp.Column]
"""As in NullCause: the alias of the joined relation, the topic, and the column in the SQL."""


def _causes_of_output(query: Query, name: str) -> Iterator[_Cause]:
    selects = list(query.selects)
    names = [column.lower() for column, _ in selects[0].columns]
    for select in selects:
        if select.has_star:
            stars = [item for item in select.tree.expressions if item.is_star]
            if len(selects) == len(stars) == len(select.tree.expressions) == 1:
                yield from _Scope.of(select).causes(exp.column(name, table=stars[0].text("table") or None))
        elif name.lower() in names and len(select.columns) == len(names):
            yield from _Scope.of(select).causes(select.columns[names.index(name.lower())][1].unalias())


def source_columns(query: Query, name: str) -> Iterator[tuple[str, str] | None]:
    """Yield (topic, column) for each table whose column a column of the result is; None for any other expression."""
    selects = list(query.selects)
    names = [column.lower() for column, _ in selects[0].columns]
    for select in selects:
        item: exp.Expr | None = None
        if name.lower() in names and not select.has_star and len(select.columns) == len(names):
            item = select.columns[names.index(name.lower())][1].unalias()
        relation = _Scope.of(select).relation_of(item) if isinstance(item, exp.Column) else None
        if item is None or relation is None:
            yield None
        elif relation.topic is not None:
            yield relation.topic, item.name
        elif relation.query is not None:
            yield from source_columns(relation.query, item.name)


@dataclass
class _Scope:
    """The relations of one SELECT."""

    relations: dict[str, TableReference] = field(default_factory=dict)
    """Alias in lower case → relation."""
    filled: set[str] = field(default_factory=set)
    """Aliases that an outer join fills with NULLs where it has no match."""
    never_null: set[tuple[str, str]] = field(default_factory=set)
    """Alias and name, in lower case, of columns whose NULLs a condition leaves out."""

    @classmethod
    def of(cls, select: Select) -> _Scope:
        scope = cls()
        joins = {
            offset: condition
            for join in select.tree.find_all(exp.Join)
            if (condition := join.args.get("on")) is not None and (offset := offset_of(condition)) is not None
        }
        scope._add(list(select.relations), joins)  # Spark joins relations with a comma before the joins that follow
        for clause in ("where", "having"):
            if (condition := select.tree.args.get(clause)) is not None:
                scope._leave_out(_rejected(condition.this))
        return scope

    def relation_of(self, column: exp.Column) -> TableReference | None:
        """Return the relation of a column; None if only Spark knows it."""
        alias = self._alias_of(column)
        return None if alias is None else self.relations[alias]

    def causes(self, item: exp.Expr) -> Iterator[_Cause]:
        """Yield why an expression can be NULL."""
        if isinstance(item, exp.Column):
            yield from self._causes_of_column(item)
        elif isinstance(item, _ARITHMETIC) or name_of(item) in _NULL_FOR_NULL:
            for operand in item.iter_expressions():
                yield from self.causes(operand)
        elif name_of(item) in _FIRST_VALUE:
            operands = [list(self.causes(operand)) for operand in item.expressions]
            if all(operands) and not any(isinstance(operand, exp.Literal) for operand in item.expressions):
                yield from operands[-1]

    def _causes_of_column(self, column: exp.Column) -> Iterator[_Cause]:
        alias = self._alias_of(column)
        if alias is None or (alias, column.name.lower()) in self.never_null:
            return
        relation = self.relations[alias]
        if alias in self.filled:
            yield relation.alias, "", column
        if relation.topic is not None:
            yield "", relation.topic, column
        elif relation.query is not None:
            yield from _causes_of_output(relation.query, column.name)

    def _alias_of(self, column: exp.Column) -> str | None:
        """Return the alias of the relation of a column; None if only Spark knows it."""
        if column.text("db"):
            return None  # a field of a column
        qualifier = qualifier_of(column)
        if qualifier is None:
            return next(iter(self.relations)) if len(self.relations) == 1 else None
        return qualifier if qualifier in self.relations else None

    def _add(self, chain: Sequence[TableReference], conditions: dict[int, exp.Expr]) -> None:
        before: set[str] = set()
        for relation in chain:
            own = self._added(relation, conditions)
            if relation.kind in {JoinKind.RIGHT, JoinKind.FULL}:
                self.filled |= before
                self.never_null = {column for column in self.never_null if column[0] not in before}
            if relation.kind in {JoinKind.LEFT, JoinKind.FULL}:
                self.filled |= own
                self.never_null = {column for column in self.never_null if column[0] not in own}
            before |= own
            if relation.kind in {JoinKind.INNER, JoinKind.SEMI}:
                inside = (c for at, c in conditions.items() if relation.condition_start < at < relation.end)
                for condition in inside:
                    self._leave_out(_rejected(condition))

    def _added(self, relation: TableReference, conditions: dict[int, exp.Expr]) -> set[str]:
        """Add a relation, and return its aliases."""
        if relation.joined and not relation.alias:
            known = set(self.relations)
            self._add(relation.joined, conditions)
            return set(self.relations) - known
        if relation.kind not in {JoinKind.SEMI, JoinKind.ANTI}:
            self.relations[relation.alias.lower()] = relation
        return {relation.alias.lower()}

    def _leave_out(self, columns: set[exp.Column]) -> None:
        """Note that no row has NULL in one of these columns; then no outer join has filled their relations."""
        for column in columns:
            alias = self._alias_of(column)
            if alias is not None:
                self.never_null.add((alias, column.name.lower()))
                self.filled.discard(alias)


def _rejected(condition: exp.Expr) -> set[exp.Column]:
    """Return columns that are not NULL where a condition is true."""
    one = condition.unnest()
    if isinstance(one, exp.And):
        return _rejected(one.this) | _rejected(one.expression)
    if isinstance(one, exp.Or):
        return _rejected(one.this) & _rejected(one.expression)
    if isinstance(one, exp.Not):
        inner = one.this.unnest()
        if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
            return _strict(inner.this)
        return _compared(inner)
    return _compared(one) or _strict(one)


def _compared(test: exp.Expr) -> set[exp.Column]:
    """Return columns that are not NULL where a comparison is true or false; none for any other condition."""
    if isinstance(test, _COMPARISONS):
        return _strict(test.this) | _strict(test.expression)
    return _strict(test.this) if isinstance(test, _TESTS) else set()


def _strict(item: exp.Expr) -> set[exp.Column]:
    """Return columns that are not NULL where an expression is not."""
    if isinstance(item, exp.Column):
        return {item}
    if isinstance(item, _ARITHMETIC) or name_of(item) in _NULL_FOR_NULL:
        return set[exp.Column]().union(*(_strict(operand) for operand in item.iter_expressions()))
    return set()
