"""Catalog: the stores of one database, one attribute per noun."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from cdc.catalog import revision
from cdc.catalog.audit_log import AuditLog
from cdc.catalog.commands import Commands
from cdc.catalog.database import Database
from cdc.catalog.dead_letters import DeadLetterStore
from cdc.catalog.leases import Leases
from cdc.catalog.pipelines import Pipelines
from cdc.catalog.processes import Processes
from cdc.catalog.sinks import Sinks
from cdc.catalog.tables import TableStore
from cdc.catalog.verified_ranges import VerifiedRangeStore


class Catalog:
    """What was asked for and what a person needs to see; losing it loses no data.

    May be used by threads of a process; several processes may open the same database. Every failure of
    the database is CatalogUnavailable.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.pipelines = Pipelines(database)
        self.processes = Processes(database)
        self.sinks = Sinks(database)
        self.tables = TableStore(database)
        self.dead_letters = DeadLetterStore(database)
        self.commands = Commands(database)
        self.audit = AuditLog(database)
        self.leases = Leases(database)
        self.verified = VerifiedRangeStore(database)

    @classmethod
    def open(cls, url: str, *, migrate: bool = True) -> Self:
        """The catalog at an SQLAlchemy URL (sqlite or postgresql+psycopg), brought to the newest revision.

        Without `migrate` an older database is CatalogUnavailable instead of changed.
        """
        database = Database(url)
        try:
            revision.ensure(database, migrate=migrate)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Give all connections back."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
