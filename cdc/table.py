"""Schema of a source table: one version of its columns, key and state, stored as an `s` row of the log.

A column is identified by its id, never by its name, because row images in the log must stay readable after a column is
renamed. The id is the column's attnum at the time when the reader first saw the column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, Self

SCHEMA_FORMAT: Final = 3
"""Version of the JSON format of a schema. Readers reject a newer version; an older one gets defaults for new fields."""

UNPROVED: Final = 1601
"""First column id for columns whose attribute number is not proved; attribute numbers end at 1,600."""

_TOPIC: Final = re.compile(r'("(?:[^"]|"")+"|[^".]+)\.("(?:[^"]|"")+"|[^".]+)', re.DOTALL)
_BARE: Final = re.compile(r'"(?:[^"]|"")+"|[^.]*', re.DOTALL)


def topic(schema: str, name: str) -> str:
    """Return the topic `schema.table`; different tables have different topics.

    A schema or table name that contains a dot or a quote is quoted in the topic. For example, `"s.x".y` is table `y` of
    schema `s.x`, and `s."x.y"` is table `x.y` of schema `s`.
    """
    return f"{_part(schema)}.{_part(name)}"


def split_topic(text: str) -> tuple[str, str]:
    """Return schema and table name of a topic; if the text is not a topic, return "" and the text."""
    found = _TOPIC.fullmatch(text)
    if found is None:
        return "", text
    schema, name = (part[1:-1].replace('""', '"') if part.startswith('"') else part for part in found.groups())
    return schema, name


def matches(topic: str, globs: Iterable[str]) -> bool:
    """Return True if at least one of the globs matches the whole topic `schema.table`; case-sensitive."""
    return any(fnmatchcase(topic, glob) for glob in globs)


def matches_name(topic: str, globs: Iterable[str]) -> bool:
    """Return True if at least one of the globs, which a person typed, matches the topic; case-sensitive.

    A glob without a schema is compared with the table name alone, so it matches tables of every schema.
    """
    found = _TOPIC.fullmatch(topic)
    name = topic if found is None else found[2]
    return any(fnmatchcase(name if _BARE.fullmatch(glob) else topic, glob) for glob in globs)


def exact_glob(topic: str) -> str:
    """Return a glob that matches this topic and no other topic."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in topic)


def _part(name: str) -> str:
    if "." not in name and '"' not in name:
        return name
    return '"' + name.replace('"', '""') + '"'


class ReplicaIdentity(StrEnum):
    """Columns of the old row that Postgres sends (`pg_class.relreplident`)."""

    #: The primary key.
    DEFAULT = "d"
    #: No columns: updates and deletes fail at the source once the table is published.
    NOTHING = "n"
    #: The whole row.
    FULL = "f"
    #: The columns of a unique index.
    INDEX = "i"


class TableState(StrEnum):
    """State of a table in an `s` row."""

    #: Captured; the log has every change of the table.
    LIVE = "live"
    #: Captured, and its existing rows are being copied; a `g` row marks the end of the copy.
    SNAPSHOTTING = "snapshotting"
    #: Captured, but the log misses changes, for example one that pgoutput does not send; `reason` names the cause.
    NEEDS_RESYNC = "needs_resync"
    #: The table no longer exists at the source.
    DROPPED = "dropped"


