"""Catalog store of the state of each captured table, at the source and in each sink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import delete, select

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import TableRow

REFUSED: Final = "refused"
"""State of a table at the source that a rule matches and that is not captured; the reason says why."""


@dataclass(frozen=True, slots=True)
class TableProgress:
    """One table in one sink, or at the source, at one moment."""

    sink: str
    """Empty for the source."""
    topic: str
    """`schema.table`."""
    state: str
    reason: str | None
    position: int
    version: int | None
    """Of the target, where it has versions."""
    rows: int
    recorded_at: datetime | None = None
    """Set by the store."""


class TableStore:
    """The store of progress by table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pipeline: str, tables: Iterable[TableProgress]) -> None:
        """Keep all in one transaction, with the time of now; tables not named stay as they are."""
        now = datetime.now(UTC)
        rows = [
            {
                "pipeline": pipeline,
                "sink": table.sink,
                "topic": table.topic,
                "state": table.state,
                "reason": table.reason,
                "position": int(table.position),
                "version": table.version,
                "rows": table.rows,
                "recorded_at": now,
            }
            for table in tables
        ]
        with self._database.writing() as session:
            upsert(session, TableRow, rows)

    def record_refused(self, pipeline: str, refused: Mapping[str, str]) -> None:
        """Keep which tables are refused, topic → reason, and forget those that were and are no longer."""
        known = {t.topic: t.reason for t in self.ls(pipeline) if not t.sink and t.state == REFUSED}
        if known == refused:
            return
        gone = delete(TableRow).where(
            TableRow.pipeline == pipeline, TableRow.sink == "", TableRow.topic.in_(known.keys() - refused.keys())
        )
        with self._database.writing() as session:
            session.execute(gone)
        self.record(pipeline, (TableProgress("", topic, REFUSED, why, 0, None, 0) for topic, why in refused.items()))

    def ls(self, pipeline: str) -> list[TableProgress]:
        """The last of each table, by sink and topic."""
        wanted = select(TableRow).where(TableRow.pipeline == pipeline).order_by(TableRow.sink, TableRow.topic)
        with self._database.reading() as session:
            return [
                TableProgress(r.sink, r.topic, r.state, r.reason, r.position, r.version, r.rows, r.recorded_at)
                for r in session.scalars(wanted)
            ]
