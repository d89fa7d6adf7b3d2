"""Messages of the replication stream, protocol version 1, with values as text (PostgreSQL manual, 54.4 and 54.9)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cdc.lsn import Lsn


class NotSent(Enum):
    """Reason why a tuple has no value for a column; SQL NULL is a value, represented by None."""

    #: An unchanged TOASTed value.
    UNCHANGED = "u"


UNCHANGED = NotSent.UNCHANGED

Value: TypeAlias = str | NotSent | None
"""Value of one column in a tuple: text, None for SQL NULL, or a NotSent."""
Values: TypeAlias = tuple[Value, ...]
"""Values of one tuple, in the order of the Relation message's columns."""


class OldKind(Enum):
    """Part of the old row that an update or a delete contains."""

    #: The columns of the replica identity; the nulls of all other columns have no meaning.
    KEY = "K"
    #: The whole row (REPLICA IDENTITY FULL).
    ROW = "O"


@dataclass(frozen=True, slots=True)
class OldTuple:
    """The part of the old row that the replica identity includes."""

    kind: OldKind
    values: Values


@dataclass(frozen=True, slots=True)
class BeginMessage:
    """Begin message: start of a transaction; the server sends it after the commit, so it contains the commit LSN."""

    final_lsn: Lsn
    """LSN of the commit record."""
    committed_at: int
    """Microseconds UTC since 1970."""
    xid: int


@dataclass(frozen=True, slots=True)
class CommitMessage:
    """Commit message: end of a transaction."""

    lsn: Lsn
    """LSN of the commit record, as in Begin."""
    end_lsn: Lsn
    """WAL position after the commit record."""
    committed_at: int
    """Microseconds UTC since 1970."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """One column of a Relation message."""

    name: str
    type_oid: int
    typmod: int
    key: bool
    """True if the column is part of the replica identity; True for every column under FULL."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Relation message: the columns of the following tuples of this OID."""

    oid: int
    schema: str
    name: str
    replica_identity: str
    """`d`, `n`, `f` or `i`, as in `pg_class.relreplident`."""
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    """Insert message: a new row of the relation `oid`."""

    oid: int
    new: Values


@dataclass(frozen=True, slots=True)
class Update:
    """Update message: the new row, and perhaps the old one.

    Postgres sends the old tuple if a column of the replica identity changed or has a TOASTed value, or under FULL.
    """

    oid: int
    old: OldTuple | None
    new: Values


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete message: a removed row of the relation `oid`."""

    oid: int
    old: OldTuple


@dataclass(frozen=True, slots=True)
class Truncate:
    """Truncate message: the relations that one TRUNCATE statement emptied."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """Logical message, written with `pg_logical_emit_message`."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes
    sent_at: int
    """Time of sending, microseconds UTC since 1970; a message outside a transaction has no other time."""


@dataclass(frozen=True, slots=True)
class OriginMessage:
    """Origin message: the replication origin of a transaction."""

    lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class Type:
    """Type message: name of a data type that is not built in; precedes a Relation message that uses the type."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Keepalive: the server has decoded all WAL below `wal_end` and sent the published changes."""

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
    """Return the OIDs of the relations that must be defined before the message can be decoded."""
    match message:
        case Insert() | Update() | Delete():
            return (message.oid,)
        case Truncate():
            return message.oids
        case _:
            return ()
