"""Directory of the target of a table, from the paths of a Delta sink and its rules. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cdc.config.sinks import SinkRule, rule_of
from cdc.errors import TransformFailed
from cdc.naming import target_uri
from cdc.table import TableSchema


def target_path(template: str, rules: Sequence[SinkRule], schema: TableSchema) -> str:
    """URI of the target of a table; raises TransformFailed if `match` of a rule fits but its `pattern` does not."""
    rule = rule_of(schema.topic, rules)
    if rule is None or rule.path is None:
        return target_uri(template, schema.schema, schema.name)
    if rule.pattern is None:
        return target_uri(rule.path, schema.schema, schema.name)
    found = re.fullmatch(rule.pattern, schema.topic)
    groups = {} if found is None else found.groupdict()
    if found is None or not all(groups.values()):
        raise TransformFailed(f"pattern {rule.pattern!r} does not match table {schema.topic!r}, which the rule matches")
    return target_uri(rule.path, schema.schema, schema.name, groups)
