"""Catalog store of the last status report of each process (reader, apply, server) of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import ProcessRow


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process at one moment."""

    pipeline: str
    process: str
    """`reader`, `apply` or `server`."""
    pid: int
    state: str
    error: dict[str, Any] | None = None
    """code, message and suggestion of what is wrong now; None if nothing is."""
    figures: list[Any] = field(default_factory=list)
    """Metrics, for the page of another process."""
    reported_at: datetime | None = None
    """Set by the store."""


class Processes:
    """The store of reports."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(self, report: ProcessReport) -> None:
        """Keep the report, with the time of now; replaces the one before."""
        row = {
            "pipeline": report.pipeline,
            "process": report.process,
            "pid": report.pid,
            "state": report.state,
            "error": report.error,
            "figures": report.figures,
            "reported_at": datetime.now(UTC),
        }
        with self._database.writing() as session:
            upsert(session, ProcessRow, [row])

    def ls(self, pipeline: str) -> list[ProcessReport]:
        """The last report of each process of the pipeline, by name of the process."""
        wanted = select(ProcessRow).where(ProcessRow.pipeline == pipeline).order_by(ProcessRow.process)
        with self._database.reading() as session:
            return [
                ProcessReport(r.pipeline, r.process, r.pid, r.state, r.error, r.figures, r.reported_at)
                for r in session.scalars(wanted)
            ]
