"""Unwritable tables: finds the tables that cannot be written to their targets, before the first write.

`cdc doctor` checks the tables of the source. The apply process checks the tables of the log before it opens a sink. If
a table can no longer be written while the sink runs, only this table stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cdc.config import (
    Definition,
    DeltaSinkDefinition,
    SearchRule,
    SearchSinkDefinition,
    SinkRule,
    TableSettings,
    rule_of,
    search_settings,
)
from cdc.config.definition_conflicts import KeyConflict, column_conflicts
from cdc.config.sinks import settings_with_rule, target_path
from cdc.config.yaml_document import Key
from cdc.errors import (
    CdcError,
    LogCorrupt,
    LogError,
    LogFormatUnknown,
    LogInaccessible,
    LogUnreachable,
    SinkUnavailable,
    TargetUnusable,
    TransformFailed,
)
from cdc.log.reader import LogReader
from cdc.stores.path_ownership import check_path
from cdc.table import TableSchema, TableState, matches

AT_ONCE: Final = 16
"""Maximum number of paths that are checked in parallel."""


@dataclass(frozen=True, slots=True)
class SinkTable:
    """One table together with one Delta sink that receives it."""

    sink: DeltaSinkDefinition
    number: int
    """Index of the sink in the definition."""
    schema: TableSchema
    sink_settings: TableSettings
    """The settings of the sink for tables without a rule."""

    @property
    def rule(self) -> SinkRule | None:
        """The rule of the sink that applies to the table; None if no rule applies."""
        return rule_of(self.schema.topic, self.sink.rules)

    @property
    def settings(self) -> TableSettings:
        """The table's settings: the settings of the sink, overridden by the table's rule."""
        return settings_with_rule(self.sink_settings, self.rule)

    def key(self, *below: str | int) -> Key:
        """Return the path in the definition to one setting of the table, such as `sinks`, 0, `rules`, 2, `path`.

        `below` is the path of the setting inside its rule or sink. If the table's rule contains the setting, the result
        leads into the rule; otherwise it leads into the sink.
        """
        return _key_in_rule(self.number, self.rule, self.sink.rules, below)


def _key_in_rule(
    number: int, rule: SinkRule | SearchRule | None, rules: Sequence[SinkRule | SearchRule], below: Key
) -> Key:
    """Return the path in the definition to one setting of a table, as `SinkTable.key` does.

    number: index of the sink. rule: the table's rule, one of `rules`.
    """
    if rule is not None and below and below[0] in rule.model_fields_set:
        return ("sinks", number, "rules", rules.index(rule), *below)
    return ("sinks", number, *below)


def tables_of_sinks(
    definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str]
) -> Iterator[SinkTable]:
    """Yield each table of each Delta sink whose name is in `sinks`."""
    for number, sink in enumerate(definition.sinks):
        if isinstance(sink, DeltaSinkDefinition) and sink.name in sinks and not sink.views:
            settings = settings_with_rule(sink, None)
            received = (schema for schema in tables if matches(schema.topic, sink.tables))
            yield from (SinkTable(sink, number, schema, settings) for schema in received)


def tables_in(log: LogReader) -> list[TableSchema]:
    """Return the schemas of all tables in the log that were not dropped."""
    return [schema for schema in log.schemas().values() if schema.state is not TableState.DROPPED]


def sink_conflicts(definition: Definition, tables: Sequence[TableSchema]) -> list[KeyConflict]:
    """Return the reasons why tables cannot be written to their targets, as far as a check without Spark finds them.

    Paths are not checked if the log cannot be read, because the owner of a target is then unknown.
    """
    sinks = {sink.name for sink in definition.sinks}
    found = rule_conflicts(definition, tables, sinks)
    try:
        return [*found, *path_conflicts(definition, tables, sinks, LogReader(definition.log.root).log_id)]
    except (LogCorrupt, LogFormatUnknown, LogInaccessible, LogUnreachable):
        return found
    except LogError:
        return [*found, *path_conflicts(definition, tables, sinks, None)]


def rule_conflicts(definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str]) -> list[KeyConflict]:
    """Return the conflicts between the columns of tables and the settings of sinks.

    The function returns only conflicts that a check without Spark can find.
    """
    found = [
        KeyConflict(one.key(*key), error)
        for one in tables_of_sinks(definition, tables, sinks)
        for key, error in column_conflicts(one.schema, one.rule, one.settings)
    ]
    return [*found, *_search_conflicts(definition, tables, sinks)]


def _search_conflicts(
    definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str]
) -> Iterator[KeyConflict]:
    for number, sink in enumerate(definition.sinks):
        if not isinstance(sink, SearchSinkDefinition) or sink.name not in sinks or sink.views:
            continue
        for schema in (schema for schema in tables if matches(schema.topic, sink.tables)):
            rule, settings = rule_of(schema.topic, sink.rules), search_settings(schema.topic, sink, sink.rules)
            for key, error in column_conflicts(schema, rule, settings):
                yield KeyConflict(_key_in_rule(number, rule, sink.rules, key), error)


def path_conflicts(
    definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str], log_id: str | None
) -> list[KeyConflict]:
    """Return one conflict for each target whose path overlaps another target, or contains files not from this log.

    If the store of a sink cannot be read, only one conflict reports this for the sink. `log_id` is the id of the log,
    or None if no log exists yet.
    """
    routes, found = list[tuple[str, SinkTable]](), list[KeyConflict]()
    for one in tables_of_sinks(definition, tables, sinks):
        try:
            routes.append((target_path(one.sink.path, one.sink.rules, one.schema), one))
        except TransformFailed as exc:
            found.append(KeyConflict(one.key("pattern"), exc))
    found += _overlapping_paths(routes)
    first_of = dict[str, SinkTable]()
    for uri, one in routes:
        first_of.setdefault(uri, one)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="paths") as pool:
        errors = list(pool.map(lambda uri: _path_error(uri, log_id), first_of))
    unreadable = set[int]()
    for one, error in zip(first_of.values(), errors, strict=True):
        if error is None or (isinstance(error, SinkUnavailable) and one.number in unreadable):
            continue
        if isinstance(error, SinkUnavailable):
            unreadable.add(one.number)
        message = f"table {one.schema.topic!r} cannot be written to its target: {error.message}"
        found.append(KeyConflict(one.key("path"), type(error)(message, remedy=error.fix)))
    return found


def _overlapping_paths(routes: Iterable[tuple[str, SinkTable]]) -> Iterator[KeyConflict]:
    """Yield one conflict for each table whose target has the path of another target, or a path inside that path.

    Tables of one rule with `merge_tables` may have the same target.
    """
    around: tuple[str, SinkTable] | None = None
    for uri, one in sorted(routes, key=lambda route: f"{route[0]}/"):
        if around is None or not f"{uri}/".startswith(f"{around[0]}/"):
            around = uri, one
            continue
        other, owner = around
        if uri != other or one.rule is None or not one.rule.merge_tables or one.rule is not owner.rule:
            message = (
                f"the target of table {one.schema.topic!r} would be {uri!r}, which overlaps {other!r}, the target "
                "of table "
                f"{owner.schema.topic!r}"
            )
            yield KeyConflict(one.key("path"), TransformFailed(message))


def _path_error(uri: str, log_id: str | None) -> CdcError | None:
    try:
        check_path(uri, log_id)
    except (SinkUnavailable, TargetUnusable) as exc:
        return exc
    return None
