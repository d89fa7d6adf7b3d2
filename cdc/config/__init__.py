"""Definitions: YAML files that say what a pipeline watches, where its log is and what it feeds."""

from cdc.config.definition import (
    Definition,
    DeltaSink,
    SearchSink,
    Spark,
    TableRule,
    TypePolicy,
    WriterChoice,
)
from cdc.config.load import Checked, check, load
from cdc.config.resolved import resolved
from cdc.config.secret import Secret

__all__ = [
    "Checked",
    "Definition",
    "DeltaSink",
    "SearchSink",
    "Secret",
    "Spark",
    "TableRule",
    "TypePolicy",
    "WriterChoice",
    "check",
    "load",
    "resolved",
]
