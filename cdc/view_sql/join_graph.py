"""Which columns of the tables of a view are equal in every row of its result that shows both tables.

With them the rows that a few changed rows can meet are found without reading whole tables: a row of orders meets only
items whose `order_id` is its `id`. Only a SELECT directly over tables has such a graph.

A LEFT JOIN may show NULLs for a table between two others; an equality with its columns does not hold in such a row. So
those of WHERE, which hold in every row, are followed first, the others in the order of the joins, and every table must
have a column that is equal to one of a table before it: then all tables before a LEFT JOIN are found without the table
that it adds. RIGHT and FULL JOIN have no such order.
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
    required: frozenset[str]
    """The aliases whose rows are in every row of the result, so that they are never NULL."""
    equal: tuple[tuple[ColumnOf, ColumnOf], ...]
    """Equal columns: those of WHERE, then the others in the order of the joins."""
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
        has_other_joins = any(join.method == "NATURAL" or join.side in {"RIGHT", "FULL"} for join in joins)
        if has_other_joins or list(select.find_all(exp.Query))[1:]:
            return None
        tables = {table.alias_or_name: f"{table.db}.{table.name}" for table in named}
        if len(tables) < len(named) or not set(tables.values()) <= columns.keys():
            return None
        names = _Names(tables, columns)
        equal = tuple(_equal_columns(select, joins, names))
        required = frozenset(
            alias
            for alias, join in zip(tables, [None, *joins], strict=True)
            if join is None or not (join.side or join.kind in {"SEMI", "ANTI"})
        )
        found = {name: names.column(_shown(select, name)) for name in key}
        shown_columns = {name: column for name, column in found.items() if column is not None}
        return cls(tables, required, equal, shown_columns) if _is_ordered([*tables], equal) else None

    def steps(self, start: str) -> list[Lookup]:
        """Return how the rows of all other tables are found from rows of one."""
        known, steps = {start}, list[Lookup]()
        while len(known) < len(self.tables):
            step = next(self._next(known))
            known.add(step.wanted.alias)
            steps.append(step)
        return steps

    def path(self, start: str, end: str) -> list[Lookup]:
        """Return those of the steps that find rows of the table `end`."""
        found, path = {step.wanted.alias: step for step in self.steps(start)}, list[Lookup]()
        while end != start:
            path.append(found[end])
            end = found[end].known.alias
        return path[::-1]

    def _next(self, known: set[str]) -> Iterator[Lookup]:
        for one, other in self.equal:
            if one.alias in known and other.alias not in known:
                yield Lookup(one, other)
            elif other.alias in known and one.alias not in known:
                yield Lookup(other, one)


def _shown(select: exp.Select, name: str) -> exp.Expr | None:
    """Return what a column of the result shows, perhaps by a `*`; None if nothing has the name."""
    for item in select.expressions:
        if item.alias_or_name.lower() == name.lower():
            return item.unalias()
    star = next((item for item in select.expressions if item.is_star), None)
    return None if star is None else exp.column(name, table=star.text("table"))


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


def _equal_columns(select: exp.Select, joins: Sequence[exp.Join], names: _Names) -> Iterator[tuple[ColumnOf, ColumnOf]]:
    where = select.args.get("where")
    yield from _of_condition(None if where is None else where.this, names)
    for number, join in enumerate(joins, 1):
        yield from _of_using(join, number, names)
        yield from _of_condition(join.args.get("on"), names)


def _of_using(join: exp.Join, number: int, names: _Names) -> Iterator[tuple[ColumnOf, ColumnOf]]:
    aliases = list(names.tables)
    for identifier in join.args.get("using") or ():
        wanted = names.spelled(aliases[number], identifier.name)
        for earlier in aliases[:number]:
            known = names.spelled(earlier, identifier.name)
            if wanted is not None and known is not None:
                yield ColumnOf(earlier, known), ColumnOf(aliases[number], wanted)
                break


def _of_condition(condition: exp.Expr | None, names: _Names) -> Iterator[tuple[ColumnOf, ColumnOf]]:
    found = () if condition is None else equalities_of(condition)
    # rows that `<=>` joins by NULL are not found by values
    for equality in (one for one in found if isinstance(one, exp.EQ)):
        one, other = names.column(equality.this), names.column(equality.expression)
        if one is not None and other is not None and one.alias != other.alias:
            yield one, other


def _is_ordered(aliases: Sequence[str], equal: Sequence[tuple[ColumnOf, ColumnOf]]) -> bool:
    """Whether every table has a column that is equal to one of a table before it."""
    place = {alias: number for number, alias in enumerate(aliases)}
    joined = {max(place[one.alias], place[other.alias]) for one, other in equal}
    return len(joined) == len(aliases) - 1
