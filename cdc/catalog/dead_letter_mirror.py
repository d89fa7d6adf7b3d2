"""Copy in the catalog of the sinks' dead letters; the originals are stored with each sink."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b

from sqlalchemy import delete, select

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import DeadLetterRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One key whose latest state a sink refused."""

    sink: str
    topic: str
    key: tuple[str, ...]
    """The values of the key's columns as Postgres text."""
    position: int
    ordinal: int
    """Ordinal of the latest change of the key, as `position` is its position."""
    code: str
    message: str
    added_at: datetime
    """When the key was first parked."""

    @property
    def id(self) -> str:
        """A short identifier, which stays the same while the key is parked."""
        return blake2b(json.dumps([self.sink, self.topic, *self.key]).encode(), digest_size=6).hexdigest()


class DeadLetterStore:
    """The store of dead letters."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def mirror(self, pipeline: str, sink: str, letters: Iterable[DeadLetter]) -> None:
        """Replace the dead letters of a sink with these, in one transaction."""
        row = DeadLetterRow
        rows = [
            {
                "pipeline": pipeline,
                "sink": sink,
                "position": int(letter.position),
                "ordinal": letter.ordinal,
                "topic": letter.topic,
                "key": list(letter.key),
                "code": letter.code,
                "message": letter.message,
                "added_at": letter.added_at,
            }
            for letter in letters
        ]
        with self._database.writing() as session:
            session.execute(delete(row).where(row.pipeline == pipeline, row.sink == sink))
            upsert(session, row, rows)

    def ls(self, pipeline: str, limit: int | None = None) -> list[DeadLetter]:
        """The oldest dead letters of the pipeline, in order of position; all without a limit."""
        row = DeadLetterRow
        query = select(row).where(row.pipeline == pipeline).order_by(row.position, row.ordinal, row.sink)
        with self._database.reading() as session:
            return [
                DeadLetter(
                    sink=r.sink,
                    topic=r.topic,
                    key=tuple(r.key),
                    position=r.position,
                    ordinal=r.ordinal,
                    code=r.code,
                    message=r.message,
                    added_at=r.added_at,
                )
                for r in session.scalars(query.limit(limit))
            ]
