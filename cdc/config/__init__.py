"""Definition files: YAML that describes the source, the log and the sinks of a pipeline."""

from cdc.config.definition import Definition, EngineChoice, Spark, TableRule
from cdc.config.definition_file import (
    CheckedDefinition,
    check_definition,
    issues_in_file,
    load_definition,
    printable_definition,
    unprotected_service,
)
from cdc.config.secret import Secret
from cdc.config.sinks import (
    DeadLetterSettings,
    DeltaSinkDefinition,
    DroppedColumns,
    SchemaChanges,
    SearchRule,
    SearchSettings,
    SearchSinkDefinition,
    SinkRule,
    TableSettings,
    TargetMode,
    TypeSettings,
    WriterChoice,
    rule_of,
    search_settings,
    table_settings,
)
from cdc.config.transform import Transform

__all__ = [
    "CheckedDefinition",
    "DeadLetterSettings",
    "Definition",
    "DeltaSinkDefinition",
    "DroppedColumns",
    "EngineChoice",
    "SchemaChanges",
    "SearchRule",
    "SearchSettings",
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
    "check_definition",
    "issues_in_file",
    "load_definition",
    "printable_definition",
    "rule_of",
    "search_settings",
    "table_settings",
    "unprotected_service",
]
