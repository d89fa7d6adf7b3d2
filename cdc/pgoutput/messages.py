"""The messages of the replication stream (PostgreSQL manual, 54.4 and 54.9), protocol version 1, text values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cdc.lsn import Lsn


class NotSent(Enum):
    """Why a tuple has no value at a place; SQL NULL is a value, and is None."""

    #: An unchanged value stored out of line: it is what it was.
    UNCHANGED = "u"


UNCHANGED = NotSent.UNCHANGED

Value: TypeAlias = str | NotSent | None
"""One place of a tuple: text, SQL NULL, or not sent."""
Values: TypeAlias = tuple[Value, ...]
"""One tuple, in the order of the Relation message's columns."""


class OldKind(Enum):
    """Which part of the old row an update or a delete brought."""

    #: The replica identity's columns; every other place says null without meaning it.
    KEY = "K"
    #: The whole row (REPLICA IDENTITY FULL).
    ROW = "O"


@dataclass(frozen=True, slots=True)
class OldTuple:
    """The row before the change, as far as the replica identity shows it."""

    kind: OldKind
    values: Values


@dataclass(frozen=True, slots=True)
class BeginMessage:
    """Start of a transaction; it is sent when it has committed, so its end is known."""

    final_lsn: Lsn
    """Of the commit record."""
    committed_at: int
    """Microseconds UTC since 1970."""
    xid: int


@dataclass(frozen=True, slots=True)
class CommitMessage:
    """End of a transaction."""

    lsn: Lsn
    """Of the commit record; what Begin named."""
    end_lsn: Lsn
    committed_at: int


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """One sent column; generated ones are not sent."""

    name: str
    type_oid: int
    typmod: int
    key: bool
    """Part of the replica identity; every column is under FULL."""


@dataclass(frozen=True, slots=True)
class Relation:
    """The shape of the tuples that follow under this OID."""

    oid: int
    schema: str
    name: str
    replica_identity: str
    """`d`, `n`, `f` or `i`, as in `pg_class.relreplident`."""
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    """A new row."""

    oid: int
    new: Values


@dataclass(frozen=True, slots=True)
class Update:
    """A changed row; the old one only when the identity changed, is stored out of line, or is FULL."""

    oid: int
    old: OldTuple | None
    new: Values


@dataclass(frozen=True, slots=True)
class Delete:
    """A removed row."""

    oid: int
    old: OldTuple


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables emptied by one statement."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """What `pg_logical_emit_message` wrote."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes
    sent_at: int
    """When the server sent it, microseconds UTC since 1970: a message outside a transaction has no other time."""


@dataclass(frozen=True, slots=True)
class OriginMessage:
    """Where a replicated transaction came from."""

    lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class Type:
    """A type that is not built in, named before a Relation that uses it."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server's sign of life: all WAL below wal_end was looked at and sent as far as it concerns us."""

    wal_end: Lsn
    reply_requested: bool


AnyMessage: TypeAlias = (
    BeginMessage
    | CommitMessage
    | Relation
    | Insert
    | Update
    | Delete
    | Truncate
    | Message
    | OriginMessage
    | Type
    | Keepalive
)


def row_oids(message: AnyMessage) -> tuple[int, ...]:
    """OIDs of the relations whose shape must be known to read the message's rows or truncates."""
    match message:
        case Insert() | Update() | Delete():
            return (message.oid,)
        case Truncate():
            return message.oids
        case _:
            return ()
