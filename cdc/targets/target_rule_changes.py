"""Target rules: the rules under which the rows of a Delta target were written, compared with the definition.

Theory. A rule that hides data (a mask, a left-out column, a filter) acts on rows when they are merged. It does not
change the rows that are already in the target; only a replay rewrites them. So every version of a target records, in
its properties and columns, the rules under which its rows were written. This record survives a restart and the loss of
the catalog. The sink compares the rules when it opens a target and with every batch; `cdc query` and `cdc doctor`
compare them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
from deltalake import DeltaTable

from cdc.config import (
    DeltaSinkDefinition,
    SchemaChanges,
    SinkRule,
    TableSettings,
    Transform,
    rule_of,
)
from cdc.config.delta_sink import HistoryMode, settings_with_rule
from cdc.config.sink_rules import with_target_columns
from cdc.config.sinks import DefinedSink
from cdc.errors import TargetRulesChanged
from cdc.table import TableSchema
from cdc.target_names import COLUMN_ID_KEY, column_name, name_of_column
from cdc.targets.current_rows import MODE

TRANSFORM: Final = "cdc.transform"
"""Property of a target: fingerprint of the transform that made its rows; missing or empty without a transform."""


@dataclass(frozen=True, slots=True)
class TargetRules:
    """The settings and rules of one Delta sink, with methods that compare them with a target."""

    settings: TableSettings
    """The settings of the sink as a whole."""
    rules: tuple[SinkRule, ...] = ()

    @classmethod
    def of(cls, sink: DeltaSinkDefinition) -> Self:
        """Return the TargetRules of a sink in the definition."""
        return cls(sink, sink.rules)

    def difference(self, table: DeltaTable, topic: str, schema: TableSchema | None) -> TargetRulesChanged | None:
        """Return the first difference between the rules and a version of a target; None if there is none.

        `schema` is the last published schema of the source table. If it is None, columns are not compared.
        """
        configuration = table.metadata().configuration
        if not any(name.startswith(_OURS) for name in configuration):
            return None  # not a target of cdc; the sink reports it
        found = self._transform_difference(configuration, topic) or self._mode_difference(configuration, topic)
        if found is None and schema is not None:
            found = next(self._column_differences(pa.schema(table.schema().to_arrow()), schema), None)
        return None if found is None else TargetRulesChanged(f"target {table.table_uri!r} {found}")

    def exposes(self, table: DeltaTable, topic: str, schema: TableSchema | None) -> str | None:
        """Return a text about data that `table` contains although the rules hide it; None if there is no such data.

        `table` is one version of a target. If `schema` is None, left-out columns are not checked.
        """
        rule = self._rule(topic)
        if rule is not None and rule.transform is not None and rule.transform.hides_data:
            found = self._transform_difference(table.metadata().configuration, topic)
            if found is not None:
                return found
        if schema is None:
            return None
        settings = settings_with_rule(self.settings, rule)
        shown = self._shown(pa.schema(table.schema().to_arrow()), schema, settings)
        return next((_SHOWS.format(name) for name in shown), None)

    def check_left_out(self, uri: str, columns: pa.Schema, schema: TableSchema) -> None:
        """Raise TargetRulesChanged if the target has a column that the rules leave out."""
        settings = settings_with_rule(self.settings, self._rule(schema.topic))
        if (name := next(self._shown(columns, schema, settings), None)) is not None:
            raise TargetRulesChanged(f"target {uri!r} {_SHOWS.format(name)}")

    def _rule(self, topic: str) -> SinkRule | None:
        return rule_of(topic, self.rules)

    def _transform_difference(self, configuration: Mapping[str, str | None], topic: str) -> str | None:
        rule = self._rule(topic)
        transform = None if rule is None else rule.transform
        expected = "" if transform is None else transform.fingerprint
        return _REMADE if (configuration.get(TRANSFORM) or "") != expected else None

    def _mode_difference(self, configuration: Mapping[str, str | None], topic: str) -> str | None:
        expected = settings_with_rule(self.settings, self._rule(topic)).history_mode
        if (mode := configuration.get(MODE) or HistoryMode.LATEST.value) != expected.value:
            return f"was created with mode {mode!r}: expected {expected.value!r}"
        return None

    def _column_differences(self, columns: pa.Schema, schema: TableSchema) -> Iterator[str]:
        settings = settings_with_rule(self.settings, self._rule(schema.topic))
        yield from (_SHOWS.format(name) for name in self._shown(columns, schema, settings))
        if settings.schema_changes is not SchemaChanges.IGNORE:
            yield from (_MISSES.format(name) for name in self._missing(columns, schema, settings))

    def _shown(self, columns: pa.Schema, schema: TableSchema, settings: TableSettings) -> Iterator[str]:
        """Yield the source name of each column that the target has although the rules leave it out."""
        if not settings.column_list and not settings.except_column_list:
            return
        wanted = {column.id for column in with_target_columns(schema, settings).columns}
        left_out = {column.id: column.name for column in schema.columns if column.id not in wanted}
        if _ids(columns):
            for field in columns:
                number, name = _id(field), name_of_column(field.name)
                # a column that was dropped at the source is known by its name alone
                if number in left_out or (name in settings.except_column_list and number not in {None, *wanted}):
                    yield left_out.get(number or 0, name)
            return
        there = {self._called(column.name, schema.topic) for column in schema.columns if column.id in wanted}
        unwanted = (*left_out.values(), *settings.except_column_list)
        yield from (name for name in unwanted if column_name(name) in set(columns.names) - there)

    def _missing(self, columns: pa.Schema, schema: TableSchema, settings: TableSettings) -> Iterator[str]:
        """Yield the source name of each column that the rules include but that the target does not have."""
        rule = self._rule(schema.topic)
        transform = None if rule is None else rule.transform
        if transform is not None and transform.python is not None:
            return
        gone, ids = set(() if transform is None else transform.drop), _ids(columns)
        for column in with_target_columns(schema, settings).sent:
            there = column.id in ids if ids else self._called(column.name, schema.topic) in columns.names
            if column.name not in gone and not there:
                yield column.name

    def _called(self, name: str, topic: str) -> str:
        """Return the name of a source column in the target."""
        rule = self._rule(topic)
        transform = None if rule is None else rule.transform
        return column_name(name if transform is None else transform.rename.get(name, name))


def masked_columns(sink: DefinedSink, schema: TableSchema) -> set[str]:
    """Return the names of the columns whose values a sink masks."""
    transform = _transform_of(sink, schema)
    return set() if transform is None else set(transform.mask)


def hidden_columns(sink: DefinedSink, schema: TableSchema) -> set[str]:
    """Return the names of the columns whose values a sink masks or omits."""
    there = {column.name for column in sink.selected_columns(schema).columns}
    transform = _transform_of(sink, schema)
    hidden = set() if transform is None else {*transform.mask, *transform.drop}
    return {column.name for column in schema.columns} - there | hidden


def _transform_of(sink: DefinedSink, schema: TableSchema) -> Transform | None:
    rule = sink.rule(schema.topic)
    return None if rule is None else rule.transform


_OURS: Final = "cdc."
"""Prefix of the properties of every target."""
_REMADE: Final = "has rows that were written with another transform than its rule has now"
_SHOWS: Final = "has column {0!r}, which its rule excludes"
_MISSES: Final = "has no column {0!r}, which its rule includes"


def _ids(columns: pa.Schema) -> set[int]:
    """Return the ids of the source columns in a target's schema; empty if the target is shared."""
    return {number for field in columns if (number := _id(field)) is not None}


def _id(field: pa.Field) -> int | None:
    number = (field.metadata or {}).get(COLUMN_ID_KEY)
    return None if number is None else int(number)
