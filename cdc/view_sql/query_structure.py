"""The structure of a query: its SELECTs, what each reads FROM, and where in the text each of these parts is.

sqlglot has accepted the text before, and `clauses_for_refresh` has excluded the clauses that have no part here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from sqlglot import TokenType, exp

from cdc.errors import ViewTableUnqualified
from cdc.view_sql.sql_functions import has_aggregate
from cdc.view_sql.sql_text import SqlText


class JoinKind(StrEnum):
    """How a relation is joined with everything before it in its FROM clause; the value is the keyword."""

    FIRST = ""
    CROSS = "CROSS JOIN"
    INNER = "JOIN"
    LEFT = "LEFT JOIN"
    RIGHT = "RIGHT JOIN"
    FULL = "FULL JOIN"
    SEMI = "LEFT SEMI JOIN"
    ANTI = "LEFT ANTI JOIN"


@dataclass(frozen=True, slots=True, eq=False)
class TableReference:
    """One table, subquery or join in parentheses of a FROM clause, with the condition that joins it."""

    start: int
    """Offset of the relation itself, after the keyword of its join."""
    alias_start: int
    """Offset of the alias, which follows the table's name or the closing parenthesis."""
    condition_start: int
    """Offset of ON or USING; `end` if there is none."""
    end: int
    kind: JoinKind
    alias: str
    """Name by which columns refer to the relation; empty if it has none."""
    added_alias: str = ""
    """Text after the alias for a relation whose name the SQL replaces: the alias, or its list of columns."""
    topic: str | None = None
    query: Query | None = None
    """The query of a subquery or of a common table expression."""
    joined: tuple[TableReference, ...] = ()
    """The relations of a join in parentheses."""

    @property
    def aliases(self) -> frozenset[str]:
        """Names by which columns may refer to the relation, in lower case."""
        if self.alias or not self.joined:
            return frozenset({self.alias.lower()})
        return frozenset[str]().union(*(one.aliases for one in self.joined))

    @property
    def is_subquery(self) -> bool:
        """Whether its query is in the text in its place; else the SQL has the name of a common table expression."""
        return self.query is not None and self.start <= self.query.start < self.alias_start

    def has_using(self, sql: str) -> bool:
        return sql[self.condition_start : self.end][:5].upper() == "USING"

    def leaves(self) -> Iterator[TableReference]:
        """Yield every table that the relation reads, once for every time that it is read."""
        if self.topic is not None:
            yield self
        for one in self.joined:
            yield from one.leaves()
        if self.query is not None:
            yield from self.query.leaves()

    def reads(self, topic: str) -> bool:
        return any(leaf.topic == topic for leaf in self.leaves())


