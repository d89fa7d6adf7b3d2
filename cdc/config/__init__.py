"""Definitions: YAML files that say what a pipeline watches, where its log is and what it feeds."""

from cdc.config.definition import Definition, Spark, TableRule
from cdc.config.load import Checked, check, exposed, load, placed
from cdc.config.resolved import resolved
from cdc.config.secret import Secret
from cdc.config.sinks import (
    DeadLetters,
    DeltaSink,
    DroppedColumns,
    Mode,
    SchemaChanges,
    SearchSink,
    SinkRule,
    TableSettings,
    TypePolicy,
    WriterChoice,
    rule_of,
    settings_of,
)
from cdc.config.transform import Transform

__all__ = [
    "Checked",
    "DeadLetters",
    "Definition",
    "DeltaSink",
    "DroppedColumns",
    "Mode",
    "SchemaChanges",
    "SearchSink",
    "Secret",
    "SinkRule",
    "Spark",
    "TableRule",
    "TableSettings",
    "Transform",
    "TypePolicy",
    "WriterChoice",
    "check",
    "exposed",
    "load",
    "placed",
    "resolved",
    "rule_of",
    "settings_of",
]
