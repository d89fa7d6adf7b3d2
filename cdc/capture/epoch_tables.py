"""Epochs: which number and which column ids every table has when the log goes on from another life of its source.

Inside an epoch a table is its OID and a column its attribute number. Across epochs neither holds: a restored,
upgraded or failed-over source has other ones, so tables and columns are matched by name. What is not matched gets
a number that was never used, and everything is copied anew; so nothing rests on the match being right but the
history of a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cdc.postgres.column_identity import EPOCH_SHIFT, UNPROVED
from cdc.table import TableSchema, TableState


@dataclass(frozen=True, slots=True)
class EarlierTables:
    """What the log holds of its tables when an epoch begins; the default is that of an empty log."""

    epoch: int = 0
    """The one that begins."""
    known: Mapping[int, TableSchema] = field(default_factory=dict)
    """Relation → its latest version."""
    used: Mapping[int, int] = field(default_factory=dict)
    """Relation → the highest column id that any version of it had."""

    @classmethod
    def of(cls, epoch: int, versions: Iterable[TableSchema]) -> EarlierTables:
        """From every version that the log has, oldest first."""
        known: dict[int, TableSchema] = {}
        used: dict[int, int] = {}
        for version in versions:
            # the newest version comes last, so that of two tables of one name the one seen last is found
            known.pop(version.relation, None)
            known[version.relation] = version
            used[version.relation] = max([used.get(version.relation, 0), *(c.id for c in version.columns)])
        return cls(epoch, known, used)


@dataclass(frozen=True, slots=True)
class Continuation:
    """How the tables of an epoch are told to the log."""

    copied: list[TableSchema]
    """The tables of now under the log's numbers, in the order given."""
    gone: list[TableSchema]
    """Known tables that the source no longer has; their rows have to vanish."""
    left: list[TableSchema]
    """Known tables that the source has and nobody captures any more; their rows stay as they are, marked."""


def continue_relations(past: EarlierTables, tables: Iterable[TableSchema], existing: Collection[str]) -> Continuation:
    """Number the tables of now.

    `tables` are those to capture as the catalogue shows them, `existing` the topics of all tables of the source.
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
    """The table under its number of before, or a new one of this epoch."""
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
