"""Dead-letter rows: rows that a sink refused, in a Delta table next to the sink's published record.

The table is a list of entries, each of the batch that made it: a row was parked, parked anew in a later state, or let
go. An entry counts once the target of its table has come to the end of that batch; one that is behind it belongs to
a batch that was never merged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import pyarrow as pa
from deltalake import DeltaTable

from cdc.stores.published import Published, TableRecord
from cdc.target_names import parked_uri, published_uri

Key = tuple[str, ...]
"""As Postgres text, in key order."""
MASKED: Final = "\0"
"""Before a text of a masked column, which is kept as the target has it; Postgres text never holds it."""
Image = Mapping[int, str | None]
"""Column id → text as Postgres sent it; what is absent was not sent."""

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
"""One entry per row: `key`, `image` (column id → text) and `changes` are JSON, times µs since 1970 UTC.

A table that was made before there were `changes` has none, and gets the column with its next entry.
"""
_TOLD: Final = frozenset({"key", "image", "parked", "changes"})
"""Fields that are not the row's own as they are."""
_LOST: Final = "its row is no longer stored next to the sink"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedChange:
    """One change of a key that waits for its turn, or what a truncate or a generation end did to the key's row."""

    op: str
    """The log's letter."""
    position: int
    ordinal: int
    committed_at: int
    """µs since 1970 UTC."""
    image: Image = field(default_factory=dict)
    """Of a delete, what was sent of the old row."""
    complete: bool = True
    began: int | None = None
    """Of a generation end: rows from below this position are gone."""

    @property
    def place(self) -> tuple[int, int]:
        """(position, ordinal)."""
        return self.position, self.ordinal

    def to_json(self) -> dict[str, Any]:
        """As an entry has it."""
        return asdict(self) | {"image": {str(column): text for column, text in self.image.items()}}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read what to_json wrote."""
        return cls(**{**fields, "image": {int(column): text for column, text in fields["image"].items()}})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRow:
    """One key that a sink could not bring to its latest state."""

    relation: int
    topic: str
    """`schema.table` when it was parked."""
    key: Key
    position: int
    ordinal: int
    """Of the latest change of the key; where every change is kept, of the one that is refused."""
    committed_at: int
    """Of that change, µs since 1970 UTC."""
    image: Image = field(default_factory=dict)
    complete: bool
    """Whether the image has every column; if not, only the source can tell the row."""
    code: str
    message: str
    """Why it was parked: an error's, without values."""
    attempts: int = 1
    first_at: int
    """When the key was parked, µs since 1970 UTC."""
    upto: int
    """The end of the batch that left it as it is."""
    changes: tuple[ParkedChange, ...] = ()
    """Of a target that keeps more than the latest state: the changes of the key that wait, in order."""

    @property
    def place(self) -> tuple[int, int]:
        """(position, ordinal)."""
        return self.position, self.ordinal

    def with_images(self, told: Callable[[Image], Image]) -> ParkedRow:
        """The same with other images."""
        changes = tuple(replace(change, image=told(change.image)) for change in self.changes)
        return replace(self, image=told(self.image), changes=changes)


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """One row of the table."""

    row: ParkedRow
    parked: bool = True
    """False: the key was let go."""

    def to_json(self) -> dict[str, Any]:
        """As PARKED_SCHEMA has it."""
        row = self.row
        fields = {name: getattr(row, name) for name in PARKED_SCHEMA.names if name not in _TOLD}
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
        said = {name: value for name, value in fields.items() if name != "parked"}
        said["key"] = tuple(json.loads(said["key"]))
        said["image"] = {int(column): text for column, text in json.loads(said["image"]).items()}
        said["changes"] = tuple(map(ParkedChange.from_json, json.loads(said.get("changes") or "[]")))
        return cls(ParkedRow(**said), fields["parked"])


def read_entries(table: DeltaTable) -> list[DeadLetterEntry]:
    """Every entry, oldest batch first."""
    entries = [DeadLetterEntry.from_json(row) for row in pa.table(table.scan()).to_pylist()]
    return sorted(entries, key=lambda entry: entry.row.upto)


def parked_at(
    entries: Iterable[DeadLetterEntry], record: Published, standing: Mapping[int, int]
) -> dict[int, dict[Key, ParkedRow]]:
    """The parked rows of every table where it stands now, by relation and key.

    standing: by relation, a target that a crash left ahead of what was published, or that was not published at all.
    A key that is listed and has no row here is one of which only the source can tell more.
    """
    held: dict[int, dict[Key, ParkedRow]] = {
        relation: {key: _lost(table, key, record.position, n) for n, key in enumerate(table.parked)}
        for relation, table in record.tables.items()
    }
    for entry in entries:
        row = entry.row
        table = record.tables.get(row.relation)
        published = 0 if table is None else table.position
        rows = held.setdefault(row.relation, {})
        if row.upto <= published:
            if entry.parked and row.key in rows:
                rows[row.key] = row
        elif row.upto <= standing.get(row.relation, 0):
            rows.pop(row.key, None)
            if entry.parked:
                rows[row.key] = row
    return {relation: rows for relation, rows in held.items() if rows}


def _lost(table: TableRecord, key: Key, position: int, ordinal: int) -> ParkedRow:
    return ParkedRow(
        relation=table.relation, topic=table.topic, key=key, position=position, ordinal=ordinal, committed_at=0,
        complete=False, code="CDC-3002", message=_LOST, first_at=0, upto=position,
    )  # fmt: skip


def read_parked(template: str, record: Published) -> list[ParkedRow]:
    """What a sink has parked at a record that it published; template: its path."""
    uri = parked_uri(published_uri(template))
    entries = read_entries(DeltaTable(uri)) if DeltaTable.is_deltatable(uri) else []
    return [row for rows in parked_at(entries, record, {}).values() for row in rows.values()]
