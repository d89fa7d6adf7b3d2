"""Published and TableRecord: what a sink says of itself, in the form that it is stored in.

The record is the truth about a sink: which table stands where, at which version of its target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

RECORD_FORMAT: Final = 1
"""Version of the JSON below; a newer one is refused by older readers."""


class TargetState(StrEnum):
    """How far a target is to be trusted."""

    #: Exactly at its position.
    STREAMING = "streaming"
    #: Not complete: a full copy of the table, the first one or a resync, has not ended.
    SNAPSHOTTING = "snapshotting"
    #: Complete, but not at the record's position: a crash left it ahead, or it comes from behind.
    CATCHING_UP = "catching_up"
    #: Stands still at its position; the reason stands beside it.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table in one sink."""

    relation: int
    """The log's number of the table."""
    topic: str
    """`schema.table` of now."""
    target: str
    """Path or URI of the target."""
    position: int
    """The target holds every change up to here and none after it."""
    version: int | None
    """The target's version at this position; None where the engine has none."""
    state: str
    """A TargetState."""
    reason: str | None = None
    """Why it failed, in words for an operator: code and message, no row values."""
    schema: str | None = None
    """TableSchema JSON of the version that the target follows."""
    parked: tuple[tuple[str, ...], ...] = ()
    """Every key, sorted, whose row the target could not take: it is there as it was before, or not at all."""


@dataclass(frozen=True, slots=True)
class Published:
    """One consistent cut: every table in state streaming is exactly at `position`."""

    position: int
    committed_at: int
    """Commit time of the transaction at position, µs since 1970 UTC; 0 if unknown."""
    tables: Mapping[int, TableRecord] = field(default_factory=dict)
    """By relation."""

    @property
    def versions(self) -> dict[str, int]:
        """Target → its version at this cut; of tables that share a target the newest, for it holds them all."""
        found: dict[str, int] = {}
        for table in self.tables.values():
            if table.version is not None:
                found[table.target] = max(table.version, found.get(table.target, 0))
        return found

    def to_json(self) -> str:
        """Text with sorted keys, so that equal records are equal text."""
        # not asdict, which copies every value and takes half the time of a publish of fifty tables
        tables = [
            {name: getattr(table, name) for name in TableRecord.__slots__} for _, table in sorted(self.tables.items())
        ]
        fields = {
            "format": RECORD_FORMAT,
            "position": self.position,
            "committed_at": self.committed_at,
            "tables": tables,
        }
        return json.dumps(fields, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what to_json wrote; raises ValueError for a newer format."""
        fields = json.loads(text)
        if (found := fields["format"]) != RECORD_FORMAT:
            raise ValueError(f"unknown format of a published record: expected {RECORD_FORMAT}, got {found!r}")
        tables = {entry["relation"]: _table(entry) for entry in fields["tables"]}
        return cls(fields["position"], fields["committed_at"], tables)


def _table(entry: dict[str, Any]) -> TableRecord:
    return TableRecord(**{**entry, "parked": tuple(map(tuple, entry.get("parked", ())))})
