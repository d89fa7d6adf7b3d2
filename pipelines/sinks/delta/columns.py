"""Which columns of a table its target has, and which of them make versions, by what the sink says. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cdc.config import SinkRule, TableSettings, rule_of
from cdc.config.columns import ColumnMismatch, left_out_key_columns, missing_key, unknown_columns, with_target_columns
from cdc.config.sinks import HistoryMode
from cdc.naming import column_name
from cdc.table import TableSchema
from pipelines.sinks.delta.merge_source import RowShape


def selected(schema: TableSchema, settings: TableSettings) -> TableSchema:
    """The table with the columns alone that its target has; raises SchemaNotApplicable if one of its key is left out.

    A name that the table does not have says nothing here; see check_named.
    """
    _check(left_out_key_columns(schema, settings))
    return with_target_columns(schema, settings)


def check_named(schema: TableSchema, rules: Sequence[SinkRule]) -> None:
    """Raise SchemaNotApplicable for a name in the rule of a table that none of its columns has."""
    _check(unknown_columns(schema, rule_of(schema.topic, rules)))


def check_kept(schema: TableSchema, keeping: HistoryMode) -> None:
    """Raise SchemaNotApplicable for a table without a key whose rows would have to be told apart."""
    _check(missing_key(schema, keeping))


def _check(found: Iterator[ColumnMismatch]) -> None:
    for misfit in found:
        raise misfit.error


def tracked(shape: RowShape, schema: TableSchema, settings: TableSettings) -> list[str]:
    """Delta names of the columns of which a change begins a version; schema: the table as its source names it."""
    wanted, unwanted = set(settings.track_history_column_list), set(settings.track_history_except_column_list)
    name_of = {column.id: column.name for column in schema.columns}
    named = [(column_name(column.name), name_of.get(column.id, column.name)) for column in shape.schema.sent]
    keys = set(shape.key)
    return [
        held for held, name in named if held not in keys and (not wanted or name in wanted) and name not in unwanted
    ]
