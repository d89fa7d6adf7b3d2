"""The catalog: definitions, commands, leases and visible state, in SQLite or Postgres.

It is the only package that imports SQLAlchemy.
"""

from cdc.catalog.catalog import AuditLine, Catalog, Pipeline
from cdc.catalog.commands import Command, CommandState
from cdc.catalog.dead_letter_mirror import DeadLetter
from cdc.catalog.reported_state import AWAITS_SPARK, REFUSED, ProcessReport, SinkProgress, TableProgress
from cdc.catalog.verified_ranges import VerifiedRange

__all__ = [
    "AWAITS_SPARK",
    "REFUSED",
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
