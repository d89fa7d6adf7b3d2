"""How changes of an input find the keys of a view, in words."""

from __future__ import annotations

from collections.abc import Iterator

from cdc.view_sql.query_structure import JoinKind, Query, Select, TableReference
from cdc.view_sql.sql_text import SqlText

_OUTER = frozenset({JoinKind.LEFT, JoinKind.RIGHT, JoinKind.FULL})


def explained(text: SqlText, query: Query, key: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (topic, sentence) for every time that the view reads a table."""
    for select in query.selects:
        yield from _of_select(text, select, f"give the key ({', '.join(key)})")


def _of_select(text: SqlText, select: Select, result: str) -> Iterator[tuple[str, str]]:
    relations = list(select.relations)
    for relation in relations:
        others = [_name(text, one) for one in relations if one is not relation]
        joined = f", joined with {' and '.join(others)}," if others else ""
        is_outer = any(one.kind in _OUTER for one in relations)
        nulls = "; so do rows whose match in an outer join appears or disappears" if is_outer else ""
        yield from _of_relation(text, relation, f"{joined} {result}{nulls}")


def _of_relation(text: SqlText, relation: TableReference, result: str) -> Iterator[tuple[str, str]]:
    if relation.topic is not None:
        place = text.place(relation.start)
        yield relation.topic, f"{place}: changed rows of {relation.alias}{result}"
    for one in relation.joined:
        yield from _of_relation(text, one, result)
    for select in relation.query.selects if relation.query is not None else ():
        place = text.place(select.start)
        if select.is_grouped:
            groups = ", ".join(name for _, name in select.group_columns)
            whole = f"give the groups ({groups}) of the subquery at {place}, whose rows{result}"
            yield from _of_select(text, select, whole)
        else:
            yield from _of_select(text, select, f"give rows of the subquery at {place}, which{result}")


def _name(text: SqlText, relation: TableReference) -> str:
    if relation.alias:
        return relation.alias
    return f"the join at {text.place(relation.start)}"
