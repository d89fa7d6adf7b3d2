"""Conditions `value IN (SELECT …)` of WHERE, written as semi joins: the rows that contribute to a join are known.

A row passes the condition exactly if the value is equal to one of the subquery, which is what LEFT SEMI JOIN says. Only
a condition that every row has to meet becomes a join: one below OR or NOT stays, and so does a subquery that names a
table of the query around it. A name without a table counts as a column of the subquery's own tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sqlglot import TokenType, exp

from cdc.view_sql.sql_text import SqlText, qualifier_of

_VALUE: Final = "_value"
_AFTER_WHERE: Final = frozenset(
    {
        TokenType.GROUP_BY,
        TokenType.HAVING,
        TokenType.WINDOW,
        TokenType.ORDER_BY,
        TokenType.SORT_BY,
        TokenType.CLUSTER_BY,
        TokenType.DISTRIBUTE_BY,
        TokenType.LIMIT,
        TokenType.OFFSET,
        TokenType.UNION,
        TokenType.EXCEPT,
        TokenType.INTERSECT,
    }
)


@dataclass(frozen=True, slots=True)
class _Condition:
    """One condition in a WHERE clause. All positions are indices of tokens; the ends are exclusive."""

    where: int
    start: int
    operator: int
    """Of IN, which an opening parenthesis follows."""
    end: int


def with_semi_joins(text: SqlText) -> SqlText:
    """Return the SQL with a join in place of every such condition; what follows the condition keeps its line."""
    number = 0
    while (found := next(_conditions(text), None)) is not None:
        text = SqlText.parse(text.view, _as_join(text, found, f"_in_{number}"))
        number += 1
    return text


def _as_join(text: SqlText, found: _Condition, alias: str) -> str:
    tokens, sql = text.tokens, text.sql
    value = sql[tokens[found.start].start : tokens[found.operator - 1].end + 1]
    query = sql[tokens[found.operator + 1].start : tokens[found.end - 1].end + 1]
    # Spark converts the types of two sides of IN as for a subquery, and then compares as with =
    join = f"LEFT SEMI JOIN {query} AS {alias}({_VALUE}) ON {value} IN ({alias}.{_VALUE}) "
    before, start, end = tokens[found.where].start, tokens[found.start].start, tokens[found.end - 1].end + 1
    rest = "\n" * (sql.count("\n", start, end) - join.count("\n"))
    return f"{sql[:before]}{join}{sql[before:start]}true{rest}{sql[end:]}"


def _conditions(text: SqlText) -> Iterator[_Condition]:
    """Yield the conditions that can become joins."""
    for start, end in [(0, len(text.tokens)), *((opened + 1, closed) for opened, closed in text.closing.items())]:
        yield from _conditions_between(text, start, end)


def _conditions_between(text: SqlText, start: int, end: int) -> Iterator[_Condition]:
    """Yield the conditions of the SELECTs between two tokens, outside of the parentheses there."""
    outside = list(text.outside_parentheses(start, end))
    kinds = [text.tokens[index].token_type for index in outside]
    for place, kind in enumerate(kinds):
        if kind is not TokenType.WHERE or TokenType.SELECT not in kinds[:place]:
            continue
        first = max(number for number in range(place) if kinds[number] is TokenType.SELECT)
        from_ = next((number for number in range(first, place) if kinds[number] is TokenType.FROM), place)
        # a condition of a join sees only the tables after the last comma, and no LATERAL VIEW
        if {TokenType.COMMA, TokenType.LATERAL} & set(kinds[from_:place]):
            continue
        last = next((number for number in range(place, len(kinds)) if kinds[number] in _AFTER_WHERE), len(kinds))
        yield from _of_select(text, [outside[first], *outside[place:last], outside[last] if last < len(kinds) else end])


def _of_select(text: SqlText, tokens: list[int]) -> Iterator[_Condition]:
    """Yield the conditions of one SELECT. tokens: of SELECT, of WHERE and in it, and the first one after it."""
    select, where, *inside, end = tokens
    ands = [index for index in inside if text.tokens[index].token_type is TokenType.AND]
    spans = zip([where + 1, *(index + 1 for index in ands)], [*ands, end], strict=True)
    found = [one for start, after in spans if (one := _membership(text, where, start, after)) is not None]
    tree = text.parse_select(text.tokens[select].start, text.tokens[end - 1].end + 1).args["where"].this
    meant = [one for one in _all_of(tree) if isinstance(one, exp.In) and one.args.get("query") is not None]
    # AND also belongs to BETWEEN and CASE
    if len(found) == len(meant):
        yield from (one for one, node in zip(found, meant, strict=True) if _is_independent(node))


def _membership(text: SqlText, where: int, start: int, end: int) -> _Condition | None:
    """Return the condition between two tokens if it may be `value IN (SELECT …)`."""
    operator = next(
        (index for index in text.outside_parentheses(start, end) if text.tokens[index].token_type is TokenType.IN), end
    )
    opened = operator + 1
    if operator in {start, end} or text.closing.get(opened) != end - 1:
        return None
    is_query = text.tokens[opened + 1].token_type in {TokenType.SELECT, TokenType.WITH}
    is_negated = text.tokens[operator - 1].token_type is TokenType.NOT
    return _Condition(where, start, operator, end) if is_query and not is_negated else None


def _all_of(condition: exp.Expr) -> Iterator[exp.Expr]:
    """Yield the conditions that are joined by AND, outside of parentheses."""
    if isinstance(condition, exp.And):
        yield from _all_of(condition.this)
        yield from _all_of(condition.expression)
    else:
        yield condition


def _is_independent(condition: exp.In) -> bool:
    """Whether the subquery has one column, and names only its own tables, and the value has no subquery."""
    query = condition.args["query"].unnest()
    if condition.this.find(exp.Query) or isinstance(condition.this, exp.Tuple):
        return False
    if len(query.selects) != 1 or query.selects[0].is_star or isinstance(query.selects[0].unalias(), exp.Aliases):
        return False
    own = {one.alias_or_name.lower() for one in query.find_all(exp.Table, exp.Subquery, exp.CTE, exp.Lateral)}
    return all(qualifier_of(column) in own | {None} for column in query.find_all(exp.Column))
