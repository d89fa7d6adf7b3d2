"""Warnings for names in the definition that no table of the source has; `cdc doctor` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from cdc.config import Definition
from cdc.config.definition_conflicts import did_you_mean
from cdc.errors import InvalidDefinition, SourceError
from cdc.postgres.connection import connect
from cdc.postgres.preflight import PreflightProblem
from cdc.postgres.tables import match_tables
from cdc.table import TableSchema, matches


def unmatched_name_problems(definition: Definition, tables: Sequence[TableSchema]) -> Iterator[PreflightProblem]:
    """Yield a warning for each table rule, view input and rule of a sink or delivery that no table has the name of.

    tables: the captured tables. A name can be that of a table which is created later, so it is no error.
    """
    topics, views = [table.topic for table in tables], [view.name for view in definition.views]
    existing = _existing_tables(definition) or topics
    for rule in definition.tables:
        if not any(matches(topic, [rule.match]) for topic in existing):
            near = did_you_mean(rule.match, existing)
            yield _warning("tables", f"the source has no table that matches {rule.match!r}{near}")
    for view in definition.views:
        for table in sorted(view_tables(view.name, view.sql, view.key) - {*topics, *views}):
            near = did_you_mean(table, [*topics, *views])
            yield _warning(f"view {view.name}", f"the view reads {table!r}, which the source does not have{near}")
    for consumer in (*definition.sinks, *definition.deliveries):
        yield from _unused_rules(consumer, [*topics, *views])


def view_tables(name: str, sql: str, key: Sequence[str]) -> set[str]:
    """Return the topics that the SQL of a view names."""
    analysis = import_module("cdc.view_sql.view_query")  # imported late: few definitions have views
    return set(analysis.ViewQuery.parse(name, sql, key).inputs)


def _unused_rules(consumer: Any, names: Sequence[str]) -> Iterator[PreflightProblem]:
    """Yield a warning for each rule that is the first match of no name. consumer: a sink or a delivery."""
    rules = () if getattr(consumer, "views_of", None) is not None else getattr(consumer, "rules", ())
    used = {next((rule.match for rule in rules if matches(name, [rule.match])), None) for name in names}
    for rule in rules:
        if rule.match not in used:
            near = did_you_mean(rule.match, names)
            message = f"the rule {rule.match!r} is the first match of no table, so it has no effect{near}"
            yield _warning(consumer.name, message)


def _existing_tables(definition: Definition) -> list[str]:
    """Return the topics of all tables of the source; an empty list if it cannot be read."""
    try:
        with connect(definition.source.current_dsn(), application_name="cdc doctor") as conn:
            return [str(name) for _, name in match_tables(conn, ["*"])]
    except SourceError:
        return []


def _warning(subject: str, message: str) -> PreflightProblem:
    return PreflightProblem(InvalidDefinition.code, subject, message, fatal=False)
