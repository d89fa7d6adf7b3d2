"""Epoch tables: relation numbers and column ids of every table when a new epoch of the log begins.

Within an epoch the OID identifies a table and the attribute number a column. A restored, upgraded or failed-over source
has other numbers, so tables and columns are matched by name across epochs. Unmatched ones get numbers that were never
used. All rows are copied again in any case, so a wrong match affects only the history of a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cdc.postgres.column_identity import EPOCH_SHIFT, UNPROVED
from cdc.table import TableSchema, TableState


@dataclass(frozen=True, slots=True)
class EarlierTables:
    """Tables that the log contains when an epoch begins; by default those of an empty log."""

    epoch: int = 0
    """The epoch that begins."""
    known: Mapping[int, TableSchema] = field(default_factory=dict)
    """Relation → its latest version."""
    used: Mapping[int, int] = field(default_factory=dict)
    """Relation → the highest column id that any version of it had."""

    @classmethod
    def of(cls, epoch: int, versions: Iterable[TableSchema]) -> EarlierTables:
        """Build it from all schema versions of the log, oldest first."""
        known: dict[int, TableSchema] = {}
        used: dict[int, int] = {}
        for version in versions:
            # reinsert, so that of two tables with one name the most recent comes last
            known.pop(version.relation, None)
            known[version.relation] = version
            used[version.relation] = max([used.get(version.relation, 0), *(c.id for c in version.columns)])
        return cls(epoch, known, used)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tables to record in the log when an epoch begins."""

    copied: list[TableSchema]
    """Captured tables with their relation numbers, in the given order."""
    gone: list[TableSchema]
    """Known tables that the source no longer has; targets delete their rows."""
    left: list[TableSchema]
    """Known tables that the source has and the definition no longer captures; their rows stay, marked."""


def continue_relations(past: EarlierTables, tables: Iterable[TableSchema], existing: Collection[str]) -> Continuation:
    """Assign relation numbers to the captured tables.

    tables: tables to capture, as the catalogue shows them. existing: topics of all tables of the source.
    """
    latest = {schema.topic: schema for schema in past.known.values() if schema.state is not TableState.DROPPED}
    copied = [_numbered(past, table, latest.get(table.topic)) for table in tables]
    captured = {schema.topic for schema in copied}
    absent = [schema for topic, schema in sorted(latest.items()) if topic not in captured]
    began = f"when epoch {past.epoch} began"
    return Continuation(
        copied,
        [s.flagged(TableState.DROPPED, f"not at the source {began}") for s in absent if s.topic not in existing],
        [s.flagged(TableState.NEEDS_RESYNC, f"not captured {began}") for s in absent if s.topic in existing],
    )


def _numbered(past: EarlierTables, table: TableSchema, before: TableSchema | None) -> TableSchema:
    """The table with its earlier relation number, or with a new one of this epoch."""
    if before is None:
        return replace(table, relation=past.epoch << EPOCH_SHIFT | table.oid)
    named = {column.name: column.id for column in before.columns}
    # ids below UNPROVED could be attribute numbers of another table of this name
    fresh = max(past.used.get(before.relation, 0), UNPROVED - 1) + 1
    columns = []
    for column in table.columns:
        identifier = named.get(column.name)
        if identifier is None:
            identifier, fresh = fresh, fresh + 1
        columns.append(replace(column, id=identifier))
    return replace(table, relation=before.relation, columns=tuple(columns))
