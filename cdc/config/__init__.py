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
from cdc.config.delta_sink import (
    DeltaSinkDefinition,
    DroppedColumns,
    SchemaChanges,
    SinkRule,
    TableSettings,
    TargetMode,
    TypeSettings,
    WriterChoice,
    table_settings,
)
from cdc.config.search_sink import SearchRule, SearchSettings, SearchSinkDefinition, search_settings
from cdc.config.secret import Secret
from cdc.config.sink_rules import DeadLetterSettings, rule_of
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
