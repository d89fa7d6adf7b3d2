"""What a view's SQL may not contain, and what lets Spark only refresh the view as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from sqlglot import TokenType, exp

from cdc.errors import ViewKeyUnknown, ViewNotDeterministic, ViewOrderUndeclared, ViewTableUnqualified
from cdc.view_sql.query_structure import JoinKind, Query, Select, TableReference, equalities_of, equalities_of_join
from cdc.view_sql.sql_functions import changing_name, depends_on_order, has_aggregate, name_of
from cdc.view_sql.sql_text import SqlText, offset_of, qualifier_of

_NO_ORDER: Final = "nothing proves that its order is total"


def tables_of(text: SqlText) -> list[exp.Table]:
    """Return every mention of an input in the order of the SQL.

    Raises ViewTableUnqualified for a table that is neither `schema.table` nor a common table expression.
    """
    common = {one.alias.lower() for one in text.tree.find_all(exp.CTE)}
    found = [one for one in text.tree.find_all(exp.Table) if isinstance(one.this, exp.Identifier)]
    tables = [one for one in found if one.db or one.name.lower() not in common]
    for table in tables:
        if not table.db or table.catalog:
            raise ViewTableUnqualified(
                f"view {text.view!r}, {text.place(offset_of(table) or 0)}: table {table.sql(dialect='spark')!r} is not "
                "written as schema.table"
            )
    return sorted(tables, key=lambda one: offset_of(one) or 0)


def refuse_changing_results(text: SqlText) -> None:
    """Raise ViewNotDeterministic or ViewOrderUndeclared if another evaluation over the same rows may differ."""
    for node in sorted(text.tree.walk(), key=lambda one: offset_of(one) or 0):
        if isinstance(node, exp.TableSample):
            place = text.place_of_node(node, "tablesample")
            raise ViewNotDeterministic(f"view {text.view!r}, {place}: TABLESAMPLE is not deterministic")
        if name := changing_name(node):
            place = text.place(offset_of(node) or 0)
            raise ViewNotDeterministic(
                f"view {text.view!r}, {place}: {name} is not deterministic",
                remedy=_TEXT_OR_TIME if name.startswith(("'", '"')) else None,
            )
        if depends_on_order(node):
            place, name = text.place(node.meta["start"]), name_of(node)
            raise ViewOrderUndeclared(
                f"view {text.view!r}, {place}: the result of {name} depends on the order of the rows",
                remedy=_ORDERED.get(name),
            )


_TEXT_OR_TIME: Final = "compute the time from columns; if a text is meant, cast it to STRING"
_ORDERED: Final = {
    "collect_list": "write sort_array(collect_list(…)), with the columns of the order first in a struct",
    "array_agg": "write sort_array(array_agg(…)), with the columns of the order first in a struct",
    "collect_set": "write sort_array(collect_set(…))",
    "listagg": "write listagg(…) WITHIN GROUP (ORDER BY …)",
    "string_agg": "write string_agg(…) WITHIN GROUP (ORDER BY …)",
    "max_by": "write max(struct(order, value)).value, which is the same for equal orders",
    "min_by": "write min(struct(order, value)).value, which is the same for equal orders",
    "mode": "write mode(value, true) or mode() WITHIN GROUP (ORDER BY value)",
    "percentile_approx": "write percentile(…)",
    "approx_percentile": "write percentile(…)",
}


def refuse_unknown_key(text: SqlText, key: Sequence[str]) -> None:
    """Raise ViewKeyUnknown for a column of the key that the select list does not have."""
    items = text.tree.selects
    if any(item.is_star for item in items):
        return
    names = [name for item in items for name in _output_names(item)]
    known = {name.lower() for name in names}
    for column in key:
        if column.lower() not in known:
            near = get_close_matches(column.lower(), sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ViewKeyUnknown(f"view {text.view!r}: the select list has no column {column!r} of the key{hint}")


def _output_names(item: exp.Expr) -> list[str]:
    return [one.name for one in item.expressions] if isinstance(item, exp.Aliases) else [item.alias_or_name]


@dataclass(frozen=True, slots=True)
class _Clause:
    """A clause that no incremental view has."""

    is_one: Callable[[exp.Expr], object]
    words: tuple[str, ...]
    """Words of the SQL that show its place; without any the first name in it does."""
    reason: str


def _is(*types: type[exp.Expr]) -> Callable[[exp.Expr], object]:
    return lambda node: isinstance(node, types)


def _is_subquery_of_expression(node: exp.Expr) -> bool:
    if not isinstance(node, exp.Query) or node.parent is None or isinstance(node, exp.Table):
        return False
    return not isinstance(node.parent, exp.Query | exp.From | exp.Join | exp.CTE | exp.Lateral | exp.Table)


_CLAUSES: Final = (
    _Clause(_is(exp.Window), (), f"a window function reads other rows than those of its key, and {_NO_ORDER}"),
    _Clause(_is(exp.Limit, exp.Fetch), ("LIMIT",), f"LIMIT reads all rows, and {_NO_ORDER}"),
    _Clause(_is(exp.Offset), ("OFFSET",), f"OFFSET reads all rows, and {_NO_ORDER}"),
    _Clause(_is(exp.Intersect), ("INTERSECT",), "INTERSECT is not analysed"),
    _Clause(_is(exp.Except), ("EXCEPT", "MINUS"), "EXCEPT is not analysed"),
    _Clause(
        lambda one: isinstance(one, exp.Union) and one.args.get("distinct"),
        ("UNION",),
        "UNION without ALL is not analysed",
    ),
    _Clause(
        lambda one: isinstance(one, exp.Union) and one.args.get("by_name"), ("UNION",), "UNION BY NAME is not analysed"
    ),
    _Clause(
        _is(exp.GroupingSets, exp.Cube, exp.Rollup), ("GROUPING", "CUBE", "ROLLUP"), "one row belongs to several groups"
    ),
    _Clause(_is(exp.Pivot), ("PIVOT", "UNPIVOT"), "PIVOT is not analysed"),
    _Clause(_is(exp.Values), ("VALUES",), "VALUES is not analysed"),
    _Clause(
        lambda one: isinstance(one, exp.With) and one.args.get("recursive"),
        ("RECURSIVE",),
        "a recursive query reads all rows",
    ),
    _Clause(
        _is_subquery_of_expression,
        (),
        "a subquery is only analysed in FROM and in a condition IN of WHERE; a join may replace it",
    ),
    _Clause(
        lambda one: isinstance(one, exp.Lateral) and not one.args.get("view"),
        ("LATERAL",),
        "LATERAL is only analysed in LATERAL VIEW",
    ),
    _Clause(
        lambda one: isinstance(one, exp.Table) and not isinstance(one.this, exp.Identifier),
        (),
        "a table function is not analysed",
    ),
    _Clause(
        lambda one: isinstance(one, exp.Table) and one.args.get("joins") and isinstance(one.parent, exp.Join),
        (),
        "a join without its condition next to it is not analysed",
    ),
    _Clause(
        lambda one: isinstance(one, exp.Join) and one.args.get("method"),
        ("NATURAL",),
        "the columns of a NATURAL JOIN are not in the SQL",
    ),
    _Clause(lambda one: name_of(one) == "session_window", (), "a session reads other rows than those of its key"),
    _Clause(_is(exp.QueryTransform), ("TRANSFORM",), "TRANSFORM runs a program"),
)


def clauses_for_refresh(text: SqlText) -> str | None:
    """Return why the rows that changed rows contribute to cannot be found, if a clause is the reason."""
    pipe = next((one for one in text.tokens if one.token_type is TokenType.PIPE_GT), None)
    if pipe is not None or text.tokens[0].token_type is TokenType.FROM:
        return f"{text.place((pipe or text.tokens[0]).start)}: only a query that begins with SELECT or WITH is analysed"
    for node in text.tree.walk():
        for clause in _CLAUSES:
            if clause.is_one(node):
                return f"{text.place_of_node(node, *clause.words)}: {clause.reason}"
    return None


def joins_and_groups_for_refresh(text: SqlText, query: Query, key: Sequence[str]) -> str | None:
    """Return why affected keys cannot be found, or only with much work, if a join, a group or the key is the reason."""
    return next(_joins_and_groups(text, query, {name.lower() for name in key}), None)


def _joins_and_groups(text: SqlText, query: Query, key: set[str]) -> Iterator[str]:
    positions = [position for position, (name, _) in enumerate(next(query.selects).columns) if name.lower() in key]
    for select in query.selects:
        columns = select.columns
        for position in positions if len(columns) == len(next(query.selects).columns) else ():
            name, item = columns[position]
            if has_aggregate(item):
                yield f"{text.place(offset_of(item) or 0)}: column {name!r} of the key is an aggregate"
        yield from _inner(text, select)


def _inner(text: SqlText, select: Select) -> Iterator[str]:
    yield from _unequal_joins(text, select)
    for chain in select.chains[1:]:
        for relation in chain:
            if relation.kind in {JoinKind.RIGHT, JoinKind.FULL}:
                place = text.place(relation.start)
                yield f"{place}: {relation.kind} after a comma fills the tables before it with NULLs; write CROSS JOIN"
    for relation in select.relations:
        for one in (relation, *_nested(relation)):
            for inner in one.query.selects if one.query is not None else ():
                if inner.is_grouped and not inner.group_columns:
                    yield (f"{text.place(inner.start)}: the subquery has no named column that identifies its groups")
                yield from _inner(text, inner)


def _nested(relation: TableReference) -> Iterator[TableReference]:
    for one in relation.joined:
        yield one
        yield from _nested(one)


def _unequal_joins(text: SqlText, select: Select) -> Iterator[str]:
    """Yield the relations that no equality joins with the relations before them."""
    where = select.tree.args.get("where")
    equalities = equalities_of(where.this) if where is not None else []
    before: frozenset[str] = frozenset()
    for chain in select.chains:
        yield from _unequal_in_chain(text, chain, before, equalities)
        before |= frozenset[str]().union(*(one.aliases for one in chain))


def _unequal_in_chain(
    text: SqlText, chain: Sequence[TableReference], before: frozenset[str], equalities: list[exp.Expr]
) -> Iterator[str]:
    for relation in chain:
        where = equalities if relation.kind in {JoinKind.FIRST, JoinKind.CROSS} else []
        if before and not _is_equal_join(text, relation, before, where):
            name = repr(relation.alias) if relation.alias else "the join"
            yield f"{text.place(relation.start)}: no equality joins {name} with the tables before it"
        yield from _unequal_in_chain(text, relation.joined, frozenset(), [])
        before |= relation.aliases


def _is_equal_join(text: SqlText, relation: TableReference, before: frozenset[str], others: list[exp.Expr]) -> bool:
    if relation.has_using(text.sql):
        return True
    found = [*others, *equalities_of_join(text, relation)]
    return any(_joins(one, before, relation.aliases) for one in found)


def _joins(equality: exp.Expr, before: frozenset[str], relation: frozenset[str]) -> bool:
    """Whether an equality compares the relation with those before it; a name without a table may be of any."""
    sides = []
    for side in (equality.this, equality.expression):
        columns = list(side.find_all(exp.Column))
        named = {qualifier_of(column) for column in columns} & (before | relation)
        if not columns or (named & before and named & relation):
            return False
        sides.append("before" if named & before else "relation" if named & relation else None)
    return sides[0] is None or sides[0] != sides[1]
