"""Checks that the columns named in a Delta sink's rules exist in a table and fit its target. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from cdc.config.sinks import HistoryMode, SinkRule, TableSettings
from cdc.config.transform import Transform
from cdc.config.yaml_document import Key
from cdc.errors import CdcError, SchemaNotApplicable, TransformFailed
from cdc.table import TableSchema
from cdc.target_names import column_name

CORRECT_RULE: Final = "correct the sink's rule in the definition, then restart the apply process"
_LISTS: Final = ("column_list", "except_column_list", "track_history_column_list", "track_history_except_column_list")


class KeyConflict(NamedTuple):
    """A key of the definition that conflicts with a table's columns, or with the existing target."""

    key: Key
    """Path of the key in the definition: from its root, or relative to a rule or sink."""
    error: CdcError
    """The error that stops the table, or the server, if the definition is not corrected."""


def with_target_columns(schema: TableSchema, settings: TableSettings) -> TableSchema:
    """Return the table's schema with only the columns that the target has; ignore unknown names in the column lists."""
    wanted, unwanted = set(settings.column_list), set(settings.except_column_list)
    if not wanted and not unwanted:
        return schema
    columns = tuple(c for c in schema.columns if (not wanted or c.name in wanted) and c.name not in unwanted)
    return replace(schema, columns=columns)


def column_conflicts(schema: TableSchema, rule: SinkRule | None, settings: TableSettings) -> Iterator[KeyConflict]:
    """Yield all conflicts between a table and its settings that can be found without Spark.

    settings: the settings of the sink, overridden by those of the rule.
    """
    yield from unknown_columns(schema, rule)
    yield from left_out_key_columns(schema, settings)
    yield from missing_key(schema, settings.history_mode)
    if rule is not None and rule.transform is not None:
        for key, error in transform_conflicts(rule.transform, with_target_columns(schema, settings)):
            yield KeyConflict(("transform", *key), error)


def unknown_columns(schema: TableSchema, rule: SinkRule | None) -> Iterator[KeyConflict]:
    """Yield a conflict for each name in the rule's column lists that the table does not have as a column."""
    known = {column.name for column in schema.sent}
    for name in _LISTS if rule is not None else ():
        for unknown in sorted(set(getattr(rule, name)) - known):
            message = f"{name}: table {schema.topic!r} has no column {unknown!r}"
            yield KeyConflict((name,), SchemaNotApplicable(message, remedy=CORRECT_RULE))


def left_out_key_columns(schema: TableSchema, settings: TableSettings) -> Iterator[KeyConflict]:
    """Yield a conflict for each key column that the column lists exclude from the target."""
    if not settings.column_list and not settings.except_column_list:
        return
    there = {column.name for column in with_target_columns(schema, settings).columns}
    for name in (column.name for column in schema.key if column.name not in there):
        key = "except_column_list" if name in settings.except_column_list else "column_list"
        message = f"column {name!r} of table {schema.topic!r} is part of the key and cannot be excluded"
        yield KeyConflict((key,), SchemaNotApplicable(message, remedy=CORRECT_RULE))


def missing_key(schema: TableSchema, keeping: HistoryMode) -> Iterator[KeyConflict]:
    """Yield a conflict if the table has no key and its target needs a key to identify rows."""
    if keeping in {HistoryMode.VERSIONS, HistoryMode.MARKED} and not schema.key:
        message = f"table {schema.topic!r} has no key: {keeping.value!r} needs a key to identify rows"
        remedy = "use mode 'append' or the default mode, or add a primary key or a replica identity index at the source"
        yield KeyConflict(
            ("stored_as_scd_type" if keeping is HistoryMode.VERSIONS else "mode",),
            SchemaNotApplicable(message, remedy=remedy),
        )


def transform_conflicts(rule: Transform, schema: TableSchema) -> Iterator[KeyConflict]:
    """Yield the conflicts between a transform and a table: unknown columns, and key columns that would be lost.

    schema: the table with the target's columns, as `with_target_columns` returns it.
    """
    topic, known = schema.topic, {column.name for column in schema.sent}
    keys = {column.name for column in schema.key}
    for kind, named in (("drop", rule.drop), ("rename", rule.rename), ("mask", rule.mask)):
        for name in sorted(set(named) - known):
            message = f"{kind}: table {topic!r} has no column {name!r}, or the publication does not send this column"
            yield KeyConflict((kind,), TransformFailed(message))
        for name in sorted(keys & set(named)) if kind != "rename" else ():
            message = f"{kind}: column {name!r} of table {topic!r} is part of the key and cannot be dropped or masked"
            yield KeyConflict((kind,), TransformFailed(message))
    made = [column_name(rule.rename.get(name, name)).casefold() for name in known - set(rule.drop)]
    made += [name.casefold() for name in rule.computed]
    for name in sorted({name for name in made if made.count(name) > 1}):
        yield KeyConflict(
            (), TransformFailed(f"two columns of the target of table {topic!r} would have the name {name!r}")
        )
    if rule.needs_spark and not keys:
        message = f"table {topic!r} has no key: 'computed' and 'where' need a key to identify rows"
        yield KeyConflict(("computed" if rule.computed else "where",), TransformFailed(message))
