"""Checks of a new sink against the tables that exist, before anything is written to its target.

Only sinks that have not published anything are checked. A sink that has published continues after any change of its
definition; if one of its tables cannot continue, only that table stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cdc.config import Definition, issues_in_file
from cdc.config.sink_rules import KeyConflict
from cdc.errors import InvalidDefinition, SinkUnavailable
from cdc.log.reader import LogReader
from cdc.targets.sink_kinds import reading_of
from cdc.targets.unwritable_tables import SinkTable, path_conflicts, rule_conflicts, tables_in, tables_of_sinks
from pipelines.runtime.spark_session import SparkSettings
from pipelines.sink_kinds import kind_of
from pipelines.sinks.sink_kind import SessionProvider


@dataclass(frozen=True, slots=True)
class NewSinkCheck:
    """The check of those sinks of an apply process that have not published anything."""

    definition: Definition
    """The complete definition, also with other sinks: an error names the path of its key from the definition's root."""
    config: Path
    """Path of the definition file."""
    sinks: Collection[str]
    """Names of the sinks that the process fills."""

    def check(self, log: LogReader, session: SessionProvider) -> None:
        """Raise one InvalidDefinition with all errors of the sinks that have not published anything."""
        new = {
            sink.name
            for sink in self.definition.sinks
            if sink.name in self.sinks and not reading_of(sink).is_begun(sink)
        }
        tables = tables_in(log) if new else []
        occupied = path_conflicts(self.definition, tables, new, log.log_id)
        conflicts = [
            *rule_conflicts(self.definition, tables, new),
            *(conflict for conflict in occupied if not isinstance(conflict.error, SinkUnavailable)),
            *find_unresolved_rules(tables_of_sinks(self.definition, tables, new), session),
        ]
        if conflicts:
            raise InvalidDefinition.from_issues(issues_in_file(self.config, conflicts))


def local_settings(definition: Definition) -> SparkSettings:
    """Return settings of a local Spark session for resolving expressions; a cluster in `definition` is ignored."""
    settings = SparkSettings.of(definition, f"cdc-{definition.name}-check")
    return replace(settings, master="local[1]", download=False)


def find_unresolved_rules(tables: Iterable[SinkTable], session: SessionProvider) -> list[KeyConflict]:
    """Check those settings of the tables' rules that need Spark, such as expressions.

    Returns the settings that a sink could not apply, each with its key in the definition and its error.
    `cdc.targets.unwritable_tables` checks the other settings without Spark.
    """
    return [
        KeyConflict(table.key(*key), error)
        for table in tables
        for key, error in kind_of(table.sink).rule_refusals(table.sink, table.schema, session)
    ]