CAPTURED: Final = frozenset({TableState.LIVE, TableState.SNAPSHOTTING})
"""States of tables of which the log has every change."""
REMOVED: Final = "no rule of the definition matches it any longer"
"""Reason of a table in state DROPPED that still exists at the source and may still be in the publication."""
PARTITION_OF: Final = "it is a partition now of "
"""First words of the reason of a table in state DROPPED that became a partition; the name of its root follows.

Postgres sends changes of such a table under the name of the partitioned table.
"""
ADDED: Final = "added while the stream ran"
"""Reason of a table in state SNAPSHOTTING that was added to the log after the epoch began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of one version of a table."""

    id: int
    """Attribute number when the column was first seen; a column that is new in a later epoch gets an unused id."""
    name: str
    type_oid: int
    type_name: str
    """Name of the type without modifier, such as `numeric`, `character varying` or `shop.mood`."""
    typmod: int = -1
    key: int | None = None
    """Index of the column in the key, from 0; None for a column outside the key."""
    not_null: bool = False
    generated: bool = False
    """True if the source computes the column and pgoutput does not send it."""
    type_kind: str = "b"
    """`pg_type.typtype`: b base, c composite, d domain, e enum, r range, m multirange, p pseudo."""
    base_type_oid: int | None = None
    """OID of the base type of a domain, through all nested domains; None for other types."""
    base_typmod: int = -1
    """The type modifier of a domain's base type."""
    missing: str | None = None
    """Text of `attmissingval`, the value in rows older than ADD COLUMN … DEFAULT; None if there is no such value."""
    default: str | None = None
    """Expression of the default or of the generated column, as Postgres prints it; None if there is no expression."""
    labels: tuple[str, ...] = ()
    """Labels of an enum in sort order, also for a domain over an enum or an array of an enum; empty for other types."""

    def keeps_labels(self, labels: tuple[str, ...]) -> bool:
        """Return True if `labels` is empty, or contains all enum labels of this column in the same order.

        If a label of the enum was renamed, the result is False.
        """
        rest = iter(labels)
        return not labels or all(label in rest for label in self.labels)

    @property
    def value_type(self) -> tuple[int, int]:
        """Type of the column's values as (OID, type modifier); for a domain those of its base type."""
        if self.base_type_oid is not None:
            return self.base_type_oid, self.base_typmod
        return self.type_oid, self.typmod


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFingerprint:
    """Values from the system catalogs that reveal row changes which are missing in the replication stream.

    The reader compares the fingerprint with an earlier one of the same table. A difference means that rows may have
    changed; a single fingerprint means nothing.
    """

    persistence: str
    """`u` if the table or one of its leaf partitions is unlogged, so writes no WAL; otherwise `p`."""
    file: int
    """`pg_class.relfilenode`; 0 for a partitioned table."""
    attributes: tuple[tuple[int, str], ...] = ()
    """(attribute number, xmin) of the `pg_attribute` rows of the columns that are not dropped.

    A column with `attmissingval` is left out: any rewrite of the table clears that value, and so changes the xmin.
    """
    leaves: tuple[tuple[int, int], ...] = ()
    """(OID, relfilenode) of the leaf partitions of a partitioned table, sorted by OID."""
    links: tuple[tuple[int, str], ...] = ()
    """(OID, xmins) of the leaf partitions, sorted by OID; empty in `s` rows of older versions of cdc.

    The xmins are those of the `pg_inherits` rows that link the leaf, level by level, to this table.
    """
    published: tuple[str, ...] | None = None
    """Settings of the table in the publication; None if the publication omits the table, or was not read."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Build a fingerprint from the result of `dataclasses.asdict`, or from this result after a JSON round trip."""
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
    """One version of the schema of one source table; versions with equal fields compare equal."""

    relation: int
    """The log's number of the table: `epoch << 32 | OID`, with epoch and OID from when the table was first seen."""
    oid: int
    """Current OID of the table; in the table's first epoch it equals the low 32 bits of `relation`."""
    schema: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    """Columns that are not dropped, in order of attribute numbers, including generated ones."""
    state: TableState = TableState.LIVE
    reason: str | None = None
    """Reason for a state other than LIVE, as text for an operator; None for LIVE."""
    root: int | None = None
    """OID of the root of the partition tree that contains this table; None for an ordinary table."""
    standing: CatalogFingerprint | None = None
    """Fingerprint from the last query of the source's system catalogs; None in `s` rows of older versions of cdc."""
    witness: str | None = None
    """OID and xmin of the DDL event triggers at this version; None if it is not certain that they were enabled.

    If the source still has the same triggers, they have reported every later schema change.
    """
    former_names: tuple[tuple[int, str], ...] = ()
    """Pairs (column id, name) of earlier versions that this version does not have, sorted; also of dropped columns.

    A rule that hides a name may have hidden each of these columns.
    """
    former_topics: tuple[str, ...] = ()
    """Topics that the table had in earlier versions and does not have now, sorted."""

    def __hash__(self) -> int:
        """Return a hash that is computed fast for a table with many columns, because every batch needs it often."""
        return hash((self.relation, len(self.columns)))

    @property
    def topic(self) -> str:
        """The table's topic, `schema.table`."""
        return topic(self.schema, self.name)

    @property
    def removed(self) -> bool:
        """True if the definition no longer includes the table; any rows that Postgres still sends are ignored."""
        return self.state is TableState.DROPPED and self.reason == REMOVED

    @property
    def is_partition_now(self) -> bool:
        """True if the table became a partition; Postgres then sends its changes under the partitioned table's name."""
        return self.state is TableState.DROPPED and (self.reason or "").startswith(PARTITION_OF)

    @property
    def key(self) -> tuple[Column, ...]:
        """Columns of the log's key, in key order; empty for a table without a key."""
        return tuple(sorted((c for c in self.columns if c.key is not None), key=lambda c: c.key or 0))

    @property
    def sent(self) -> tuple[Column, ...]:
        """Columns that pgoutput sends, in the order in which it sends them."""
        return tuple(c for c in self.columns if not c.generated)

    def column(self, name: str) -> Column | None:
        """Return the column with this name; None if the table has no such column."""
        return next((c for c in self.columns if c.name == name), None)

    def following(self, earlier: Self | None) -> Self:
        """Return a copy with the former names and topics that result from the version before it; None: no version.

        A column that is new, and whose attribute number is not proved, may be each column that disappeared, so it gets
        the names of all of them.
        """
        if earlier is None or self._has_names_of(earlier):
            return self
        names = {*earlier.former_names, *self.former_names, *((column.id, column.name) for column in earlier.columns)}
        before, now = ({column.id for column in version.columns} for version in (earlier, self))
        unproved = [number for number in now - before if number >= UNPROVED]
        names |= {(number, name) for number in unproved for other, name in names if other not in now}
        names -= {(column.id, column.name) for column in self.columns}
        topics = {*earlier.former_topics, *self.former_topics, earlier.topic} - {self.topic}
        return replace(self, former_names=tuple(sorted(names)), former_topics=tuple(sorted(topics)))

    def _has_names_of(self, earlier: Self) -> bool:
        """Return True if `following` adds nothing; a reader of a log asks for every version of every table."""
        return (
            (self.name, self.schema, len(self.columns)) == (earlier.name, earlier.schema, len(earlier.columns))
            and all(a.id == b.id and a.name == b.name for a, b in zip(self.columns, earlier.columns, strict=True))
            and set(earlier.former_names) <= set(self.former_names)
            and set(earlier.former_topics) <= set(self.former_topics)
        )

    def flagged(self, state: TableState, reason: str) -> Self:
        """Return a copy with another state and its reason."""
        return replace(self, state=state, reason=reason)

    def to_json(self) -> bytes:
        """Return the payload of an `s` row: UTF-8 JSON with sorted keys, so equal versions give equal bytes."""
        return _payload_of(self)

    @classmethod
    def from_json(cls, payload: bytes | str) -> TableSchema:
        """Build a schema from the result of `to_json`; raises ValueError for a newer format."""
        return _schema_of(payload)


