"""The catalog: definitions, commands, leases and visible state, in SQLite or Postgres.

No other package imports SQLAlchemy. This module contains the class Catalog and its small stores: applied definitions,
audit entries, and leases. Losing the catalog loses no data, because positions are in the log and in the sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from sqlalchemy import delete, select

from cdc.catalog import revision
from cdc.catalog.commands import Command, Commands, CommandState
from cdc.catalog.connection import Database, upsert
from cdc.catalog.models import AuditRow, LeaseRow, PipelineRow
from cdc.catalog.reported_state import (
    AWAITS_SPARK,
    NO_CORE,
    REFUSED,
    REPORT_MAX_AGE,
    DeadLetter,
    DeadLetterStore,
    Processes,
    ProcessReport,
    RecordedProgress,
    SinkProgress,
    Sinks,
    TableProgress,
    TableStore,
)
from cdc.catalog.verification_state import VerificationRecords
from cdc.catalog.verified_ranges import VerifiedRange, VerifiedRangeStore

__all__ = [
    "AWAITS_SPARK",
    "NO_CORE",
    "REFUSED",
    "REPORT_MAX_AGE",
    "AuditLine",
    "Catalog",
    "Command",
    "CommandState",
    "DeadLetter",
    "Pipeline",
    "ProcessReport",
    "RecordedProgress",
    "SinkProgress",
    "TableProgress",
    "VerifiedRange",
]


class Catalog:
    """One catalog database with all its stores.

    Threads of a process may share the object, and several processes may open the same database. Every failure of the
    database is raised as CatalogUnavailable.
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
        self.verification = VerificationRecords(self.commands)

    @classmethod
    def open(cls, url: str, *, migrate: bool = True, created_within: float = 0.0) -> Self:
        """Open the catalog at an SQLAlchemy URL (sqlite or postgresql+psycopg), and migrate it to the newest revision.

        If `migrate` is False, a database with an older revision raises CatalogUnavailable and stays unchanged. So does
        an empty one, unless another process creates the catalog within `created_within` seconds.
        """
        database = Database(url)
        try:
            revision.ensure(database, migrate=migrate, created_within=created_within)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline with its last applied definition."""

    name: str
    definition: str
    """The definition as JSON text, with references instead of secrets."""
    updated_at: datetime


class Pipelines:
    """The store of pipelines: the last applied definition of each."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, name: str, definition: str) -> None:
        """Store the definition of the pipeline `name`; it replaces the previous definition."""
        row = {"name": name, "definition": definition, "updated_at": datetime.now(UTC)}
        with self._database.writing() as session:
            upsert(session, PipelineRow, [row])

    def get(self, name: str) -> Pipeline | None:
        """Return the pipeline with that name; None if the catalog has none."""
        with self._database.reading() as session:
            row = session.get(PipelineRow, name)
            return None if row is None else _pipeline(row)

    def forget(self, name: str) -> None:
        """Delete the pipeline with that name; what its processes reported stays."""
        with self._database.writing() as session:
            session.execute(delete(PipelineRow).where(PipelineRow.name == name))

    def ls(self) -> list[Pipeline]:
        """Return all pipelines, sorted by name."""
        with self._database.reading() as session:
            return [_pipeline(row) for row in session.scalars(select(PipelineRow).order_by(PipelineRow.name))]


def _pipeline(row: PipelineRow) -> Pipeline:
    return Pipeline(row.name, row.definition, row.updated_at)


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One audit entry: the actor, the action, and the name of the object that the action changed (`subject`)."""

    id: int
    actor: str
    action: str
    subject: str
    detail: dict[str, Any]
    written_at: datetime


class AuditLog:
    """The store of audit entries; entries are never changed or removed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, actor: str, action: str, subject: str, detail: Mapping[str, Any] | None = None) -> None:
        """Add an entry with the present time; the detail must contain no secrets and no row values."""
        row = AuditRow(
            actor=actor, action=action, subject=subject, detail=dict(detail or {}), written_at=datetime.now(UTC)
        )
        with self._database.writing() as session:
            session.add(row)

    def ls(self, limit: int = 100) -> list[AuditLine]:
        """Return the newest `limit` audit entries, newest first."""
        with self._database.reading() as session:
            return [
                AuditLine(r.id, r.actor, r.action, r.subject, r.detail, r.written_at)
                for r in session.scalars(select(AuditRow).order_by(AuditRow.id.desc()).limit(limit))
            ]


class Leases:
    """The store of leases; a lease gives one process the right to do something alone until the lease expires.

    Leases do not protect commits: log and sinks detect a second writer at each commit. Tests set `now`, so that they
    need not wait until a lease expires.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, name: str, holder: str, seconds: float, *, now: datetime | None = None) -> bool:
        """Acquire or renew the lease; return False if another holder has a lease of this name that has not expired."""
        now = now or datetime.now(UTC)
        row = {"name": name, "holder": holder, "expires_at": now + timedelta(seconds=seconds)}
        is_free = (LeaseRow.holder == holder) | (LeaseRow.expires_at <= now)
        with self._database.writing() as session:
            upsert(session, LeaseRow, [row], only_if=is_free)
            lease = session.get(LeaseRow, name)
            return lease is not None and lease.holder == holder

    def release(self, name: str, holder: str) -> None:
        """Release the lease; do nothing if the holder does not have the lease."""
        with self._database.writing() as session:
            session.execute(delete(LeaseRow).where(LeaseRow.name == name, LeaseRow.holder == holder))

    def holder(self, name: str, *, now: datetime | None = None) -> str | None:
        """Return the present holder of the lease; None if the lease is free or expired."""
        with self._database.reading() as session:
            lease = session.get(LeaseRow, name)
            return lease.holder if lease is not None and lease.expires_at > (now or datetime.now(UTC)) else None
