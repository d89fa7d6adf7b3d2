"""Catalog store of pipelines with their last applied definitions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import PipelineRow


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A name and the text of its definition, with references where secrets are."""

    name: str
    definition: str
    updated_at: datetime


class Pipelines:
    """The store of pipelines."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, name: str, definition: str) -> None:
        """Keep the definition; replaces the one before."""
        row = {"name": name, "definition": definition, "updated_at": datetime.now(UTC)}
        with self._database.writing() as session:
            upsert(session, PipelineRow, [row])

    def get(self, name: str) -> Pipeline | None:
        """The pipeline of that name, if there is one."""
        with self._database.reading() as session:
            row = session.get(PipelineRow, name)
            return None if row is None else _pipeline(row)

    def ls(self) -> list[Pipeline]:
        """All of them, by name."""
        with self._database.reading() as session:
            return [_pipeline(row) for row in session.scalars(select(PipelineRow).order_by(PipelineRow.name))]


def _pipeline(row: PipelineRow) -> Pipeline:
    return Pipeline(row.name, row.definition, row.updated_at)
