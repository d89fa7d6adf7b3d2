"""TableSchema and Column: one version of a source table, as an `s` row of the log carries it.

Columns are known by id (the attnum at first sight), never by name: names change, and an image in
the log must stay readable after they did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final, Self

SCHEMA_FORMAT: Final = 2
"""Version of the JSON below; a newer one is refused by older readers, what an older one lacks is unknown."""

_TOPIC: Final = re.compile(r'("(?:[^"]|"")+"|[^".]+)\.("(?:[^"]|"")+"|[^".]+)', re.DOTALL)
_BARE: Final = re.compile(r'"(?:[^"]|"")+"|[^.]*', re.DOTALL)


def topic(schema: str, name: str) -> str:
    """`schema.table`; a name that holds a dot or a quote stands in quotes, so that no two tables share a topic.

    `"s.x".y` is table `y` of schema `s.x`, `s."x.y"` is table `x.y` of schema `s`.
    """
    return f"{_part(schema)}.{_part(name)}"


def parted(text: str) -> tuple[str, str]:
    """(schema, name) of a topic; the schema is empty if the text is not one."""
    found = _TOPIC.fullmatch(text)
    if found is None:
        return "", text
    schema, name = (part[1:-1].replace('""', '"') if part.startswith('"') else part for part in found.groups())
    return schema, name


def matches(topic: str, globs: Iterable[str]) -> bool:
    """Whether a glob over `schema.table` matches the topic, upper and lower case told apart."""
    return any(fnmatchcase(topic, glob) for glob in globs)


def named(topic: str, globs: Iterable[str]) -> bool:
    """The same for what a person asks for: a bare name, one without a schema, means that table in any schema."""
    found = _TOPIC.fullmatch(topic)
    name = topic if found is None else found[2]
    return any(fnmatchcase(name if _BARE.fullmatch(glob) else topic, glob) for glob in globs)


def exactly(topic: str) -> str:
    """The glob that matches one topic alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in topic)


def _part(name: str) -> str:
    if "." not in name and '"' not in name:
        return name
    return '"' + name.replace('"', '""') + '"'


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
    #: Captured; the rows from before are being copied, and a `g` will say that all of them are there.
    SNAPSHOTTING = "snapshotting"
    #: Something happened that pgoutput cannot show; the reason stands beside it.
    NEEDS_RESYNC = "needs_resync"
    #: The table no longer exists at the source.
    DROPPED = "dropped"


CAPTURED: Final = frozenset({TableState.LIVE, TableState.SNAPSHOTTING})
"""Of tables all of whose changes are in the log; their rows can be read beside the stream."""
REMOVED: Final = "no rule of the definition matches it any longer"
"""Why a table is DROPPED that is still at the source, and may still be published."""
PARTITION_OF: Final = "it is a partition now of "
"""Why a table is DROPPED whose changes come under the name of a partitioned table: how the reason begins."""
ADDED: Final = "added while the stream ran"
"""Why a table is SNAPSHOTTING that was not there when its epoch began."""


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
    default: str | None = None
    """The expression of the default, or of a generated column, as Postgres prints it."""
    labels: tuple[str, ...] = ()
    """Of an enum, a domain over one or an array of one: its labels in order."""

    def keeps_labels(self, labels: tuple[str, ...]) -> bool:
        """Whether labels were only added to its enum; else one was renamed, in every stored row."""
        rest = iter(labels)
        return not labels or all(label in rest for label in self.labels)

    @property
    def value_type(self) -> tuple[int, int]:
        """(type OID, typmod) of the stored value, looked through domains."""
        if self.base_type_oid is not None:
            return self.base_type_oid, self.base_typmod
        return self.type_oid, self.typmod


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFingerprint:
    """Marks of the catalogue that change when rows change without a word in the stream; compared, never shown."""

    persistence: str
    """`p`, or `u` if the table or a leaf of it writes no WAL."""
    file: int
    """`pg_class.relfilenode`; 0 for a partitioned table."""
    attributes: tuple[tuple[int, str], ...] = ()
    """(attnum, xmin) of the live `pg_attribute` rows without `attmissingval`, which any rewrite clears."""
    leaves: tuple[tuple[int, int], ...] = ()
    """(OID, relfilenode) of the leaves of a partitioned table, by OID."""
    links: tuple[tuple[int, str], ...] = ()
    """(OID, xmins of the `pg_inherits` rows up to this table) of the leaves, by OID; empty in older rows."""
    published: tuple[str, ...] | None = None
    """How the publication has it; None if it has not, or if nobody asked."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """What asdict and JSON made of it, back."""
        published = fields["published"]
        return cls(
            persistence=fields["persistence"],
            file=fields["file"],
            attributes=tuple((number, xmin) for number, xmin in fields["attributes"]),
            leaves=tuple((oid, file) for oid, file in fields["leaves"]),
            links=tuple((oid, xmins) for oid, xmins in fields.get("links", ())),
            published=None if published is None else tuple(published),
        )


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
    root: int | None = None
    """OID of the topmost partitioned table: its own for a root, None for an ordinary table."""
    standing: CatalogFingerprint | None = None
    """As it was when the catalogue was last looked at; None in older rows."""
    witness: str | None = None
    """The event trigger that told this version at its place in the WAL; None if it was concluded."""

    @property
    def topic(self) -> str:
        """`schema.table`, as `topic` writes it."""
        return topic(self.schema, self.name)

    @property
    def removed(self) -> bool:
        """Whether it is captured no longer because nobody asks for it: of what is still sent no row is wanted."""
        return self.state is TableState.DROPPED and self.reason == REMOVED

    @property
    def is_partition_now(self) -> bool:
        """Whether it is captured no longer because its changes come under another table's name."""
        return self.state is TableState.DROPPED and (self.reason or "").startswith(PARTITION_OF)

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
        if (found := fields.pop("format")) not in range(1, SCHEMA_FORMAT + 1):
            raise ValueError(f"unknown schema format: expected at most {SCHEMA_FORMAT}, got {found!r}")
        fields["replica_identity"] = ReplicaIdentity(fields["replica_identity"])
        fields["state"] = TableState(fields["state"])
        fields["columns"] = tuple(
            Column(**{**column, "labels": tuple(column.get("labels", ()))}) for column in fields["columns"]
        )
        if standing := fields.get("standing"):
            fields["standing"] = CatalogFingerprint.from_fields(standing)
        return cls(**fields)
