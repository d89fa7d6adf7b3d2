"""TableSchema and Column: one version of a source table, as an `s` row of the log carries it.

Columns are known by id (the attnum at first sight), never by name: names change, and an image in
the log must stay readable after they did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

SCHEMA_FORMAT: Final = 1
"""Version of the JSON below; a newer one is refused by older readers."""


class ReplicaIdentity(StrEnum):
    """What Postgres sends of the old row (`pg_class.relreplident`)."""

    #: The primary key.
    DEFAULT = "d"
    #: Nothing: updates and deletes fail on the source once the table is published.
    NOTHING = "n"
    #: The whole row.
    FULL = "f"
    #: The columns of a unique index.
    INDEX = "i"


class TableState(StrEnum):
    """What an `s` row says of its relation beside its shape."""

    #: Captured and exact.
    LIVE = "live"
    #: Something happened that pgoutput cannot show; the reason stands beside it.
    NEEDS_RESYNC = "needs_resync"
    #: The table no longer exists at the source.
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of one version of a table."""

    id: int
    """attnum at first sight; new columns of later epochs are numbered above all used."""
    name: str
    type_oid: int
    type_name: str
    """As `format_type` prints it without the modifier: `numeric`, `character varying`, `shop.mood`."""
    typmod: int = -1
    key: int | None = None
    """0-based place in the log key, None for other columns."""
    not_null: bool = False
    generated: bool = False
    """Computed by the source and not sent by pgoutput."""
    type_kind: str = "b"
    """`pg_type.typtype`: b base, c composite, d domain, e enum, r range, m multirange, p pseudo."""
    base_type_oid: int | None = None
    """Of a domain: the type below all domains; None otherwise."""
    base_typmod: int = -1
    """Of a domain: the modifier of that type."""
    missing: str | None = None
    """`attmissingval`: what rows older than ADD COLUMN … DEFAULT hold, as text."""

    @property
    def value_type(self) -> tuple[int, int]:
        """(type OID, typmod) of the stored value, looked through domains."""
        if self.base_type_oid is not None:
            return self.base_type_oid, self.base_typmod
        return self.type_oid, self.typmod


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """One version of one source table; equal versions are equal objects."""

    relation: int
    """The log's own number: epoch of first sight << 32 | OID at first sight."""
    oid: int
    """OID of now; equals the low half of relation inside the first epoch."""
    schema: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    """Live columns in attnum order, generated ones included."""
    state: TableState = TableState.LIVE
    reason: str | None = None
    """Why the state is not LIVE, in words for an operator."""

    @property
    def topic(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.name}"

    @property
    def key(self) -> tuple[Column, ...]:
        """The columns of the log key in key order; empty for a keyless table."""
        return tuple(sorted((c for c in self.columns if c.key is not None), key=lambda c: c.key or 0))

    @property
    def sent(self) -> tuple[Column, ...]:
        """The columns that pgoutput sends, in the order it sends them."""
        return tuple(c for c in self.columns if not c.generated)

    def column(self, name: str) -> Column | None:
        """The live column of that name, if there is one."""
        return next((c for c in self.columns if c.name == name), None)

    def flagged(self, state: TableState, reason: str) -> Self:
        """This version, marked."""
        return replace(self, state=state, reason=reason)

    def to_json(self) -> bytes:
        """The payload of an `s` row: UTF-8 JSON with sorted keys, so that equal versions are equal bytes."""
        return json.dumps({"format": SCHEMA_FORMAT, **asdict(self)}, sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, payload: bytes | str) -> Self:
        """Read what to_json wrote; raises ValueError for a newer format."""
        return cls._from_fields(json.loads(payload))

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        fields = dict(fields)
        if (found := fields.pop("format")) != SCHEMA_FORMAT:
            raise ValueError(f"unknown schema format: expected {SCHEMA_FORMAT}, got {found!r}")
        fields["replica_identity"] = ReplicaIdentity(fields["replica_identity"])
        fields["state"] = TableState(fields["state"])
        fields["columns"] = tuple(Column(**column) for column in fields["columns"])
        return cls(**fields)
