"""DeadLetters: the mirror of what sinks set aside; the letters themselves stand beside each sink."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import delete, select

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import DeadLetterRow


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One change that a sink could not take."""

    sink: str
    topic: str
    key: tuple[str | None, ...]
    """As Postgres text; empty for a keyless table."""
    position: int
    ordinal: int
    code: str
    message: str
    added_at: datetime | None = None
    """Set by the store."""


class DeadLetters:
    """The store of letters."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, pipeline: str, letters: Iterable[DeadLetter]) -> None:
        """Keep all in one transaction; a letter of the same place in the same sink is replaced."""
        now = datetime.now(UTC)
        rows = [
            {
                "pipeline": pipeline,
                "sink": letter.sink,
                "position": int(letter.position),
                "ordinal": letter.ordinal,
                "topic": letter.topic,
                "key": list(letter.key),
                "code": letter.code,
                "message": letter.message,
                "added_at": now,
            }
            for letter in letters
        ]
        with self._database.writing() as session:
            upsert(session, DeadLetterRow, rows)

    def ls(self, pipeline: str, limit: int = 1000) -> list[DeadLetter]:
        """The oldest letters of the pipeline, in order of position."""
        row = DeadLetterRow
        wanted = select(row).where(row.pipeline == pipeline).order_by(row.position, row.ordinal, row.sink)
        with self._database.reading() as session:
            return [
                DeadLetter(r.sink, r.topic, tuple(r.key), r.position, r.ordinal, r.code, r.message, r.added_at)
                for r in session.scalars(wanted.limit(limit))
            ]

    def remove(self, pipeline: str, sink: str, position: int, ordinal: int) -> None:
        """Forget a letter that was delivered or given up."""
        row = DeadLetterRow
        place = (row.pipeline == pipeline, row.sink == sink, row.position == int(position), row.ordinal == ordinal)
        with self._database.writing() as session:
            session.execute(delete(row).where(*place))
