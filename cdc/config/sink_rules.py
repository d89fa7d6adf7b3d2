"""Rules of sinks for single tables, whatever the kind of the sink: which rule applies, and whether it fits the table.

`column_conflicts` needs a table of the source: it checks that the columns named in a rule exist in the table and fit
its target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeVar

from pydantic import Field

from cdc.config.field_types import Model, Share
from cdc.config.transform import Transform
from cdc.config.yaml_document import Key
from cdc.errors import CdcError, SchemaNotApplicable, TransformFailed
from cdc.table import TableSchema, matches
from cdc.target_names import column_name

CORRECT_RULE: Final = "correct the sink's rule in the definition, then restart the apply process"
EXCLUSIVE_KEYS: Final = (
    frozenset({"stored_as_scd_type", "mode"}),
    frozenset({"column_list", "except_column_list"}),
    frozenset({"track_history_column_list", "track_history_except_column_list"}),
)
"""Groups of keys; at most one key of a group may be set.

A rule that sets a key overrides the sink's settings of the whole group.
"""
_LISTS: Final = (
    "column_list",
    "except_column_list",
    "track_history_column_list",
    "track_history_except_column_list",
    "fields",
)
"""Keys of a rule that are lists of columns; not every kind of rule has all of them."""
WILDCARDS: Final = frozenset("*?[")
"""Characters of a glob that match other characters."""


class DeadLetterSettings(Model):
    """Limits for dead letters: rows that a target rejects are stored with their key, and other rows are applied."""

    stop_at: Annotated[int, Field(ge=0, le=10_000)] = 1_000
    """Number of dead-letter keys of one table above which the table stops; 0 stops it at the first rejected row."""
    ratio: Share = 1.0
    """Share of the keys of a batch that may become dead letters; the table stops above it. Applies to batches of at
    least 100 keys. Default 1, no limit."""


class ColumnLists(Protocol):
    """Settings that select the columns of a target."""

    @property
    def column_list(self) -> tuple[str, ...]:
        """Columns of the source that the target has; empty for all columns."""

    @property
    def except_column_list(self) -> tuple[str, ...]:
        """Columns of the source that the target does not have."""

    @property
    def selecting_lists(self) -> tuple[tuple[str, ...], ...]:
        """Lists of columns; the target has only columns that are in each list that is not empty."""


class RuleOfTables(ColumnLists, Protocol):
    """The rule of a sink for the tables that a glob matches."""

    @property
    def match(self) -> str:
        """Glob over `schema.table`."""

    @property
    def transform(self) -> Transform | None:
        """Transformation of the rows before they are written to the target."""

    @property
    def model_fields_set(self) -> set[str]:
        """The keys that the definition sets in the rule."""


class KeyConflict(NamedTuple):
    """A key of the definition that conflicts with a table's columns, or with the existing target."""

    key: Key
    """Path of the key in the definition: from its root, or relative to a rule or sink."""
    error: CdcError
    """The error that stops the table, or the server, if the definition is not corrected."""


class Disagreement(NamedTuple):
    """A key that conflicts with another key, and the reason."""

    key: Key
    message: str


AnyRule = TypeVar("AnyRule", bound=RuleOfTables)


def rule_of(topic: str, rules: Sequence[AnyRule]) -> AnyRule | None:
    """Return the first rule that matches the table; None if no rule does."""
    return next((rule for rule in rules if matches(topic, (rule.match,))), None)


def overridden(settings: type[Model], sink: Model, rule: Model | None) -> dict[str, Any]:
    """Return the keys of `settings` that the sink or the rule sets; those of the rule override those of the sink."""
    fields = settings.model_fields.keys()
    own = {name: getattr(sink, name) for name in sink.model_fields_set & fields}
    said = {} if rule is None else {name: getattr(rule, name) for name in rule.model_fields_set & fields}
    replaced = {name for group in EXCLUSIVE_KEYS if group & said.keys() for name in group}
    return {name: value for name, value in own.items() if name not in replaced} | said


def exclusive_keys(said: Model, key: Key) -> Iterator[Disagreement]:
    """Yield a conflict for each two keys of one sink or one rule that must not both be set."""
    for group in EXCLUSIVE_KEYS:
        both = sorted(name for name in group & said.model_fields_set if getattr(said, name))
        if len(both) > 1:
            yield Disagreement((*key, both[0]), f"conflicts with {both[1]}: keep only one of the two keys")


def with_target_columns(schema: TableSchema, settings: ColumnLists) -> TableSchema:
    """Return the table's schema with only the columns that the target has; ignore unknown names in the column lists."""
    wanted, unwanted = set(settings.column_list), set(settings.except_column_list)
    if not wanted and not unwanted:
        return schema
    columns = tuple(c for c in schema.columns if (not wanted or c.name in wanted) and c.name not in unwanted)
    return replace(schema, columns=columns)


def column_conflicts(schema: TableSchema, rule: RuleOfTables | None, settings: ColumnLists) -> Iterator[KeyConflict]:
    """Yield all conflicts between a table and its columns in a target that can be found without Spark.

    settings: the settings of the sink, overridden by those of the rule.
    """
    yield from unknown_columns(schema, rule)
    yield from left_out_key_columns(schema, settings)
    if rule is not None and rule.transform is not None:
        for key, error in transform_conflicts(rule.transform, with_target_columns(schema, settings)):
            yield KeyConflict(("transform", *key), error)


def unknown_columns(schema: TableSchema, rule: RuleOfTables | None) -> Iterator[KeyConflict]:
    """Yield a conflict for each name in the rule's column lists that the table does not have as a column."""
    known = {column.name for column in schema.sent}
    for name in _LISTS if rule is not None else ():
        for unknown in sorted(set(getattr(rule, name, ())) - known):
            message = f"{name}: table {schema.topic!r} has no column {unknown!r}"
            yield KeyConflict((name,), SchemaNotApplicable(message, remedy=CORRECT_RULE))


def left_out_key_columns(schema: TableSchema, settings: ColumnLists) -> Iterator[KeyConflict]:
    """Yield a conflict for each key column that the column lists exclude from the target."""
    if not settings.column_list and not settings.except_column_list:
        return
    there = {column.name for column in with_target_columns(schema, settings).columns}
    for name in (column.name for column in schema.key if column.name not in there):
        key = "except_column_list" if name in settings.except_column_list else "column_list"
        message = f"column {name!r} of table {schema.topic!r} is part of the key and cannot be excluded"
        yield KeyConflict((key,), SchemaNotApplicable(message, remedy=CORRECT_RULE))


def with_selected_columns(schema: TableSchema, settings: ColumnLists) -> TableSchema:
    """Return the table with only the columns that its settings select for the target.

    Raises SchemaNotApplicable if a key column is not selected. An unknown column name in the settings is no error here;
    see check_named.
    """
    raise_first(left_out_key_columns(schema, settings))
    return with_target_columns(schema, settings)


def check_named(schema: TableSchema, rule: RuleOfTables | None) -> None:
    """Raise SchemaNotApplicable if the rule of a table names a column that the table does not have."""
    raise_first(unknown_columns(schema, rule))


def raise_first(conflicts: Iterator[KeyConflict]) -> None:
    """Raise the error of the first conflict, if there is one."""
    for conflict in conflicts:
        raise conflict.error


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
