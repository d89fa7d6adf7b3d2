"""The published record of a sink: the sink's position, and position, version and state of each of its tables.

The record alone determines which version of each target a query reads. Delta sinks store the record in the table
`_cdc/published`, and search sinks in a document of the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, Self

RECORD_FORMAT: Final = 1
"""Version of the JSON format of a published record; a reader refuses any other version."""


class TargetState(StrEnum):
    """State of one table of a sink."""

    #: The target is at the position of the sink, so the table belongs to the published cut.
    STREAMING = "streaming"
    #: Incomplete: a full copy of the table (initial snapshot or resync) has not ended.
    SNAPSHOTTING = "snapshotting"
    #: Complete, but behind the position of the sink, or ahead of it after a crash.
    CATCHING_UP = "catching_up"
    #: Stopped at its position because of an error; the record contains the reason.
    FAILED = "failed"
    #: Final: the source dropped the table, or the pipeline captures it no longer. The target keeps the last rows.
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class TableRecord:
    """Position, Delta version and state of one table of a sink, in a published record."""

    relation: int
    """The log's number of the table."""
    topic: str
    """The current `schema.table`."""
    target: str
    """Path or URI of the target."""
    position: int
    """Position of the target, which contains every change up to this position and no later change."""
    version: int | None
    """The Delta version of the target at this position; None for a search index."""
    state: str
    """A TargetState."""
    reason: str | None = None
    """Code and message of the error that stopped the table, without row values; None without an error."""
    schema: str | None = None
    """JSON of the table's schema at this position."""
    parked: tuple[tuple[str, ...], ...] = ()
    """Sorted keys of the parked rows; for each key, the target contains an older row or no row."""
    merged: int | None = None
    """Position in the target's `txn` at this version; None if it has none, or if an older version of cdc wrote this."""

    def at(self, position: int, state: str) -> TableRecord:
        """Return the record with another position and state. Each publish calls this for every table without changes,
        and `dataclasses.replace` takes three times as long.
        """
        return TableRecord(
            self.relation,
            self.topic,
            self.target,
            position,
            self.version,
            state,
            self.reason,
            self.schema,
            self.parked,
            self.merged,
        )

    def to_json(self, *, with_schema: bool = True) -> str:
        """Return the record as JSON with sorted keys. with_schema: whether it has its schema."""
        before_position, before_schema, rest = _fixed_text(
            self.relation, self.topic, self.target, self.version, self.state, self.reason, self.parked, self.merged
        )
        schema = _quoted(self.schema) if with_schema else "null"
        return f"{before_position}{int(self.position)}{before_schema}{schema}{rest}"


_FIXED: Final = ("relation", "topic", "target", "version", "state", "reason", "parked", "merged")


@lru_cache(maxsize=1 << 15)
def _fixed_text(*values: Any) -> tuple[str, str, str]:
    """Return the JSON of a record up to its position, from there up to its schema, and after the schema.

    values: the fields _FIXED. Each publish raises the position of all tables, and changes few of these fields.
    """
    fields = dict(zip(_FIXED, values, strict=True))
    parts = [
        json.dumps({name: fields[name] for name in names}, sort_keys=True, ensure_ascii=False)[1:-1]
        for names in (("merged", "parked"), ("reason", "relation"), ("state", "target", "topic", "version"))
    ]
    return f'{{{parts[0]}, "position": ', f', {parts[1]}, "schema": ', f", {parts[2]}}}"


@lru_cache(maxsize=1 << 14)
def _quoted(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Published:
    """The record of one consistent cut: the target of each table in state `streaming` is exactly at `position`."""

    position: int
    committed_at: int
    """Commit time of the transaction at position, µs since 1970 UTC; 0 if unknown."""
    tables: Mapping[int, TableRecord] = field(default_factory=dict)
    """Relation → record of its table."""

    @property
    def versions(self) -> dict[str, int]:
        """Target → its Delta version at this cut; for a shared target, the newest version among its tables."""
        found: dict[str, int] = {}
        for table in self.tables.values():
            if table.version is not None:
                found[table.target] = max(table.version, found.get(table.target, 0))
        return found

    def to_json(self, *, with_schemas: bool = True) -> str:
        """Return the record as JSON with sorted keys, so that equal records have equal text.

        with_schemas: whether the tables have their schemas.
        """
        tables = ", ".join(table.to_json(with_schema=with_schemas) for _, table in sorted(self.tables.items()))
        return (
            f'{{"committed_at": {int(self.committed_at)}, "format": {RECORD_FORMAT}, "position": {int(self.position)}, '
            f'"tables": [{tables}]}}'
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a record from the text that `to_json` returned. Raises ValueError for another format version."""
        fields = json.loads(text)
        if (found := fields["format"]) != RECORD_FORMAT:
            raise ValueError(f"unknown format of a published record: expected {RECORD_FORMAT}, got {found!r}")
        tables = {entry["relation"]: _table(entry) for entry in fields["tables"]}
        return cls(fields["position"], fields["committed_at"], tables)


def by_topic(tables: Iterable[TableRecord]) -> dict[str, TableRecord]:
    """Return topic → record, sorted by topic. A dropped table is left out if another has its name now."""
    ordered = sorted(tables, key=lambda table: (table.topic, table.state != TargetState.DROPPED, table.relation))
    return {table.topic: table for table in ordered}


def _table(entry: dict[str, Any]) -> TableRecord:
    return TableRecord(**{**entry, "parked": tuple(map(tuple, entry.get("parked", ())))})
