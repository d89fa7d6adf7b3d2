"""Definitions: YAML files that say what a pipeline watches, where its log is and what it feeds."""

from cdc.config.definition import Definition, Spark, TableRule
from cdc.config.load import CheckedDefinition, check, exposed, load, placed
from cdc.config.resolved import resolved
from cdc.config.secret import Secret
from cdc.config.sinks import (
    DeadLetterSettings,
    DeltaSinkDefinition,
    DroppedColumns,
    SchemaChanges,
    SearchSinkDefinition,
    SinkRule,
    TableSettings,
    TargetMode,
    TypeSettings,
    WriterChoice,
    rule_of,
    settings_of,
)
from cdc.config.transform import Transform

__all__ = [
    "CheckedDefinition",
    "DeadLetterSettings",
    "Definition",
    "DeltaSinkDefinition",
    "DroppedColumns",
    "SchemaChanges",
    "SearchSinkDefinition",
    "Secret",
    "SinkRule",
    "Spark",
    "TableRule",
    "TableSettings",
    "TargetMode",
    "Transform",
    "TypeSettings",
    "WriterChoice",
    "check",
    "exposed",
    "load",
    "placed",
    "resolved",
    "rule_of",
    "settings_of",
]
