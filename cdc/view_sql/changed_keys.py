"""SQL that finds the keys of a view to which the changed rows of one table contribute.

Let E(a) and E(b) be the rows of a relation at two cuts. The *contributions* C(a) and C(b) are rows such that

    every row that E(a) has and E(b) has not is in C(a), and every row that E(b) has and E(a) has not is in C(b);
    a row that both have in different number is in C(a) or in C(b).

For a table they are the changed rows: old row images at a, new ones at b. Each operator keeps the property:

    filter, projection, UNION ALL   apply it to C
    L JOIN R                        C(L) JOIN R, and L JOIN C(R)
    L LEFT JOIN R                   C(L) LEFT JOIN R, and L JOIN C(R); and the row with NULLs for R, of each row of L
                                    that has a match in C(R) *of the other cut*: it appears when its last match goes
    L FULL JOIN R                   both sides as with LEFT JOIN
    L SEMI JOIN R, L ANTI JOIN R    C(L) as before; the rows of L with a match in C(R), for ANTI of the other cut
    GROUP BY in a subquery          the groups that C of either cut names, computed from all their rows

The last operator of the view is a projection to its key, before HAVING. A table that a query reads several times is
treated as several tables, of which each has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from cdc.view_sql.query_structure import JoinKind, Query, Select, TableReference, quoted
from cdc.view_sql.sql_text import SqlText, offset_of, qualifier_of


@dataclass(frozen=True, slots=True)
class InputsAtCut:
    """Names of Spark's temporary views with the inputs of a view at one cut."""

    tables: Mapping[str, str]
    """Topic → temporary view with all rows of the table."""
    changed: str
    """Temporary view with the changed rows of one table: old rows at the cut before, new rows at the cut after."""


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """Finds keys of one view from the changed rows of the table `topic`, with the inputs at two cuts."""

    text: SqlText
    query: Query
    key: tuple[str, ...]
    topic: str
    shared: dict[tuple[int, str], tuple[str, str]] = field(default_factory=dict)
    """Offset of a subquery and temporary view of changed rows → the name and the query of the contributions to it."""

    def sql(self, before: InputsAtCut, after: InputsAtCut) -> str:
        """Return a query of the distinct keys, in columns with the names of the key."""
        select = next(self.query.selects)
        wanted = {name.lower() for name in self.key}
        shown = [position for position, (name, _) in enumerate(select.columns) if name.lower() in wanted]
        read = _Columns(None if select.has_star else shown, is_key=True)
        found = [
            text
            for cut, other in ((before, after), (after, before))
            for text in self._of_query(self.query, read, cut, other)
        ]
        with_ = ",\n".join(f"{name} AS (\n{query}\n)" for name, query in self.shared.values())
        return f"WITH {with_}\n{_distinct(self.key, found)}" if with_ else _distinct(self.key, found)

    def _of_query(self, query: Query, read: _Columns, cut: InputsAtCut, other: InputsAtCut) -> Iterator[str]:
        """Yield queries of the contributions to a query."""
        for branch in query.branches:
            if isinstance(branch, Query):
                found = self._of_query(branch, read, cut, other)
            elif branch.is_grouped and not read.is_key:
                found = self._of_groups(branch, cut, other)
            else:
                found = self._of_select(branch, read, cut, other)
            for text in found:
                # the names and types of the columns are those of the whole union
                yield "\nUNION ALL\n".join(
                    f"({text})" if one is branch else f"(SELECT * FROM ({self._span_of(one, cut)}) WHERE false)"
                    for one in query.branches
                )

    def _of_groups(self, select: Select, cut: InputsAtCut, other: InputsAtCut) -> Iterator[str]:
        """Yield the whole groups that a changed row belongs to at one of the cuts, with their rows at this cut."""
        read = _Columns([position for position, _ in select.group_columns], is_key=True)
        names = [name for _, name in select.group_columns]
        found = [
            text
            for one, another in ((cut, other), (other, cut))
            for text in self._of_select(select, read, one, another)
        ]
        if found:
            yield semi_join(self._span_of(select, cut), f"(\n{_distinct(names, found)}\n)", names)

    def _of_select(self, select: Select, read: _Columns, cut: InputsAtCut, other: InputsAtCut) -> Iterator[str]:
        """Yield the SELECT without HAVING, over the contributions to its relations."""
        sql = self.text.sql
        for changed, chain in enumerate(select.chains):
            for text in self._of_chain(chain, _NullRows(select, read), cut, other):
                relations = ",\n".join(
                    text if number == changed else self.span(one[0].start, one[-1].end, cut)
                    for number, one in enumerate(select.chains)
                )
                tail = sql[select.tail_start : select.tail_end]
                yield f"{sql[select.start : select.head_end]}\n{relations}\n{tail}"

    def _of_chain(
        self, chain: tuple[TableReference, ...], null_rows: _NullRows, cut: InputsAtCut, other: InputsAtCut
    ) -> Iterator[str]:
        for index, relation in enumerate(chain):
            if relation.reads(self.topic):
                yield from _Joins(self, chain, index, null_rows).contributions(len(chain), cut, other)

    def of_relation(
        self, relation: TableReference, null_rows: _NullRows, cut: InputsAtCut, other: InputsAtCut
    ) -> Iterator[str]:
        """Yield the contributions to a relation, with its alias."""
        if relation.topic == self.topic:
            yield self.named(quoted(cut.changed), relation)
        elif relation.query is not None:
            yield self.named(self._of_subquery(relation.query, cut, other), relation)
        else:
            for text in self._of_chain(relation.joined, null_rows, cut, other):
                yield self.named(f"({text})", relation)

    def _of_subquery(self, query: Query, cut: InputsAtCut, other: InputsAtCut) -> str:
        """Return the name of the contributions to a subquery; several texts may need them."""
        place = (query.start, cut.changed)
        if place not in self.shared:
            found = list(self._of_query(query, _Columns(None, is_key=False), cut, other))
            self.shared[place] = (f"_changed_{len(self.shared)}", "\nUNION ALL\n".join(f"({one})" for one in found))
        return self.shared[place][0]

    def named(self, rows: str, relation: TableReference) -> str:
        """Return rows with the alias of a relation."""
        return f"{rows}{self.text.sql[relation.alias_start : relation.condition_start]}{relation.added_alias}"

    def span(self, start: int, end: int, cut: InputsAtCut) -> str:
        """Return a part of the SQL over the inputs at a cut."""
        return with_inputs(self.text, self.query, (start, end), cut.tables)

    def _span_of(self, part: Select | Query, cut: InputsAtCut) -> str:
        return self.span(part.start, part.end, cut)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of a query its reader needs."""

    positions: Sequence[int] | None
    """None: all of them."""
    is_key: bool
    """Whether the reader needs the key of each row only, and not the values that are aggregated."""


@dataclass(frozen=True, slots=True)
class _NullRows:
    """Decides whether the rows that an outer join fills with NULLs can give other keys than the rows with a match."""

    select: Select
    read: _Columns

    def matter(self, join: TableReference, nullable: Sequence[TableReference]) -> bool:
        """Whether anything but the condition of the join itself reads a column of the relations that may be NULL."""
        tree = self.select.tree
        items = [item for _, item in self.select.columns]
        if self.select.has_star:
            return True
        if self.read.positions is not None:
            items = [items[position] for position in self.read.positions]
        conditions: list[exp.Expr] = [
            one
            for other in tree.find_all(exp.Join)
            if other.parent_select is tree
            for one in (other.args.get("on"), *(other.args.get("using") or ()))
            if one is not None and not join.condition_start <= (offset_of(one) or 0) < join.end
        ]
        clauses = [clause for clause in (tree.args.get("where"), *tree.args.get("laterals", ())) if clause is not None]
        read = [*items, *conditions, *clauses]
        if any(isinstance(one, exp.Identifier) for one in conditions):
            return True  # USING may mean a column of either side
        here = [*self.select.relations, *(inner for one in self.select.relations for inner in one.joined)]
        unknown = frozenset[str]().union(*(one.aliases for one in nullable))
        known = frozenset[str]().union(*(one.aliases for one in here)) - unknown
        return any(qualifier_of(column) not in known for one in read for column in one.find_all(exp.Column))


_REQUIRED: Final = {JoinKind.LEFT: JoinKind.INNER, JoinKind.FULL: JoinKind.RIGHT, JoinKind.ANTI: JoinKind.SEMI}
"""Join that keeps only the rows with a match on its right side."""
_REQUIRED_LEFT: Final = {JoinKind.RIGHT: JoinKind.INNER, JoinKind.FULL: JoinKind.LEFT}
"""Join that keeps only the rows from its left side."""


@dataclass(frozen=True, slots=True)
class _Joins:
    """Writes the contributions to relations that are joined with each other, of which the one at `index` changed."""

    keys: ChangedKeys
    relations: tuple[TableReference, ...]
    index: int
    null_rows: _NullRows

    def contributions(self, length: int, cut: InputsAtCut, other: InputsAtCut) -> list[str]:
        """Return the joins of the first `length` relations."""
        if length - 1 == self.index:
            return self._right_changed(cut, other)
        return self._left_changed(length, cut, other)

    def _right_changed(self, cut: InputsAtCut, other: InputsAtCut) -> list[str]:
        relation = self.relations[self.index]
        kind = relation.kind
        changed, changed_there = (
            list(self.keys.of_relation(relation, self.null_rows, one, another))
            for one, another in ((cut, other), (other, cut))
        )
        if kind is JoinKind.FIRST:
            return changed
        condition = self._condition(relation)
        left = self.keys.span(self.relations[0].start, self.relations[self.index - 1].end, cut)
        found = [
            f"{left}\n{_REQUIRED.get(kind, kind)} {right} {condition}"
            for right in (changed_there if kind is JoinKind.ANTI else changed)
        ]
        if kind in {JoinKind.LEFT, JoinKind.FULL} and self.null_rows.matter(relation, [relation]):
            nulls = f"LEFT JOIN {self._empty(relation, cut)} {condition}"
            found += [f"{left}\n{JoinKind.SEMI} {right} {condition}\n{nulls}" for right in changed_there]
        return found

    def _left_changed(self, length: int, cut: InputsAtCut, other: InputsAtCut) -> list[str]:
        relation, others = self.relations[length - 1], self.relations[: length - 1]
        condition = self._condition(relation)
        right = self.keys.span(relation.start, relation.condition_start, cut)
        kind = _REQUIRED_LEFT.get(relation.kind, relation.kind)
        found = [f"{left}\n{kind} {right} {condition}" for left in self.contributions(length - 1, cut, other)]
        if relation.kind in _REQUIRED_LEFT and self.null_rows.matter(relation, others):
            empty = "\n".join(f"{one.kind} {self._empty(one, cut)} {self._condition(one)}" for one in others)
            for left in self.contributions(length - 1, other, cut):
                one = left if len(others) == 1 else f"({left})"
                matched = f"({right} {JoinKind.SEMI} {one} {condition})"
                found.append(f"{empty}\nRIGHT JOIN {matched} {condition}")
        return found

    def _condition(self, relation: TableReference) -> str:
        return self.keys.text.sql[relation.condition_start : relation.end]

    def _empty(self, relation: TableReference, cut: InputsAtCut) -> str:
        """Return a relation with its columns and without a row."""
        if relation.joined and not relation.alias:
            inner = " ".join(f"{one.kind} {self._empty(one, cut)} {self._condition(one)}" for one in relation.joined)
            return f"({inner})"
        rows = self.keys.span(relation.start, relation.alias_start, cut)
        return self.keys.named(f"(SELECT * FROM {rows} WHERE false)", relation)


def with_inputs(text: SqlText, query: Query, span: tuple[int, int], tables: Mapping[str, str]) -> str:
    """Return a part of the SQL with temporary views for tables, and queries for common table expressions."""
    start, end = span
    parts, done = [], start
    named = {one.start: one for one in query.relations if not one.is_subquery and not one.joined}
    for relation in (one for place, one in sorted(named.items()) if start <= place < end):
        if relation.query is not None:
            rows = f"(\n{with_inputs(text, query, (relation.query.start, relation.query.end), tables)}\n)"
        else:
            rows = quoted(tables[relation.topic or ""])
        alias = text.sql[relation.alias_start : min(relation.condition_start, end)]
        added = relation.added_alias if relation.condition_start <= end else ""
        parts += [text.sql[done : relation.start], rows, alias, added]
        done = relation.condition_start
    return "".join(parts) + text.sql[done:end]


def semi_join(rows: str, keys: str, columns: Iterable[str]) -> str:
    """Return the rows of a query whose columns are equal to those of a row of `keys`; NULL equals NULL.

    Spark pushes the join below a GROUP BY only if it may broadcast `keys`.
    """
    condition = " AND ".join(f"_rows.{name} <=> _keys.{name}" for name in map(quoted, columns))
    return (
        f"SELECT /*+ BROADCAST(_keys) */ _rows.* FROM (\n{rows}\n) AS _rows "
        f"LEFT SEMI JOIN {keys} AS _keys ON {condition}"
    )


def _distinct(columns: Iterable[str], queries: Iterable[str]) -> str:
    shown = ", ".join(map(quoted, columns))
    found = [f"{shown} FROM (\n{text}\n)" for text in dict.fromkeys(queries)]
    return f"SELECT DISTINCT {found[0]}" if len(found) == 1 else "\nUNION\n".join(f"SELECT {one}" for one in found)
