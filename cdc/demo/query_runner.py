"""Runs SQL queries on the demo's Delta sinks, as `cdc query` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdc.catalog import Catalog
from cdc.demo.pipeline_observer import PIPELINE
from cdc.demo.workspace import Workspace
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.targets.lake_reader import Lake, ReadAt
from cdc.targets.published_record import Published


@dataclass(frozen=True, slots=True)
class LakeQueries:
    """SQL queries on one Delta sink of the demo."""

    workspace: Workspace
    name: str
    pipeline: str = PIPELINE
    """The pipeline in whose definition the sink is."""

    @property
    def lake(self) -> Lake:
        """Return the sink's tables, opened for queries."""
        return Lake.open(f"{self.workspace.state}/{self.name}/{{schema}}/{{table}}")

    def rows(self, sql: str, at: Published | Position | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT at the cut `at`; None means the newest cut. Raises the errors of Lake.query."""
        found = self.lake.query(sql, ReadAt.PUBLISHED if at is None else at).read_all()
        return [tuple(row.values()) for row in found.to_pylist()]

    def columns(self, table: str, at: Published | None = None) -> list[str]:
        """Return the names of a table's columns at the cut `at`; None means the newest cut."""
        return list(
            self.lake.query(f"SELECT * FROM {table} LIMIT 0", ReadAt.PUBLISHED if at is None else at).schema.names
        )

    def has_reached(self, catalog: Catalog, lsn: Lsn) -> bool:
        """Return True if the sink has applied all transactions that committed up to the LSN."""
        position = next((sink.position for sink in catalog.sinks.ls(self.pipeline) if sink.sink == self.name), 0)
        return Position(position).lsn >= lsn
