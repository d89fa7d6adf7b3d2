"""Checking: a definition's sinks held against the tables there are, before anything is written to a target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdc.config import Definition, DeltaSinkDefinition, Transform, issues_in_file
from cdc.config.column_checks import ColumnMismatch, column_mismatches, with_target_columns
from cdc.config.sinks import Sink
from cdc.config.yaml_document import Key
from cdc.errors import InvalidDefinition, SinkUnavailable, TransformFailed
from cdc.log.reader import LogReader
from cdc.stores.path_ownership import is_begun
from cdc.stores.sink_preflight import SinkTables, fed, tables_in, taken
from cdc.stores.sink_preflight import misfits as misfits_of
from cdc.table import TableSchema
from pipelines.runtime.session import SparkSettings
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.table_plan import TablePlans
from pipelines.transform.expressions import resolved
from pipelines.transform.table_transform import TableTransform, renamed
from pipelines.types import Policy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SessionProvider = Callable[[], "SparkSession"]
"""Gives a session, which is waited for where there is an expression and nowhere else."""
_ORDERS: Final = (("cluster_by", "partition_by"), ("partition_by", "cluster_by"), ("", "cluster_by"))
"""(key that is left aside, key that is then at fault): each by itself first, then both."""


@dataclass(frozen=True, slots=True)
class NewSinkCheck:
    """The sinks of a process that may begin some of them."""

    definition: Definition
    """All of it: places in the file go by it."""
    config: Path
    """The file."""
    sinks: Collection[str]
    """Names of those that are the process' own."""

    def check(self, log: LogReader, session: SessionProvider) -> None:
        """Raise InvalidDefinition for what is wrong with a Delta sink that has not published anything yet.

        One that has goes on whatever came since, and a table that cannot go on with it stops alone.
        """
        new = {one.name for one in self.definition.sinks if one.name in self.sinks and _is_new(one)}
        tables = tables_in(log) if new else []
        places = taken(self.definition, tables, new, log.log_id)
        found = [
            *misfits_of(self.definition, tables, new),
            *(one for one in places if not isinstance(one.error, SinkUnavailable)),
            *find_unresolved_rules(fed(self.definition, tables, new), session),
        ]
        if found:
            raise InvalidDefinition.from_issues(issues_in_file(self.config, found))


def _is_new(sink: Sink) -> bool:
    return isinstance(sink, DeltaSinkDefinition) and not is_begun(sink.path)


def local_settings(definition: Definition) -> SparkSettings:
    """Of a session that looks and moves nothing: in this process, whatever cluster the definition names."""
    settings = SparkSettings.of(definition, f"cdc-{definition.name}-check")
    return replace(settings, master="local[1]", download=False)


def find_unresolved_rules(tables: Iterable[SinkTables], session: SessionProvider) -> list[ColumnMismatch]:
    """What of the tables' rules a sink could not carry out, without what cdc.stores.sink_preflight finds."""
    return [ColumnMismatch(one.key(*key), error) for one in tables for key, error in _refusals(one, session)]


def _refusals(one: SinkTables, session: SessionProvider) -> Iterator[ColumnMismatch]:
    rule, schema = one.rule, with_target_columns(one.schema, one.settings)
    if rule is None or any(column_mismatches(one.schema, rule, one.settings)):
        return
    policy = DeltaSettings(one.sink.name, one.sink.path, table=one.sink, rules=one.sink.rules).types_of(schema.topic)
    if rule.transform is not None and (found := list(_of_transform(rule.transform, schema, policy, session))):
        yield from found
        return
    for aside, key in _ORDERS if rule.partition_by or rule.cluster_by else ():
        shapes = TablePlans([rule.model_copy(update={aside: ()} if aside else {})])
        if rule.transform is not None and rule.transform.needs_spark:
            shapes.spark = session()
        try:
            shapes.of(schema, policy)
        except TransformFailed as exc:
            yield ColumnMismatch((key,), exc)
            return


def _of_transform(
    rule: Transform, schema: TableSchema, policy: Policy, session: SessionProvider
) -> Iterator[ColumnMismatch]:
    try:
        held = TableTransform.of(rule, schema).held(renamed(policy, rule.rename))
    except TransformFailed as exc:
        yield ColumnMismatch(("transform", "python"), exc)
        return
    alone: list[tuple[Key, dict[str, Any]]] = [
        (("computed", name), {"computed": {name: sql}, "where": None}) for name, sql in rule.computed.items()
    ]
    if rule.where is not None:
        alone.append((("where",), {"computed": {}}))
    for key, only in alone:
        try:
            resolved(rule.model_copy(update=only), held, schema.topic, session())
        except TransformFailed as exc:
            yield ColumnMismatch(("transform", *key), exc)
