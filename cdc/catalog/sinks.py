"""Catalog store of the last reported progress of each sink; the authoritative record is in the sink."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import select

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import SinkRow

AWAITS_SPARK: Final = "waits for Spark"
"""Reason of a sink that has more to apply than goes without Spark, which has not made its first batch yet."""


@dataclass(frozen=True, slots=True)
class SinkProgress:
    """One sink at one moment."""

    sink: str
    position: int
    committed_at: datetime | None
    """When the source committed the transaction at that position."""
    lag_seconds: float
    state: str
    reason: str | None = None
    recorded_at: datetime | None = None
    """Set by the store."""


class Sinks:
    """The store of progress."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pipeline: str, progress: SinkProgress) -> None:
        """Keep it, with the time of now; replaces the one before."""
        row = {
            "pipeline": pipeline,
            "sink": progress.sink,
            "position": int(progress.position),
            "committed_at": progress.committed_at,
            "lag_seconds": progress.lag_seconds,
            "state": progress.state,
            "reason": progress.reason,
            "recorded_at": datetime.now(UTC),
        }
        with self._database.writing() as session:
            upsert(session, SinkRow, [row])

    def ls(self, pipeline: str) -> list[SinkProgress]:
        """The last progress of each sink of the pipeline, by name."""
        wanted = select(SinkRow).where(SinkRow.pipeline == pipeline).order_by(SinkRow.sink)
        with self._database.reading() as session:
            return [
                SinkProgress(r.sink, r.position, r.committed_at, r.lag_seconds, r.state, r.reason, r.recorded_at)
                for r in session.scalars(wanted)
            ]
