"""Dead-letter rows: rows that a sink refused, in a Delta table next to the sink's published record.

The table is a list of entries. Each entry belongs to a batch of the sink. It parks a row, replaces a parked row, or
unparks a key. An entry is valid once the target of its table has reached the end of the batch. If the batch ends after
the position of the target, the batch was not merged, and its entries are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import pyarrow as pa
from deltalake import DeltaTable

from cdc.target_names import parked_uri
from cdc.targets.published_record import Published, TableRecord

Key = tuple[str, ...]
"""The values of the key columns as Postgres text, in key order."""
MASKED: Final = "\0"
"""First character of a text that is stored masked, as in the target; text from Postgres never contains it."""
Image = Mapping[int, str | None]
"""Column id → text as Postgres sent it; an unsent column is absent."""

PARKED_SCHEMA: Final = pa.schema(
    [
        pa.field("upto", pa.int64()),
        pa.field("relation", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("key", pa.string()),
        pa.field("parked", pa.bool_()),
        pa.field("position", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("committed_at", pa.int64()),
        pa.field("image", pa.string()),
        pa.field("complete", pa.bool_()),
        pa.field("code", pa.string()),
        pa.field("message", pa.string()),
        pa.field("attempts", pa.int64()),
        pa.field("first_at", pa.int64()),
        pa.field("changes", pa.string()),
    ]
)
"""One entry per row: `key`, `image` (column id → text) and `changes` are JSON, times are µs since 1970 UTC.

A table of an older version of cdc has no column `changes`; its next entry adds the column.
"""
_CONVERTED_FIELDS: Final = frozenset({"key", "image", "parked", "changes"})
"""Fields that are converted before they are stored."""
_LOST: Final = "the row of the dead letter is no longer stored with the sink"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedChange:
    """A change of a parked key that waits until the key can be merged.

    It can also be a truncate or the end of a full copy, because both may remove the row of the key.
    """

    op: str
    """The operation, a letter as in the log."""
    position: int
    ordinal: int
    committed_at: int
    """µs since 1970 UTC."""
    image: Image = field(default_factory=dict)
    """The row image after the change; for a delete, the columns of the old row that were sent."""
    complete: bool = True
    began: int | None = None
    """For the end of a full copy: the position at which the copy began. Rows older than this position are removed."""

    @property
    def place(self) -> tuple[int, int]:
        """Position and ordinal of the change."""
        return self.position, self.ordinal

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON fields, to be stored in an entry."""
        return asdict(self) | {"image": {str(column): text for column, text in self.image.items()}}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build a change from the fields that `to_json` returned."""
        return cls(**{**fields, "image": {int(column): text for column, text in fields["image"].items()}})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRow:
    """A parked key with its latest row.

    In a history target: a parked key with the change that the target refused, and with the later changes that wait.
    """

    relation: int
    topic: str
    """`schema.table` when the row was parked."""
    key: Key
    position: int
    ordinal: int
    """`position` and `ordinal` identify the latest change of the key; in a history target, the refused change."""
    committed_at: int
    """Commit time of the change at `position`, µs since 1970 UTC."""
    image: Image = field(default_factory=dict)
    complete: bool
    """Whether the image has every column; an incomplete row must be read again from the source."""
    code: str
    message: str
    """Message of the error for which the row was parked, without row values."""
    attempts: int = 1
    first_at: int
    """When the key was parked, µs since 1970 UTC."""
    upto: int
    """Last position of the sink's batch that wrote this state of the row."""
    changes: tuple[ParkedChange, ...] = ()
    """History targets only: the waiting changes of the key, in order."""

    @property
    def place(self) -> tuple[int, int]:
        """Position and ordinal of the latest change of the key; in a history target, of the refused change."""
        return self.position, self.ordinal

    def with_images(self, convert: Callable[[Image], Image]) -> ParkedRow:
        """Return a copy of the row in which `convert` has replaced every image."""
        changes = tuple(replace(change, image=convert(change.image)) for change in self.changes)
        return replace(self, image=convert(self.image), changes=changes)


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """One entry of the dead-letter table: it parks a row, replaces a parked row, or unparks a key."""

    row: ParkedRow
    parked: bool = True
    """False if the entry unparks the key."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a row of PARKED_SCHEMA."""
        row = self.row
        fields = {name: getattr(row, name) for name in PARKED_SCHEMA.names if name not in _CONVERTED_FIELDS}
        image = {str(column): text for column, text in row.image.items()}
        return fields | {
            "key": json.dumps(row.key, ensure_ascii=False),
            "image": json.dumps(image, ensure_ascii=False),
            "parked": self.parked,
            "changes": json.dumps([change.to_json() for change in row.changes], ensure_ascii=False),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build an entry from a row that `to_json` returned."""
        row = {name: value for name, value in fields.items() if name != "parked"}
        row["key"] = tuple(json.loads(row["key"]))
        row["image"] = {int(column): text for column, text in json.loads(row["image"]).items()}
        row["changes"] = tuple(map(ParkedChange.from_json, json.loads(row.get("changes") or "[]")))
        return cls(ParkedRow(**row), fields["parked"])


def read_entries(table: DeltaTable) -> list[DeadLetterEntry]:
    """Return all entries of a dead-letter table; entries of older batches come first."""
    entries = [DeadLetterEntry.from_json(row) for row in pa.table(table.scan()).to_pylist()]
    return sorted(entries, key=lambda entry: entry.row.upto)


def parked_at(
    entries: Iterable[DeadLetterEntry], record: Published, positions: Mapping[int, int]
) -> dict[int, dict[Key, ParkedRow]]:
    """Return the parked rows by relation and key, as they were at the position of each target.

    The published record contains the position of each target. `positions` maps a relation to the position of its target
    in two cases: a crash left the target ahead of the record, or the record does not contain the target. If the record
    names a parked key that has no entry, the key gets a row without an image.
    """
    parked: dict[int, dict[Key, ParkedRow]] = {
        relation: {key: _lost(table, key, record.position, n) for n, key in enumerate(table.parked)}
        for relation, table in record.tables.items()
    }
    for entry in entries:
        row = entry.row
        table = record.tables.get(row.relation)
        published = 0 if table is None else table.position
        rows = parked.setdefault(row.relation, {})
        if row.upto <= published:
            if entry.parked and row.key in rows:
                rows[row.key] = row
        elif row.upto <= positions.get(row.relation, 0):
            rows.pop(row.key, None)
            if entry.parked:
                rows[row.key] = row
    return {relation: rows for relation, rows in parked.items() if rows}


def _lost(table: TableRecord, key: Key, position: int, ordinal: int) -> ParkedRow:
    return ParkedRow(
        relation=table.relation, topic=table.topic, key=key, position=position, ordinal=ordinal, committed_at=0,
        complete=False, code="CDC-3002", message=_LOST, first_at=0, upto=position,
    )  # fmt: skip


def read_parked(record_uri: str, record: Published) -> list[ParkedRow]:
    """Return the parked rows of a sink at a published record; `record_uri` is the URI of its published cuts."""
    uri = parked_uri(record_uri)
    entries = read_entries(DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else []
    return [row for rows in parked_at(entries, record, {}).values() for row in rows.values()]