@dataclass(frozen=True, slots=True, eq=False)
class Select:
    """One SELECT: its head ends after FROM, its tail begins after the relations and ends before HAVING.

    The text ends before ORDER BY, which means nothing without LIMIT.
    """

    start: int
    head_end: int
    tail_start: int
    tail_end: int
    end: int
    chains: tuple[tuple[TableReference, ...], ...]
    """The relations; a comma in the FROM clause begins another chain of joins."""
    tree: exp.Select

    @property
    def relations(self) -> Iterator[TableReference]:
        return (relation for chain in self.chains for relation in chain)

    @property
    def is_grouped(self) -> bool:
        return bool(self.tree.args.get("group") or self.tree.args.get("having")) or any(
            map(has_aggregate, self.tree.expressions)
        )

    @property
    def columns(self) -> list[tuple[str, exp.Expr]]:
        """Each output column as (name, item of the select list); the name is empty where Spark makes one up."""
        return [(name, item) for item in self.tree.expressions for name in _names(item)]

    @property
    def has_star(self) -> bool:
        return any(item.is_star for item in self.tree.expressions)

    @property
    def group_columns(self) -> list[tuple[int, str]]:
        """Position and name of the output columns that have one value in a whole group."""
        names = [name.lower() for name, _ in self.columns]
        return [
            (position, name)
            for position, (name, item) in enumerate(self.columns)
            if name and names.count(name.lower()) == 1 and item.find(exp.Column) and not has_aggregate(item)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Several SELECTs with UNION ALL between them, or one; the text omits the WITH clause."""

    start: int
    end: int
    branches: tuple[Select | Query, ...]

    @property
    def selects(self) -> Iterator[Select]:
        for branch in self.branches:
            yield from branch.selects if isinstance(branch, Query) else (branch,)

    @property
    def relations(self) -> Iterator[TableReference]:
        """The relations in its text and in its common table expressions; some more than once."""
        for select in self.selects:
            yield from _all_relations(select.relations)

    def leaves(self) -> Iterator[TableReference]:
        for select in self.selects:
            for relation in select.relations:
                yield from relation.leaves()


def _all_relations(relations: Iterable[TableReference]) -> Iterator[TableReference]:
    for relation in relations:
        yield relation
        yield from _all_relations(relation.joined)
        if relation.query is not None:
            yield from relation.query.relations


def _names(item: exp.Expr) -> list[str]:
    if isinstance(item, exp.Aliases):
        return [one.name for one in item.expressions]
    return [item.alias_or_name if isinstance(item, exp.Alias | exp.Column | exp.Dot) else ""]


def equalities_of_join(text: SqlText, relation: TableReference) -> list[exp.Expr]:
    """The equalities that are all true where a relation has a match; none for USING."""
    if relation.condition_start == relation.end or relation.has_using(text.sql):
        return []
    return equalities_of(text.parse_condition(relation.condition_start + len("ON"), relation.end))


def equalities_of(condition: exp.Expr) -> list[exp.Expr]:
    """The equalities that are all true where a condition is."""
    one = condition.unnest()
    if isinstance(one, exp.And):
        return [*equalities_of(one.this), *equalities_of(one.expression)]
    if isinstance(one, exp.In) and len(one.expressions) == 1:
        return [exp.EQ(this=one.this.copy(), expression=one.expressions[0].copy())]
    return [one] if isinstance(one, exp.EQ | exp.NullSafeEQ) else []


_JOIN_WORDS: Final = frozenset(
    {
        TokenType.LEFT,
        TokenType.RIGHT,
        TokenType.FULL,
        TokenType.INNER,
        TokenType.OUTER,
        TokenType.CROSS,
        TokenType.SEMI,
        TokenType.ANTI,
        TokenType.NATURAL,
    }
)
_ORDERING: Final = frozenset({TokenType.ORDER_BY, TokenType.SORT_BY, TokenType.CLUSTER_BY, TokenType.DISTRIBUTE_BY})
_AFTER_FROM: Final = _ORDERING | {TokenType.LATERAL, TokenType.WHERE, TokenType.GROUP_BY, TokenType.HAVING}

_Scope = Mapping[str, tuple["Query", str]]
"""Name of a common table expression in lower case → its query, and the text of its list of columns."""


def structure_of(text: SqlText) -> Query:
    """Return the structure of a query without the clauses of `clauses_for_refresh`.

    Raises ViewTableUnqualified for a table that is neither `schema.table` nor a common table expression.
    """
    return _Structure(text).query(0, len(text.tokens), {})


class _Structure:
    """Positions of `start` and `end` are indices of tokens: [start, end)."""

    def __init__(self, text: SqlText) -> None:
        self._text = text
        self._tokens = text.tokens

    def query(self, start: int, end: int, scope: _Scope) -> Query:
        if self._type(start) is TokenType.WITH:
            start, scope = self._with(start + 1, scope)
        unions = [i for i in self._text.outside_parentheses(start, end) if self._type(i) is TokenType.UNION]
        starts = [start, *(union + 2 for union in unions)]  # after UNION ALL
        branches = tuple(self._branch(one, after, scope) for one, after in zip(starts, [*unions, end], strict=True))
        return Query(self._tokens[start].start, self._offset_after(end), branches)

    def _with(self, start: int, scope: _Scope) -> tuple[int, _Scope]:
        known = dict(scope)
        while True:
            name, index, columns = self._tokens[start], start + 1, ""
            if self._type(index) is TokenType.L_PAREN:
                columns = self._between(index, self._text.closing[index] + 1)
                index = self._text.closing[index] + 1
            index += self._type(index) is TokenType.ALIAS
            after = self._text.closing[index]
            known[name.text.lower()] = (self.query(index + 1, after, known), columns)
            if self._type(after + 1) is not TokenType.COMMA:
                return after + 1, known
            start = after + 2

    def _branch(self, start: int, end: int, scope: _Scope) -> Select | Query:
        if self._type(start) is TokenType.L_PAREN:
            return self.query(start + 1, self._text.closing[start], scope)
        return self._select(start, end, scope)

    def _select(self, start: int, end: int, scope: _Scope) -> Select:
        outside = list(self._text.outside_parentheses(start, end))
        from_ = next((i for i in outside if self._begins_from(i)), None)
        after_having = next((i for i in outside if self._type(i) in _ORDERING), end)
        after_group = next((i for i in outside if self._type(i) is TokenType.HAVING), after_having)
        first, last = self._tokens[start].start, self._offset_after(after_having)
        tree = self._text.parse_select(first, last)
        tail_end = self._offset_after(after_group)
        if from_ is None:
            return Select(first, tail_end, tail_end, tail_end, last, (), tree)
        tail = next((i for i in outside if i > from_ and self._type(i) in _AFTER_FROM), end)
        commas = [i for i in outside if from_ < i < tail and self._type(i) is TokenType.COMMA]
        starts = [from_ + 1, *(comma + 1 for comma in commas)]
        chains = tuple(self._chain(one, after, scope) for one, after in zip(starts, [*commas, tail], strict=True))
        return Select(first, self._tokens[from_].end + 1, self._offset_after(tail), tail_end, last, chains, tree)

    def _begins_from(self, index: int) -> bool:
        # IS DISTINCT FROM is an operator
        return self._type(index) is TokenType.FROM and self._type(index - 1) is not TokenType.DISTINCT

    def _chain(self, start: int, end: int, scope: _Scope) -> tuple[TableReference, ...]:
        """The relations that are joined with each other in a FROM clause, or in parentheses of it."""
        found, kind = [], JoinKind.FIRST
        joins = [i for i in self._text.outside_parentheses(start, end) if self._type(i) is TokenType.JOIN]
        for join in [*joins, end]:
            words = join
            while words > start and join < end and self._type(words - 1) in _JOIN_WORDS:
                words -= 1
            found.append(self._relation((start, words), kind, scope))
            kind, start = _kind({self._type(i) for i in range(words, join)}), join + 1
        return tuple(found)

    def _relation(self, span: tuple[int, int], kind: JoinKind, scope: _Scope) -> TableReference:
        start, end = span
        is_nested = self._type(start) is TokenType.L_PAREN
        after_name = self._text.closing[start] + 1 if is_nested else self._after_name(start, end)
        condition = next((i for i in range(after_name, end) if self._type(i) in {TokenType.ON, TokenType.USING}), end)
        alias = after_name + (after_name < condition and self._type(after_name) is TokenType.ALIAS)
        after = self._offset_after(end)
        plain = TableReference(
            start=self._tokens[start].start,
            alias_start=self._offset_after(after_name),
            condition_start=self._tokens[condition].start if condition < end else after,
            end=after,
            kind=kind,
            alias=self._tokens[alias].text if alias < condition else "",
        )
        if is_nested:
            return self._with_parentheses(plain, (start + 1, after_name - 1), scope)
        parts = [self._tokens[i].text for i in range(start, after_name, 2)]
        if len(parts) == 1:
            query, columns = self._common(plain, parts[0], scope)
            columns = "" if alias + 1 < condition else columns
            added = columns if plain.alias else f" AS {quoted(parts[0])}{columns}"
            return replace(plain, alias=plain.alias or parts[0], added_alias=added, query=query)
        added = "" if plain.alias else f" AS {quoted(parts[1])}"
        return replace(plain, alias=plain.alias or parts[1], added_alias=added, topic=".".join(parts))

    def _common(self, relation: TableReference, name: str, scope: _Scope) -> tuple[Query, str]:
        if name.lower() not in scope:
            place = self._text.place(relation.start)
            raise ViewTableUnqualified(f"view {self._text.view!r}, {place}: table {name!r} has no schema")
        return scope[name.lower()]

    def _with_parentheses(self, plain: TableReference, inside: tuple[int, int], scope: _Scope) -> TableReference:
        if self._is_query(*inside):
            return replace(plain, query=self.query(*inside, scope))
        return replace(plain, joined=self._chain(*inside, scope))

    def _is_query(self, start: int, end: int) -> bool:
        """Whether the tokens inside parentheses are a query; else they are relations, the first perhaps a query."""
        if self._type(start) is TokenType.L_PAREN and self._text.closing[start] == end - 1:
            return self._is_query(start + 1, end - 1)
        types = {self._type(i) for i in self._text.outside_parentheses(start, end)}
        return bool(types & {TokenType.SELECT, TokenType.UNION})

    def _after_name(self, start: int, end: int) -> int:
        index = start + 1
        while index < end and self._type(index) is TokenType.DOT:
            index += 2
        return index

    def _type(self, index: int) -> TokenType | None:
        return self._tokens[index].token_type if index < len(self._tokens) else None

    def _offset_after(self, end: int) -> int:
        """Offset after the last token before `end`."""
        return self._tokens[end - 1].end + 1

    def _between(self, start: int, end: int) -> str:
        return self._text.sql[self._tokens[start].start : self._offset_after(end)]


def _kind(words: set[TokenType | None]) -> JoinKind:
    for word, kind in (
        (TokenType.SEMI, JoinKind.SEMI),
        (TokenType.ANTI, JoinKind.ANTI),
        (TokenType.LEFT, JoinKind.LEFT),
        (TokenType.RIGHT, JoinKind.RIGHT),
        (TokenType.FULL, JoinKind.FULL),
        (TokenType.CROSS, JoinKind.CROSS),
    ):
        if word in words:
            return kind
    return JoinKind.INNER


def quoted(name: str) -> str:
    """Return a name as an identifier of Spark SQL."""
    return f"`{name.replace('`', '``')}`"
