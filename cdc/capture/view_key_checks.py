"""Warnings for views whose key can be NULL in the tables of the source; `cdc doctor` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cdc.config import Definition
from cdc.errors import ViewKeyNull
from cdc.postgres.preflight import PreflightProblem
from cdc.table import TableSchema
from cdc.view_sql.view_query import queries_of


def view_key_problems(definition: Definition, tables: Sequence[TableSchema]) -> Iterator[PreflightProblem]:
    """Yield a warning for each column of a view's key that is a nullable column of one of the tables."""
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
