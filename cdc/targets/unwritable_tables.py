"""Unwritable tables: finds the tables that cannot be written to their targets, before the first write.

`cdc doctor` checks the tables of the source. The apply process checks the tables of the log before it opens a sink. If
a table can no longer be written while the sink runs, only this table stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cdc.config import Definition
from cdc.config.sink_rules import KeyConflict, RuleOfTables
from cdc.config.sinks import DefinedSink
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
from cdc.table import TableSchema, TableState, matches
from cdc.targets.path_ownership import check_path

AT_ONCE: Final = 16
"""Maximum number of paths that are checked in parallel."""


@dataclass(frozen=True, slots=True)
class SinkTable:
    """One table together with one sink that receives it."""

    sink: DefinedSink
    number: int
    """Index of the sink in the definition."""
    schema: TableSchema

    def key(self, *below: str | int) -> Key:
        """Return the path in the definition to one setting of the table, such as `sinks`, 0, `rules`, 2, `path`.

        `below` is the path of the setting inside its rule or sink. If the table's rule contains the setting, the result
        leads into the rule; otherwise it leads into the sink.
        """
        rule = self.sink.rule(self.schema.topic)
        if rule is not None and below and below[0] in rule.model_fields_set:
            return ("sinks", self.number, "rules", self.sink.rules.index(rule), *below)
        return ("sinks", self.number, *below)


def tables_of_sinks(
    definition: Definition, tables: Sequence[TableSchema], sinks: Collection[str]
) -> Iterator[SinkTable]:
    """Yield each table of each sink whose name is in `sinks`."""
    for number, sink in enumerate(definition.sinks):
        if sink.name in sinks and not sink.views:
            yield from (SinkTable(sink, number, schema) for schema in tables if matches(schema.topic, sink.tables))


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
    return [
        KeyConflict(one.key(*key), error)
        for one in tables_of_sinks(definition, tables, sinks)
        for key, error in one.sink.column_conflicts(one.schema)
    ]


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
            path = one.sink.target_path(one.schema)
        except TransformFailed as exc:
            found.append(KeyConflict(one.key("pattern"), exc))
            continue
        if path is not None:
            routes.append((path, one))
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
        is_shared = uri == other and one.sink.shared_path(one.schema) is not None and _rule(one) is _rule(owner)
        if not is_shared:
            message = (
                f"the target of table {one.schema.topic!r} would be {uri!r}, which overlaps {other!r}, the target "
                "of table "
                f"{owner.schema.topic!r}"
            )
            yield KeyConflict(one.key("path"), TransformFailed(message))


def _rule(table: SinkTable) -> RuleOfTables | None:
    return table.sink.rule(table.schema.topic)


def _path_error(uri: str, log_id: str | None) -> CdcError | None:
    try:
        check_path(uri, log_id)
    except (SinkUnavailable, TargetUnusable) as exc:
        return exc
    return None
