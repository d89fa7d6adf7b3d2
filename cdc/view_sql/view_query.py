"""The SQL of a view: what it reads, which keys changed rows affect, and the rows of given keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from cdc.view_sql.changed_keys import ChangedKeys, InputsAtCut, semi_join
from cdc.view_sql.explanation import explained
from cdc.view_sql.query_checks import (
    clauses_for_refresh,
    joins_and_groups_for_refresh,
    refuse_changing_results,
    refuse_unknown_key,
    tables_of,
)
from cdc.view_sql.query_structure import Query, quoted, structure_of
from cdc.view_sql.sql_text import SqlText


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
        parts, done = [], self._text.start
        for table in tables_of(self._text):
            start, end = table.args["db"].meta["start"], table.this.meta["end"] + 1
            alias = "" if table.alias else f" AS {quoted(table.name)}"
            parts += [self._text.sql[done:start], quoted(tables[f"{table.db}.{table.name}"]), alias]
            done = end
        return "".join(parts) + self._text.sql[done : self._text.end]

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

    def explain(self) -> list[tuple[str, str]]:
        """Return (topic, sentence) for every time that the view reads a table: how its changes find the keys."""
        if self._structure is None or self.only_refresh is not None:
            return [(topic, f"only a refresh finds what changed; {self.only_refresh}") for topic in self.inputs]
        return list(explained(self._text, self._structure, self.key))