_CACHED: Final = 1 << 14
"""Number of schemas that are neither formatted nor parsed again. Every batch needs those of its tables."""


@lru_cache(maxsize=_CACHED)
def _schema_of(payload: bytes | str) -> TableSchema:
    fields = json.loads(payload)
    if (found := fields.pop("format")) not in range(1, SCHEMA_FORMAT + 1):
        raise ValueError(
            f"a table schema has format {found!r}; this version of cdc reads formats up to {SCHEMA_FORMAT}"
        )
    fields["replica_identity"] = ReplicaIdentity(fields["replica_identity"])
    fields["state"] = TableState(fields["state"])
    fields["columns"] = tuple(
        Column(**{**column, "labels": tuple(column.get("labels", ()))}) for column in fields["columns"]
    )
    fields["former_names"] = tuple((number, name) for number, name in fields.get("former_names", ()))
    fields["former_topics"] = tuple(fields.get("former_topics", ()))
    if standing := fields.get("standing"):
        fields["standing"] = CatalogFingerprint.from_fields(standing)
    return TableSchema(**fields)


@lru_cache(maxsize=_CACHED)
def _payload_of(schema: TableSchema) -> bytes:
    content = {"format": SCHEMA_FORMAT, **_fields_of(schema)}
    return json.dumps(content, default=_fields_of, sort_keys=True, ensure_ascii=False).encode()


def _fields_of(record: TableSchema | Column | CatalogFingerprint) -> dict[str, Any]:
    """Return the fields of a dataclass without copies of their values, which `dataclasses.asdict` makes."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
