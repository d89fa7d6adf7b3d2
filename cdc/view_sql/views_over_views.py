"""Views over views: the SQL of a view in place of its name, so that a view is computed from tables alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from cdc.errors import ViewCycle
from cdc.view_sql.query_checks import tables_of
from cdc.view_sql.query_structure import quoted
from cdc.view_sql.sql_text import SqlText
from cdc.view_sql.view_query import ViewQuery


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
    text = SqlText.parse(name, defined[name].sql)
    parts, done = [], text.start
    for table in tables_of(text):
        topic = f"{table.db}.{table.name}"
        if topic not in defined:
            continue
        if topic in above:
            raise ViewCycle(f"view {above[0]!r} reads itself: {' → '.join((*above, topic))}")
        start, end = table.args["db"].meta["start"], table.this.meta["end"] + 1
        inner = _with_sql_of_views(topic, defined, (*above, topic))
        alias = "" if table.alias else f" AS {quoted(table.name)}"
        parts += [text.sql[done:start], f"(\n{inner}\n){alias}"]
        done = end
    return "".join(parts) + text.sql[done : text.end]
