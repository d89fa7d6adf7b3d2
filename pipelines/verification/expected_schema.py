"""Likeness: what the target of a table should be like by the definition: which columns, under which names, hidden how.

What the definition keeps from a target on purpose is not missed there. What only Spark or a stranger's function can
tell of a row is not compared, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition, Transform, rule_of, table_settings
from cdc.config.sinks import SchemaChanges, TableSettings
from cdc.errors import TransformFailed
from cdc.table import TableSchema
from pipelines.transform.table_transform import TableTransform

Masking = Callable[[pa.Array], pa.Array]
"""Text to text of the same length."""
_FILTERED: Final = "rows are filtered by an expression of Spark SQL, which verify does not evaluate"


@dataclass(frozen=True, slots=True)
class ExpectedSchema:
    """One table's."""

    schema: TableSchema
    """Of the source."""
    names: Mapping[int, str]
    """Column id → its name in the target, as a column of the source would be called; columns left out are not there."""
    masks: Mapping[int, Masking] = field(default_factory=dict)
    """By column id."""
    refusal: str | None = None
    """Why rows cannot be compared at all."""
    untold: str | None = None
    """What of the target is not compared."""
    may_lack: bool = False
    """Whether the target need not have columns that were added."""

    @property
    def key(self) -> list[str]:
        """Names of the key's columns in the target."""
        return [self.names[column.id] for column in self.schema.key if column.id in self.names]

    @classmethod
    def of(cls, sink: DeltaSinkDefinition | SearchSinkDefinition, schema: TableSchema) -> ExpectedSchema:
        """By what the definition says of the table."""
        if isinstance(sink, SearchSinkDefinition):
            return cls(schema, {column.id: column.name for column in schema.sent})
        settings, rule = table_settings(schema.topic, sink, sink.rules), rule_of(schema.topic, sink.rules)
        wanted = {column.id: column.name for column in schema.sent if _is_wanted(column.name, settings)}
        may_lack = settings.schema_changes is SchemaChanges.IGNORE
        if rule is None or rule.transform is None:
            return cls(schema, wanted, may_lack=may_lack)
        try:
            made = TableTransform.of(rule.transform, schema)
        except TransformFailed as exc:
            return cls(schema, wanted, refusal=exc.message)
        names = {column.id: column.name for column in made.schema.sent if column.id in wanted}
        return cls(
            schema,
            names,
            made.masks,
            refusal=_refusal(rule.transform),
            untold=_untold(rule.transform),
            may_lack=may_lack,
        )


def _is_wanted(name: str, settings: TableSettings) -> bool:
    listed = not settings.column_list or name in settings.column_list
    return listed and name not in settings.except_column_list


def _refusal(rule: Transform) -> str | None:
    if rule.python is not None:
        return f"rows pass through {rule.python!r}, which can change any column but the key"
    return None if rule.where is None else _FILTERED


def _untold(rule: Transform) -> str | None:
    return f"computed columns are not compared: {sorted(rule.computed)!r}" if rule.computed else None
