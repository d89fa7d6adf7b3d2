"""The catalog: intent and visible state, in SQLite or Postgres; the only package that imports SQLAlchemy."""

from cdc.catalog.audit_log import AuditLine
from cdc.catalog.catalog import Catalog
from cdc.catalog.commands import Command, CommandState
from cdc.catalog.dead_letters import DeadLetter
from cdc.catalog.pipelines import Pipeline
from cdc.catalog.processes import ProcessReport
from cdc.catalog.sinks import AWAITS_SPARK, SinkProgress
from cdc.catalog.tables import TableProgress
from cdc.catalog.verified_ranges import VerifiedRange

__all__ = [
    "AWAITS_SPARK",
    "AuditLine",
    "Catalog",
    "Command",
    "CommandState",
    "DeadLetter",
    "Pipeline",
    "ProcessReport",
    "SinkProgress",
    "TableProgress",
    "VerifiedRange",
]
