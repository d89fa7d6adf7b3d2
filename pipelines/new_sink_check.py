"""Checks of a new sink against the tables that exist, before anything is written to its target.

Only sinks that have not published anything are checked. A sink that has published continues after any change of its
definition; if one of its tables cannot continue, only that table stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdc.config import Definition, DeltaSinkDefinition, Transform, issues_in_file
from cdc.config.definition_conflicts import KeyConflict, column_conflicts, with_target_columns
from cdc.config.sinks import Sink
from cdc.config.yaml_document import Key
from cdc.errors import InvalidDefinition, SinkUnavailable, TransformFailed
from cdc.log.reader import LogReader
from cdc.stores.path_ownership import is_begun
from cdc.stores.unwritable_tables import SinkTable, path_conflicts, rule_conflicts, tables_in, tables_of_sinks
from cdc.table import TableSchema
from pipelines.runtime.spark_session import SparkSettings
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.target_columns import TablePlans
from pipelines.transform.expressions import resolve_expressions
from pipelines.transform.table_transform import TableTransform, rename_columns
from pipelines.types import Policy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SessionProvider = Callable[[], "SparkSession"]
"""Function that waits for the Spark session and returns it; called only if a rule has an expression."""
_LAYOUT_CHECKS: Final = (("cluster_by", "partition_by"), ("partition_by", "cluster_by"), ("", "cluster_by"))
"""The three checks of a rule's `partition_by` and `cluster_by`: first each setting alone, then both together.

Each check is a pair: the setting that the check ignores ("" for none), and the setting that its error names.
"""


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
        new = {one.name for one in self.definition.sinks if one.name in self.sinks and _is_new(one)}
        tables = tables_in(log) if new else []
        occupied = path_conflicts(self.definition, tables, new, log.log_id)
        found = [
            *rule_conflicts(self.definition, tables, new),
            *(one for one in occupied if not isinstance(one.error, SinkUnavailable)),
            *find_unresolved_rules(tables_of_sinks(self.definition, tables, new), session),
        ]
        if found:
            raise InvalidDefinition.from_issues(issues_in_file(self.config, found))


def _is_new(sink: Sink) -> bool:
    if isinstance(sink, DeltaSinkDefinition):
        return not is_begun(sink)
    return not Path(sink.path, "meta.json").exists()


def local_settings(definition: Definition) -> SparkSettings:
    """Return settings of a local Spark session for resolving expressions; a cluster in `definition` is ignored."""
    settings = SparkSettings.of(definition, f"cdc-{definition.name}-check")
    return replace(settings, master="local[1]", download=False)


def find_unresolved_rules(tables: Iterable[SinkTable], session: SessionProvider) -> list[KeyConflict]:
    """Check those settings of the tables' rules that need Spark, such as expressions.

    Returns the settings that a sink could not apply, each with its key in the definition and its error.
    `cdc.stores.unwritable_tables` checks the other settings without Spark.
    """
    return [KeyConflict(one.key(*key), error) for one in tables for key, error in _refusals(one, session)]


def _refusals(one: SinkTable, session: SessionProvider) -> Iterator[KeyConflict]:
    rule, schema = one.rule, with_target_columns(one.schema, one.settings)
    if rule is None or any(column_conflicts(one.schema, rule, one.settings)):
        return
    policy = DeltaSettings(one.sink.name, one.sink.path, table=one.sink, rules=one.sink.rules).types_of(schema.topic)
    if rule.transform is not None and (found := list(_transform_refusals(rule.transform, schema, policy, session))):
        yield from found
        return
    for ignored, key in _LAYOUT_CHECKS if rule.partition_by or rule.cluster_by else ():
        shapes = TablePlans([rule.model_copy(update={ignored: ()} if ignored else {})])
        if rule.transform is not None and rule.transform.needs_spark:
            shapes.spark = session()
        try:
            shapes.of(schema, policy)
        except TransformFailed as exc:
            yield KeyConflict((key,), exc)
            return


def _transform_refusals(
    rule: Transform, schema: TableSchema, policy: Policy, session: SessionProvider
) -> Iterator[KeyConflict]:
    try:
        row_schema = TableTransform.of(rule, schema).row_schema(rename_columns(policy, rule.rename))
    except TransformFailed as exc:
        yield KeyConflict(("transform", "python"), exc)
        return
    single_expressions: list[tuple[Key, dict[str, Any]]] = [
        (("computed", name), {"computed": {name: sql}, "where": None}) for name, sql in rule.computed.items()
    ]
    if rule.where is not None:
        single_expressions.append((("where",), {"computed": {}}))
    for key, only in single_expressions:
        try:
            resolve_expressions(rule.model_copy(update=only), row_schema, schema.topic, session())
        except TransformFailed as exc:
            yield KeyConflict(("transform", *key), exc)
