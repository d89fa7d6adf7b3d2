"""Dead-letter rows: rows that a sink refused, in a Delta table next to the sink's published record.

The table is a list of entries. Each entry belongs to a batch and parks a row, replaces a parked row, or unparks a key.
An entry counts once the target of its table has reached the end of the batch. An entry after that position belongs to
a batch that was never merged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import pyarrow as pa
from deltalake import DeltaTable

from cdc.stores.published_record import Published, TableRecord
from cdc.target_names import parked_uri, published_uri

Key = tuple[str, ...]
"""The values of the key columns as Postgres text, in key order."""
MASKED: Final = "\0"
"""First character of a masked text, which is stored as in the target; Postgres text never contains it."""
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

An older table has no column `changes`; it gets the column with its next entry.
"""
_CONVERTED_FIELDS: Final = frozenset({"key", "image", "parked", "changes"})
"""Fields that are converted before they are stored."""
_LOST: Final = "the row of the dead letter is no longer stored with the sink"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedChange:
    """One change of a parked key that is not merged yet, or a truncate or end of a full copy that removes its row."""

    op: str
    """The operation, a letter as in the log."""
    position: int
    ordinal: int
    committed_at: int
    """µs since 1970 UTC."""
    image: Image = field(default_factory=dict)
    """For a delete: the columns of the old row that were sent."""
    complete: bool = True
    began: int | None = None
    """For the end of a full copy: the position at which the copy began; it removes older rows."""

    @property
    def place(self) -> tuple[int, int]:
        """(position, ordinal)."""
        return self.position, self.ordinal

    def to_json(self) -> dict[str, Any]:
        """The change as JSON fields of an entry."""
        return asdict(self) | {"image": {str(column): text for column, text in self.image.items()}}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read what to_json wrote."""
        return cls(**{**fields, "image": {int(column): text for column, text in fields["image"].items()}})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRow:
    """A key whose row the target refused, with the refused change or the changes that wait."""

    relation: int
    topic: str
    """`schema.table` when it was parked."""
    key: Key
    position: int
    ordinal: int
    """Position of the latest change of the key; in a history target, of the refused change."""
    committed_at: int
    """Commit time of that change, µs since 1970 UTC."""
    image: Image = field(default_factory=dict)
    complete: bool
    """Whether the image has every column; if not, only the source has the complete row."""
    code: str
    message: str
    """Message of the error for which it was parked, without row values."""
    attempts: int = 1
    first_at: int
    """When the key was parked, µs since 1970 UTC."""
    upto: int
    """End of the batch that wrote this state of the row."""
    changes: tuple[ParkedChange, ...] = ()
    """History targets only: the waiting changes of the key, in order."""

    @property
    def place(self) -> tuple[int, int]:
        """(position, ordinal)."""
        return self.position, self.ordinal

    def with_images(self, convert: Callable[[Image], Image]) -> ParkedRow:
        """The same row with converted images."""
        changes = tuple(replace(change, image=convert(change.image)) for change in self.changes)
        return replace(self, image=convert(self.image), changes=changes)


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """One entry of the dead-letter table: it parks a row, replaces a parked row, or unparks a key."""

    row: ParkedRow
    parked: bool = True
    """False: the key was unparked."""

    def to_json(self) -> dict[str, Any]:
        """The entry as a row of PARKED_SCHEMA."""
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
        """Read what to_json wrote."""
        row = {name: value for name, value in fields.items() if name != "parked"}
        row["key"] = tuple(json.loads(row["key"]))
        row["image"] = {int(column): text for column, text in json.loads(row["image"]).items()}
        row["changes"] = tuple(map(ParkedChange.from_json, json.loads(row.get("changes") or "[]")))
        return cls(ParkedRow(**row), fields["parked"])


def read_entries(table: DeltaTable) -> list[DeadLetterEntry]:
    """Read every entry of a dead-letter table, those of the oldest batch first."""
    entries = [DeadLetterEntry.from_json(row) for row in pa.table(table.scan()).to_pylist()]
    return sorted(entries, key=lambda entry: entry.row.upto)


def parked_at(
    entries: Iterable[DeadLetterEntry], record: Published, positions: Mapping[int, int]
) -> dict[int, dict[Key, ParkedRow]]:
    """The parked rows of every table at the position of its target, by relation and key.

    positions: by relation, the position of a target that a crash left ahead of the published record, or that was never
    published. A key that the record lists and that has no entry gets a row without an image.
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


def read_parked(template: str, record: Published) -> list[ParkedRow]:
    """The rows that a sink has parked at a published record; template: the path template of the sink."""
    uri = parked_uri(published_uri(template))
    entries = read_entries(DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else []
    return [row for rows in parked_at(entries, record, {}).values() for row in rows.values()]
