"""Which columns of a table its target has, and which of them make versions, by what the sink says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from cdc.config import SinkRule, TableSettings, rule_of
from cdc.config.sinks import Keeping
from cdc.errors import SchemaNotApplicable
from cdc.naming import column_name
from cdc.table import TableSchema
from pipelines.sinks.delta_source import Shape

_MEND: Final = "mend the sink's rule in the definition and start again"
_LISTS: Final = ("column_list", "except_column_list", "track_history_column_list", "track_history_except_column_list")


def selected(schema: TableSchema, settings: TableSettings) -> TableSchema:
    """The table with the columns alone that its target has; raises SchemaNotApplicable if one of its key is left out.

    A name that the table does not have says nothing here; see check_named.
    """
    wanted, unwanted = set(settings.column_list), set(settings.except_column_list)
    if not wanted and not unwanted:
        return schema
    kept = tuple(c for c in schema.columns if (not wanted or c.name in wanted) and c.name not in unwanted)
    if lost := [column.name for column in schema.key if column not in kept]:
        raise SchemaNotApplicable(
            f"column {lost[0]!r} is of the key of table {schema.topic!r}: it cannot be left out", remedy=_MEND
        )
    return replace(schema, columns=kept)


def check_named(schema: TableSchema, rules: Sequence[SinkRule]) -> None:
    """Raise SchemaNotApplicable for a name in the rule of a table that none of its columns has."""
    rule = rule_of(schema.topic, rules)
    known = {column.name for column in schema.sent}
    for name in _LISTS:
        if rule is not None and (unknown := sorted(set(getattr(rule, name)) - known)):
            raise SchemaNotApplicable(f"{name}: table {schema.topic!r} has no column {unknown[0]!r}", remedy=_MEND)


def check_kept(schema: TableSchema, keeping: Keeping) -> None:
    """Raise SchemaNotApplicable for a table without a key whose rows would have to be told apart."""
    if keeping in (Keeping.VERSIONS, Keeping.MARKED) and not schema.key:
        raise SchemaNotApplicable(
            f"table {schema.topic!r} has no key, by which {keeping.value!r} would know its rows",
            remedy="keep it as 'append' or as it is by default, or give it a key or a replica identity at the source",
        )


def tracked(shape: Shape, schema: TableSchema, settings: TableSettings) -> list[str]:
    """Delta names of the columns of which a change begins a version; schema: the table as its source names it."""
    wanted, unwanted = set(settings.track_history_column_list), set(settings.track_history_except_column_list)
    name_of = {column.id: column.name for column in schema.columns}
    named = [(column_name(column.name), name_of.get(column.id, column.name)) for column in shape.schema.sent]
    keys = set(shape.key)
    return [
        held for held, name in named if held not in keys and (not wanted or name in wanted) and name not in unwanted
    ]
