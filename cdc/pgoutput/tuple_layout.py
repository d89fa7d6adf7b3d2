"""TupleLayout: how the tuples of one OID map to row images: column ids by wire index, and indices of the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc.table import TableSchema

IGNORED: Final = -1
"""Relation id of a layout whose rows are skipped."""


@dataclass(frozen=True, slots=True)
class TupleLayout:
    """One version of a relation, as far as decoding of tuples needs it."""

    oid: int
    relation: int
    topic: str
    ids: tuple[int, ...]
    """Column id by index in the tuple."""
    key: tuple[int, ...]
    """Tuple indices of the key columns, in key order; empty for a keyless table."""

    @classmethod
    def of(cls, schema: TableSchema) -> Self:
        """The layout of the tuples that pgoutput sends; raises ValueError if a key column is not sent."""
        places = {column.id: index for index, column in enumerate(schema.sent)}
        unsent = [column.name for column in schema.key if column.id not in places]
        if unsent:
            raise ValueError(f"key column of {schema.topic!r} is not sent: expected a stored one, got {unsent[0]!r}")
        key = tuple(places[column.id] for column in schema.key)
        return cls(schema.oid, schema.relation, schema.topic, tuple(places), key)

    @classmethod
    def ignored(cls, oid: int) -> Self:
        """The layout of a relation that is not captured."""
        return cls(oid, IGNORED, "", (), ())
