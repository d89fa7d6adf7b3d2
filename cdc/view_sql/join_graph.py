"""Equal columns of the tables of a view, and how the rows of all tables are found from rows of one.

With them the rows that a few changed rows can meet are found without reading whole tables: a row of orders meets only
items whose `order_id` is its `id`. Only a SELECT directly over tables has such a graph.

An equality is not true in every row. Say that the search begins with rows of the table S. It concerns the rows of the
result that contain one of them, and those that appear or disappear with a match of one.

    WHERE                           its equalities are true in all of these rows
    ON of JOIN and LEFT SEMI JOIN   they are true, also those that compare two earlier tables
    ON of LEFT JOIN and ANTI JOIN   they are true where the join has a match. It has one if it joins S itself, or if
                                    a true equality compares a column of its table, which is then not NULL

Where a match is not certain, an equality finds the rows that can match from those of an earlier table. It finds no rows
of earlier tables, because the rows without a match would be missed. RIGHT and FULL JOIN are not analysed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import sqlglot
from sqlglot import exp

from cdc.view_sql.query_structure import JoinKind, equalities_of

_ALWAYS_MATCHED: Final = frozenset({JoinKind.FIRST, JoinKind.CROSS, JoinKind.INNER, JoinKind.SEMI})
"""Joins of which every row of the result has a match."""


class ColumnOf(NamedTuple):
    """A column of one table in FROM."""

    alias: str
    column: str


class Lookup(NamedTuple):
    """Rows of a table are found by the values of a column of another one."""

    known: ColumnOf
    wanted: ColumnOf


class Equality(NamedTuple):
    """Two equal columns of different tables."""

    one: ColumnOf
    other: ColumnOf
    join: str | None
    """Alias of the table whose ON or USING has the equality; None: WHERE has it."""


@dataclass(frozen=True, slots=True)
class JoinGraph:
    """The tables of a SELECT, and their equal columns."""

    tables: Mapping[str, str]
    """Alias → topic."""
    kinds: Mapping[str, JoinKind]
    """Alias → how the table is joined with those before it."""
    equal: tuple[Equality, ...]
    """The equalities of WHERE, then the others in the order of the joins."""
    key: Mapping[str, ColumnOf]
    """Column of the view's key → the column whose values it has; only columns that are shown as they are."""

    @classmethod
    def of(cls, sql: str, key: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Self | None:
        """Return the graph of a SELECT; None if it reads anything but tables. columns: topic → columns of the table.

        None also if the rows of all tables do not follow from the rows of every one.
        """
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
        kinds = dict(zip(tables, [JoinKind.FIRST, *map(_kind_of, joins)], strict=True))
        shown_columns = {name: names.column(_shown(select, name)) for name in key}
        graph = cls(
            tables,
            kinds,
            tuple(_equal_columns(select, joins, names)),
            {name: column for name, column in shown_columns.items() if column is not None},
        )
        return graph if all(len(graph.steps(alias)) == len(tables) - 1 for alias in tables) else None

    @property
    def required(self) -> frozenset[str]:
        """The aliases whose rows are in every row of the result, so that they are never NULL."""
        return frozenset(alias for alias, kind in self.kinds.items() if kind in _ALWAYS_MATCHED - {JoinKind.SEMI})

    def steps(self, start: str) -> list[Lookup]:
        """Return how the rows of all other tables are found from rows of one; of a table without a way, nothing."""
        matched = self._matched(start)
        reached, steps = {start}, list[Lookup]()
        while (step := next(self._next(reached, matched), None)) is not None:
            reached.add(step.wanted.alias)
            steps.append(step)
        return steps

    def path(self, start: str, end: str) -> list[Lookup]:
        """Return those of the steps that find rows of the table `end`."""
        step_to, path = {step.wanted.alias: step for step in self.steps(start)}, list[Lookup]()
        while end != start:
            path.append(step_to[end])
            end = step_to[end].known.alias
        return path[::-1]

    def _matched(self, start: str) -> set[str]:
        """Return the aliases that have a row in every row of the result for which `start` has one."""
        matched = {start} | {alias for alias, kind in self.kinds.items() if kind in _ALWAYS_MATCHED}
        before = -1
        while len(matched) > before:
            before = len(matched)
            for equality in self.equal:
                if equality.join is None or equality.join in matched:
                    matched |= {equality.one.alias, equality.other.alias}
        return matched

    def _next(self, reached: set[str], matched: set[str]) -> Iterator[Lookup]:
        for equality in self.equal:
            is_true = equality.join is None or equality.join in matched
            for known, wanted in ((equality.one, equality.other), (equality.other, equality.one)):
                finds_rows = is_true or wanted.alias == equality.join
                if known.alias in reached and wanted.alias not in reached and finds_rows:
                    yield Lookup(known, wanted)


def _kind_of(join: exp.Join) -> JoinKind:
    """Return the kind of a join that is neither NATURAL nor RIGHT nor FULL; a comma counts as CROSS JOIN."""
    for kind in (JoinKind.SEMI, JoinKind.ANTI, JoinKind.CROSS):
        if join.kind == kind.name:
            return kind
    return JoinKind.LEFT if join.side else JoinKind.INNER


def _shown(select: exp.Select, name: str) -> exp.Expr | None:
    """Return what a column of the result shows, perhaps by a `*`; None if nothing has the name."""
    for item in select.expressions:
        if item.alias_or_name.lower() == name.lower():
            return item.unalias()
    stars = [item for item in select.expressions if item.is_star]
    if len(stars) != 1 or any(star.args.get("except_") for star in stars[0].find_all(exp.Star)):
        return None
    return exp.column(name, table=stars[0].text("table"))


@dataclass(frozen=True, slots=True)
class _Names:
    """Finds the table of a column name."""

    tables: Mapping[str, str]
    columns: Mapping[str, Sequence[str]]

    def column(self, node: exp.Expr | None) -> ColumnOf | None:
        """Return the column that an expression is; None if it is another expression, or no column of a table."""
        if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star) or node.text("db"):
            return None  # `o.customer.id` is a field of a column
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


def _equal_columns(select: exp.Select, joins: Sequence[exp.Join], names: _Names) -> Iterator[Equality]:
    where = select.args.get("where")
    yield from _of_condition(None if where is None else where.this, names, None)
    aliases = list(names.tables)
    visible = aliases[:1]
    for alias, join in zip(aliases[1:], joins, strict=True):
        yield from _of_using(join, visible, alias, names)
        yield from _of_condition(join.args.get("on"), names, alias)
        if _kind_of(join) not in {JoinKind.SEMI, JoinKind.ANTI}:
            visible.append(alias)


def _of_using(join: exp.Join, visible: Sequence[str], alias: str, names: _Names) -> Iterator[Equality]:
    """Yield the equalities of USING: Spark takes the column of the first visible table that has it."""
    for identifier in join.args.get("using") or ():
        column = names.spelled(alias, identifier.name)
        for other in visible:
            name = names.spelled(other, identifier.name)
            if column is not None and name is not None:
                yield Equality(ColumnOf(other, name), ColumnOf(alias, column), alias)
                break


def _of_condition(condition: exp.Expr | None, names: _Names, alias: str | None) -> Iterator[Equality]:
    equalities = () if condition is None else equalities_of(condition)
    # rows that `<=>` joins by NULL are not found by values
    for equality in (node for node in equalities if isinstance(node, exp.EQ)):
        one, other = names.column(equality.this), names.column(equality.expression)
        if one is not None and other is not None and one.alias != other.alias:
            yield Equality(one, other, alias)
