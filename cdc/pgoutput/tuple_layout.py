"""Layout: how the tuples of one OID become images: column ids by wire place, and the key's places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc.table import TableSchema

IGNORED: Final = -1
"""The relation of a layout whose rows are skipped."""


@dataclass(frozen=True, slots=True)
class TupleLayout:
    """One version of a relation, as far as its tuples need it."""

    oid: int
    relation: int
    topic: str
    ids: tuple[int, ...]
    """Column id by wire place."""
    key: tuple[int, ...]
    """Wire places in key order; empty for a keyless table."""

    @classmethod
    def of(cls, schema: TableSchema) -> Self:
        """The layout of what pgoutput sends of this version; raises ValueError if a key column is not sent."""
        places = {column.id: place for place, column in enumerate(schema.sent)}
        unsent = [column.name for column in schema.key if column.id not in places]
        if unsent:
            raise ValueError(f"key column of {schema.topic!r} is not sent: expected a stored one, got {unsent[0]!r}")
        key = tuple(places[column.id] for column in schema.key)
        return cls(schema.oid, schema.relation, schema.topic, tuple(places), key)

    @classmethod
    def ignored(cls, oid: int) -> Self:
        """The layout of a relation that nobody asked for."""
        return cls(oid, IGNORED, "", (), ())
