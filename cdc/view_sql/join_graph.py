"""Which columns of the tables of a view are equal in every row of its result that shows both tables.

With them the rows that a few changed rows can meet are found without reading whole tables: a row of orders meets only
items whose `order_id` is its `id`. Only a SELECT directly over tables has such a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import sqlglot
from sqlglot import exp

from cdc.view_sql.query_structure import equalities_of


class ColumnOf(NamedTuple):
    """A column of one table in FROM."""

    alias: str
    column: str


class Lookup(NamedTuple):
    """Rows of a table are found by the values of a column of another one."""

    known: ColumnOf
    wanted: ColumnOf


@dataclass(frozen=True, slots=True)
class JoinGraph:
    """The tables of a SELECT, and their equal columns."""

    tables: Mapping[str, str]
    """Alias → topic."""
    equal: tuple[tuple[ColumnOf, ColumnOf], ...]
    key: Mapping[str, ColumnOf]
    """Column of the view's key → the column whose values it has; only columns that are shown as they are."""

    @classmethod
    def of(cls, sql: str, key: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Self | None:
        """Return the graph of a SELECT; None if it reads anything but tables. columns: topic → columns of the table."""
        select = sqlglot.parse_one(sql, dialect="spark")
        if not isinstance(select, exp.Select) or select.args.get("with_") or list(select.find_all(exp.Subquery)):
            return None
        joins = select.args.get("joins") or []
        source = select.args.get("from_")
        named = [source.this if source is not None else None, *(join.this for join in joins)]
        if not all(isinstance(table, exp.Table) and table.db and not table.args.get("joins") for table in named):
            return None
        if any(join.method == "NATURAL" for join in joins) or list(select.find_all(exp.Query))[1:]:
            return None
        tables = {table.alias_or_name: f"{table.db}.{table.name}" for table in named}
        if len(tables) < len(named) or not set(tables.values()) <= columns.keys():
            return None
        names = _Names(tables, columns)
        equal = [*_of_using(joins, names), *_of_conditions(select, joins, names)]
        shown = {item.alias_or_name.lower(): item.unalias() for item in select.expressions}
        found = {name: names.column(shown.get(name.lower())) for name in key}
        return cls(tables, tuple(equal), {name: column for name, column in found.items() if column is not None})

    def steps(self, start: str) -> list[Lookup] | None:
        """Return how the rows of all tables are found from rows of one; None if a table has no equal column."""
        known, steps = {start}, list[Lookup]()
        while len(known) < len(self.tables):
            step = next(self._next(known), None)
            if step is None:
                return None
            known.add(step.wanted.alias)
            steps.append(step)
        return steps

    def _next(self, known: set[str]) -> Iterator[Lookup]:
        for one, other in self.equal:
            if one.alias in known and other.alias not in known:
                yield Lookup(one, other)
            elif other.alias in known and one.alias not in known:
                yield Lookup(other, one)


@dataclass(frozen=True, slots=True)
class _Names:
    """Finds the table of a column name."""

    tables: Mapping[str, str]
    columns: Mapping[str, Sequence[str]]

    def column(self, node: exp.Expr | None) -> ColumnOf | None:
        """Return the column that an expression is; None if it is another expression, or no column of a table."""
        if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
            return None
        owners = [
            alias
            for alias in self.tables
            if (not node.table or alias.lower() == node.table.lower()) and self.spelled(alias, node.name) is not None
        ]
        if len(owners) != 1:
            return None
        name = self.spelled(owners[0], node.name)
        return None if name is None else ColumnOf(owners[0], name)

    def spelled(self, alias: str, name: str) -> str | None:
        """Return a column of a table as the table spells it; None if the table has no such column."""
        known = self.columns[self.tables[alias]]
        return next((column for column in known if column.lower() == name.lower()), None)


def _of_using(joins: Sequence[exp.Join], names: _Names) -> Iterator[tuple[ColumnOf, ColumnOf]]:
    aliases = list(names.tables)
    for number, join in enumerate(joins, 1):
        for identifier in join.args.get("using") or ():
            wanted = names.spelled(aliases[number], identifier.name)
            for earlier in aliases[:number]:
                known = names.spelled(earlier, identifier.name)
                if wanted is not None and known is not None:
                    yield ColumnOf(earlier, known), ColumnOf(aliases[number], wanted)
                    break


def _of_conditions(select: exp.Select, joins: Sequence[exp.Join], names: _Names) -> Iterator[tuple[ColumnOf, ColumnOf]]:
    where = select.args.get("where")
    for condition in [*(join.args.get("on") for join in joins), None if where is None else where.this]:
        found = () if condition is None else equalities_of(condition)
        # rows that `<=>` joins by NULL are not found by values
        for equality in (one for one in found if isinstance(one, exp.EQ)):
            one, other = names.column(equality.this), names.column(equality.expression)
            if one is not None and other is not None and one.alias != other.alias:
                yield one, other
