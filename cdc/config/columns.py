"""Columns: what a Delta sink's rules say of columns, held against those that a table has. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from cdc.config.sinks import HistoryMode, SinkRule, TableSettings
from cdc.config.transform import Transform
from cdc.config.yaml_document import Key
from cdc.errors import CdcError, SchemaNotApplicable, TransformFailed
from cdc.naming import column_name
from cdc.table import TableSchema

CORRECT_RULE: Final = "mend the sink's rule in the definition and start again"
_LISTS: Final = ("column_list", "except_column_list", "track_history_column_list", "track_history_except_column_list")


class ColumnMismatch(NamedTuple):
    """What a definition says that does not go with a table, or with what lies at its target's place."""

    key: Key
    """Where it is said: from the definition's beginning, or below a rule or its sink."""
    error: CdcError
    """What the table would stop with."""


def with_target_columns(schema: TableSchema, settings: TableSettings) -> TableSchema:
    """The table with the columns alone that its target has; a name that it does not have says nothing here."""
    wanted, unwanted = set(settings.column_list), set(settings.except_column_list)
    if not wanted and not unwanted:
        return schema
    columns = tuple(c for c in schema.columns if (not wanted or c.name in wanted) and c.name not in unwanted)
    return replace(schema, columns=columns)


def column_mismatches(schema: TableSchema, rule: SinkRule | None, settings: TableSettings) -> Iterator[ColumnMismatch]:
    """All of them but what takes Spark to find; settings: what rule and sink come to for the table."""
    yield from unknown_columns(schema, rule)
    yield from left_out_key_columns(schema, settings)
    yield from missing_key(schema, settings.keeping)
    if rule is not None and rule.transform is not None:
        for key, error in transform_mismatches(rule.transform, with_target_columns(schema, settings)):
            yield ColumnMismatch(("transform", *key), error)


def unknown_columns(schema: TableSchema, rule: SinkRule | None) -> Iterator[ColumnMismatch]:
    """Names in the lists of a table's rule that none of its columns has."""
    known = {column.name for column in schema.sent}
    for name in _LISTS if rule is not None else ():
        for unknown in sorted(set(getattr(rule, name)) - known):
            told = f"{name}: table {schema.topic!r} has no column {unknown!r}"
            yield ColumnMismatch((name,), SchemaNotApplicable(told, remedy=CORRECT_RULE))


def left_out_key_columns(schema: TableSchema, settings: TableSettings) -> Iterator[ColumnMismatch]:
    """Columns of the key that the target would not have."""
    if not settings.column_list and not settings.except_column_list:
        return
    there = {column.name for column in with_target_columns(schema, settings).columns}
    for name in (column.name for column in schema.key if column.name not in there):
        key = "except_column_list" if name in settings.except_column_list else "column_list"
        told = f"column {name!r} is of the key of table {schema.topic!r}: it cannot be left out"
        yield ColumnMismatch((key,), SchemaNotApplicable(told, remedy=CORRECT_RULE))


def missing_key(schema: TableSchema, keeping: HistoryMode) -> Iterator[ColumnMismatch]:
    """A table without a key whose rows would have to be told apart."""
    if keeping in {HistoryMode.VERSIONS, HistoryMode.MARKED} and not schema.key:
        told = f"table {schema.topic!r} has no key, by which {keeping.value!r} would know its rows"
        remedy = "keep it as 'append' or as it is by default, or give it a key or a replica identity at the source"
        yield ColumnMismatch(
            ("stored_as_scd_type" if keeping is HistoryMode.VERSIONS else "mode",),
            SchemaNotApplicable(told, remedy=remedy),
        )


def transform_mismatches(rule: Transform, schema: TableSchema) -> Iterator[ColumnMismatch]:
    """Mismatches between a transform and a table: unknown columns, and columns of the key that would be lost.

    schema: the table with the target's columns, as `with_target_columns` returns it.
    """
    topic, known = schema.topic, {column.name for column in schema.sent}
    keys = {column.name for column in schema.key}
    for kind, named in (("drop", rule.drop), ("rename", rule.rename), ("mask", rule.mask)):
        for name in sorted(set(named) - known):
            told = f"{kind}: table {topic!r} has no column {name!r}, or does not send it"
            yield ColumnMismatch((kind,), TransformFailed(told))
        for name in sorted(keys & set(named)) if kind != "rename" else ():
            told = f"{kind}: column {name!r} is of the key of table {topic!r}: it is neither dropped nor masked"
            yield ColumnMismatch((kind,), TransformFailed(told))
    made = [column_name(rule.rename.get(name, name)).casefold() for name in known - set(rule.drop)]
    made += [name.casefold() for name in rule.computed]
    for name in sorted({name for name in made if made.count(name) > 1}):
        yield ColumnMismatch(
            (), TransformFailed(f"two columns of the target of table {topic!r} would be called {name!r}")
        )
    if rule.in_spark and not keys:
        told = f"table {topic!r} has no key: its rows are counted as they are, not computed"
        yield ColumnMismatch(("computed" if rule.computed else "where",), TransformFailed(told))
