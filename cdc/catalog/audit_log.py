"""Audit: who did what to what; lines are only added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from cdc.catalog.database import Database
from cdc.catalog.models import AuditRow


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One act."""

    id: int
    actor: str
    action: str
    subject: str
    detail: dict[str, Any]
    written_at: datetime


class AuditLog:
    """The store of lines."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, actor: str, action: str, subject: str, detail: Mapping[str, Any] | None = None) -> None:
        """Add a line, with the time of now; the detail holds no secrets and no row values."""
        row = AuditRow(
            actor=actor, action=action, subject=subject, detail=dict(detail or {}), written_at=datetime.now(UTC)
        )
        with self._database.writing() as session:
            session.add(row)

    def ls(self, limit: int = 100) -> list[AuditLine]:
        """The newest lines, newest first."""
        with self._database.reading() as session:
            return [
                AuditLine(r.id, r.actor, r.action, r.subject, r.detail, r.written_at)
                for r in session.scalars(select(AuditRow).order_by(AuditRow.id.desc()).limit(limit))
            ]
