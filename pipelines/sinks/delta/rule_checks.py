"""Checks of the rules of a Delta sink that need Spark or the columns of the target, such as those of expressions.

`cdc.targets.unwritable_tables` checks the other settings without Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from cdc.config import Transform
from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.config.sink_rules import KeyConflict
from cdc.config.yaml_document import Key
from cdc.errors import TransformFailed
from cdc.table import TableSchema
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.target_columns import TablePlans
from pipelines.sinks.sink_kind import SessionProvider
from pipelines.transform.expressions import resolve_expressions
from pipelines.transform.table_transform import TableTransform, rename_columns
from pipelines.types import Policy

_LAYOUT_CHECKS: Final = (("cluster_by", "partition_by"), ("partition_by", "cluster_by"), ("", "cluster_by"))
"""The three checks of a rule's `partition_by` and `cluster_by`: first each setting alone, then both together.

Each check is a pair: the setting that the check ignores ("" for none), and the setting that its error names.
"""


def rule_refusals(sink: DeltaSinkDefinition, table: TableSchema, session: SessionProvider) -> Iterator[KeyConflict]:
    """Yield the settings of the rule of a table that the sink could not apply."""
    rule, schema = sink.rule(table.topic), sink.selected_columns(table)
    if rule is None or any(sink.column_conflicts(table)):
        return
    policy = DeltaSettings(sink.name, sink.path, table=sink, rules=sink.rules).types_of(schema.topic)
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
