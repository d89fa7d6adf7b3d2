"""The SQL of a view: what it reads, which keys changed rows affect, and the rows of given keys.

A view over views is analysed with the SQL of each view in place of its name, so that it is computed from tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

from cdc.errors import ViewCycle
from cdc.view_sql.changed_keys import ChangedKeys, InputsAtCut, semi_join
from cdc.view_sql.null_keys import NullCause, null_causes, source_columns
from cdc.view_sql.query_checks import (
    clauses_for_refresh,
    joins_and_groups_for_refresh,
    refuse_changing_results,
    refuse_unknown_key,
    tables_of,
)
from cdc.view_sql.query_structure import JoinKind, Query, Select, TableReference, quoted, structure_of
from cdc.view_sql.semi_joins import with_semi_joins
from cdc.view_sql.sql_text import SqlText

_OUTER: Final = frozenset({JoinKind.LEFT, JoinKind.RIGHT, JoinKind.FULL})


@dataclass(frozen=True, slots=True)
class ViewQuery:
    """The SQL of one view, analysed. All methods return texts of Spark SQL; nothing is executed."""

    name: str
    key: tuple[str, ...]
    inputs: tuple[str, ...]
    """Topics that the view reads, sorted, each once."""
    only_refresh: str | None
    """Why changed rows do not show which keys they affect, with line:column in the SQL; None if they do."""
    _text: SqlText = field(repr=False)
    _structure: Query | None = field(repr=False)

    @classmethod
    def parse(cls, name: str, sql: str, key: Sequence[str]) -> Self:
        """Analyse a view.

        Raises ViewSqlInvalid, ViewNotDeterministic, ViewKeyUnknown, ViewOrderUndeclared or ViewTableUnqualified.
        Whether tables and columns exist is for Spark to say.
        """
        text = SqlText.parse(name, sql)
        topics = tuple(sorted({f"{table.db}.{table.name}" for table in tables_of(text)}))
        text = text.without_schemas(topics)
        refuse_changing_results(text)
        refuse_unknown_key(text, key)
        text = with_semi_joins(text)
        reason, structure = clauses_for_refresh(text), None
        if reason is None:
            structure = structure_of(text)
            reason = joins_and_groups_for_refresh(text, structure, key)
        return cls(name, tuple(key), topics, reason, text, structure)

    @property
    def sql(self) -> str:
        """The SQL that was analysed."""
        return self._text.sql

    def whole(self, tables: Mapping[str, str]) -> str:
        """Return the query over temporary views. tables: topic → name of its temporary view."""
        return _with_other_tables(self._text, lambda topic: quoted(tables[topic]))

    def of_keys(self, tables: Mapping[str, str], keys: str) -> str:
        """Return the query, with only the rows whose key is in the temporary view `keys`, whose columns are the key."""
        return semi_join(self.whole(tables), quoted(keys), self.key)

    def affected_keys(self, topic: str, before: InputsAtCut, after: InputsAtCut) -> str:
        """Return a query of the keys whose rows may differ between two cuts because rows of one input changed.

        The union over all inputs that changed has every such key. A view that is `only_refresh` has no such query.
        """
        if self._structure is None or self.only_refresh is not None:
            raise ValueError(f"view {self.name!r} can only be refreshed: {self.only_refresh}")
        return ChangedKeys(self._text, self._structure, self.key, topic).sql(before, after)

    def null_causes(self) -> list[NullCause]:
        """Return the ways in which a column of the key can be NULL; of SQL that is not analysed, none."""
        return [] if self._structure is None else list(null_causes(self._text, self._structure, self.key))

    def key_columns(self) -> list[tuple[str, tuple[str, str] | None]]:
        """Return each column of the key with (topic, column) of a table that it is; None for another expression.

        A column has several entries if the SQL is a UNION. Of SQL that is not analysed, nothing is returned.
        """
        if self._structure is None:
            return []
        return [(name, source) for name in self.key for source in source_columns(self._structure, name)]

    def explain(self) -> list[tuple[str, str]]:
        """Return (topic, sentence) for every time that the view reads a table: how its changes find the keys."""
        if self._structure is None or self.only_refresh is not None:
            return [(topic, f"only a refresh finds what changed; {self.only_refresh}") for topic in self.inputs]
        return list(_explained(self._text, self._structure, self.key))


class DefinedView(Protocol):
    """A view as the definition has it."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> tuple[str, ...]: ...
    @property
    def sql(self) -> str: ...


def queries_of(views: Iterable[DefinedView]) -> dict[str, ViewQuery]:
    """Return name → analysed query of each view. Raises the errors of ViewQuery.parse, and ViewCycle."""
    defined = {view.name: view for view in views}
    return {name: query_of(name, defined) for name in defined}


def query_of(name: str, defined: Mapping[str, DefinedView]) -> ViewQuery:
    """Return the analysed query of one of the views. Raises as `queries_of`."""
    view = defined[name]
    ViewQuery.parse(name, view.sql, view.key)  # so that an error has its place in the SQL that the user wrote
    return ViewQuery.parse(name, _with_sql_of_views(name, defined, (name,)), view.key)


def _with_sql_of_views(name: str, defined: Mapping[str, DefinedView], above: tuple[str, ...]) -> str:
    """Return the SQL of a view with the SQL of each view that it reads. above: the views that are being replaced."""

    def sql_of(topic: str) -> str | None:
        if topic in above:
            raise ViewCycle(f"view {above[0]!r} reads itself: {' → '.join((*above, topic))}")
        return f"(\n{_with_sql_of_views(topic, defined, (*above, topic))}\n)" if topic in defined else None

    return _with_other_tables(SqlText.parse(name, defined[name].sql), sql_of)


def _with_other_tables(text: SqlText, rows_of: Callable[[str], str | None]) -> str:
    """Return the SQL with other rows in place of each table, under its name.

    rows_of: topic → name or subquery that takes its place; None leaves the table as it is.
    """
    parts, done = [], text.start
    for table in tables_of(text):
        rows = rows_of(f"{table.db}.{table.name}")
        if rows is not None:
            start, end = table.args["db"].meta["start"], table.this.meta["end"] + 1
            alias = "" if table.alias else f" AS {quoted(table.name)}"
            parts += [text.sql[done:start], rows, alias]
            done = end
    return "".join(parts) + text.sql[done : text.end]


def _explained(text: SqlText, query: Query, key: tuple[str, ...]) -> Iterator[tuple[str, str]]:
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
