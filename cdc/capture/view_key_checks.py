"""Problems of the keys of views that the tables of the source show; `cdc doctor` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cdc.config import Definition
from cdc.errors import ViewColumnRefused, ViewKeyNull
from cdc.postgres.preflight import PreflightProblem
from cdc.table import TableSchema
from cdc.view_sql.view_query import queries_of

TIME_TYPES: Final = frozenset({1082, 1114, 1184})
"""OIDs of the types date, timestamp and timestamp with time zone (pg_type.dat); `keep` needs one such key column."""


def view_key_problems(definition: Definition, tables: Sequence[TableSchema]) -> Iterator[PreflightProblem]:
    """Yield a warning for each column of a view's key that is a nullable column of one of the tables, and a problem for
    each view with `keep` whose key has no time.
    """
    yield from _keys_without_time(definition, tables)
    nullable = {
        (table.topic, column.name)
        for table in tables
        for column in table.columns
        if not column.not_null and column.key is None
    }
    for name, query in queries_of(definition.views).items():
        for cause in query.null_causes():
            if (cause.topic, cause.source_column) in nullable:
                message = (
                    f"column {cause.column!r} of the key can be NULL, as column {cause.source_column!r} of "
                    f"{cause.topic} can; the view stops at the first such row: {ViewKeyNull.remedy}"
                )
                yield PreflightProblem(ViewKeyNull.code, f"view {name}", message, fatal=False)


def _keys_without_time(definition: Definition, tables: Sequence[TableSchema]) -> Iterator[PreflightProblem]:
    """Yield the views with `keep` of which every column of the key is a column of a table, and not one is a time."""
    column_types = {(table.topic, column.name): column.type_oid for table in tables for column in table.columns}
    queries = queries_of(definition.views)
    for view in (view for view in definition.views if view.keep is not None):
        types = {
            name: None if source is None else column_types.get(source)
            for name, source in queries[view.name].key_columns()
        }
        times = [name for name, type_oid in types.items() if type_oid in TIME_TYPES]
        if types and None not in types.values() and len(times) != 1:
            message = (
                f"the view has 'keep', and its key ({', '.join(view.key)}) has {len(times) or 'no'} columns of type "
                "date or timestamp: let the key have one column with the time of a row, or remove 'keep'"
            )
            yield PreflightProblem(ViewColumnRefused.code, f"view {view.name}", message)
