"""Tables, streams and hypothesis strategies for the decoders' tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from cdc.log_row import LOG_SCHEMA, OWN_PREFIXES
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DdlSeen, DecodedRows, RelationSeen, SignalSeen, WatermarkSeen
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    BeginMessage,
    CommitMessage,
    Delete,
    Insert,
    Keepalive,
    Message,
    OldKind,
    OldTuple,
    OriginMessage,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
)
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.pgoutput.encode import POSTGRES_EPOCH, frame

ODD_PREFIXES = ("", " ", "orders.created", "a\nb\tc", 'it\'s "quoted"', "../x\\*?[", "\U0001f600é", "x" * 100_000)
"""Prefixes of logical messages that Postgres accepts."""
DECODERS = (ReferenceDecoder, ColumnarDecoder)
Decoder = ReferenceDecoder | ColumnarDecoder
Event = DecodedRows | RelationSeen | DdlSeen | WatermarkSeen | SignalSeen | Keepalive


def table(
    oid: int = 1, *, name: str = "orders", width: int = 3, key: Sequence[int] = (0,), full: bool = False
) -> TableSchema:
    """A table whose column ids are 10, 11, …, and whose key is the given places in key order."""
    columns = tuple(
        Column(
            id=10 + place,
            name=f"c{place}",
            type_oid=25,
            type_name="text",
            key=key.index(place) if place in key else None,
        )
        for place in range(width)
    )
    identity = ReplicaIdentity.FULL if full else ReplicaIdentity.DEFAULT
    return TableSchema(
        relation=100 + oid, oid=oid, schema="shop", name=name, replica_identity=identity, columns=columns
    )


ORDERS = table(1)
FULL = table(2, name="full", key=(1, 0), full=True)
KEYLESS = table(3, name="keyless", key=(), width=2, full=True)
NARROW = table(4, name="narrow", width=0, key=(), full=True)
TABLES = {schema.oid: schema for schema in (ORDERS, FULL, KEYLESS, NARROW)}
IGNORED_OID = 9
IGNORED = table(IGNORED_OID, name="ignored")


def relation(schema: TableSchema) -> Relation:
    """The Relation message that pgoutput sends for schema."""
    columns = tuple(RelationColumn(c.name, c.type_oid, c.typmod, c.key is not None) for c in schema.sent)
    return Relation(schema.oid, schema.schema, schema.name, schema.replica_identity.value, columns)


def transaction(lsn: int, *messages: AnyMessage, xid: int = 7) -> list[AnyMessage]:
    """Begin, messages, Commit."""
    at = POSTGRES_EPOCH + lsn
    return [BeginMessage(Lsn(lsn), at, xid), *messages, CommitMessage(Lsn(lsn), Lsn(lsn + 8), at)]


def ready(decoder: Decoder) -> Decoder:
    """The decoder with all TABLES defined."""
    for schema in TABLES.values():
        decoder.define(schema, announce=False)
    decoder.ignore(IGNORED_OID)
    return decoder


def events(decoder: Decoder, frames: Sequence[bytes]) -> Iterator[Event]:
    """Decode frames as one batch; a relation seen is answered with its announced schema, or ignored."""
    for event in decoder.decode(FrameBatch.of(frames)):
        yield event
        if isinstance(event, RelationSeen) and event.relation.oid in TABLES:
            decoder.define(TABLES[event.relation.oid], announce=True)
        elif isinstance(event, RelationSeen) and event.relation.oid == IGNORED_OID:
            decoder.ignore(IGNORED_OID)


def decode(decoder: Decoder, messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """The rows of messages."""
    frames = [frame(message) for message in messages]
    return rows(list(events(ready(decoder), frames))).to_pylist()


def rows(found: Sequence[object]) -> pa.Table:
    """All rows of the events, checked: full validation also checks UTF-8 and offsets."""
    joined = pa.Table.from_batches([e.rows for e in found if isinstance(e, DecodedRows)], LOG_SCHEMA)
    joined.validate(full=True)
    return joined


_text = st.one_of(st.text(max_size=5), st.sampled_from(["1", "2"]))
_value = st.one_of(_text, st.none())
_sendable = st.one_of(_text, st.none(), st.just(UNCHANGED))


def _tuple(schema: TableSchema, value: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(*[value for _ in schema.sent])


def _old(schema: TableSchema) -> st.SearchStrategy:
    return st.builds(OldTuple, st.sampled_from(OldKind), _tuple(schema, _value))


def _new(schema: TableSchema) -> st.SearchStrategy:
    keys = [_value if column.key is not None else _sendable for column in schema.sent]
    return st.tuples(*keys)


def _update(schema: TableSchema) -> st.SearchStrategy:
    oid = st.just(schema.oid)
    with_old = st.builds(Update, oid, _old(schema), _tuple(schema, _sendable))
    return st.one_of(st.builds(Update, oid, st.none(), _new(schema)), with_old)


def _row(schema: TableSchema) -> st.SearchStrategy:
    oid = st.just(schema.oid)
    insert, delete = st.builds(Insert, oid, _new(schema)), st.builds(Delete, oid, _old(schema))
    return st.one_of(insert, _update(schema), delete)


_lsns = st.integers(1, 2**40).map(Lsn)
_keepalives = st.builds(Keepalive, _lsns, st.booleans())
_character = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
_prefix = st.one_of(st.sampled_from([*sorted(OWN_PREFIXES), "audit", ""]), st.text(_character, max_size=40))


def _message(*, transactional: bool) -> st.SearchStrategy:
    sent_at = st.integers(POSTGRES_EPOCH, POSTGRES_EPOCH + 10**9)
    return st.builds(Message, st.just(transactional), _lsns, _prefix, st.binary(max_size=5), sent_at)


_ignored = st.just(Insert(IGNORED_OID, ("1",)))
_truncates = st.builds(
    Truncate, st.lists(st.sampled_from([*TABLES, IGNORED_OID]), max_size=3).map(tuple), st.booleans(), st.booleans()
)
_inside = st.one_of(
    st.sampled_from(list(TABLES.values())).flatmap(_row),
    st.sampled_from(list(TABLES.values())).flatmap(_row),
    _truncates,
    _message(transactional=True),
    _keepalives,
    _ignored,
    st.sampled_from([*TABLES.values(), IGNORED]).map(relation),
    st.builds(OriginMessage, _lsns, st.text("ab")),
    st.builds(Type, st.integers(0, 2**32 - 1), st.just("shop"), st.just("mood")),
)


@st.composite
def _transactions(draw: st.DrawFn) -> list[AnyMessage]:
    body = draw(st.lists(_inside, max_size=8))
    return transaction(draw(st.integers(1, 2000)), *body, xid=draw(st.integers(0, 2**32 - 1)))


_outside = st.one_of(_keepalives, _message(transactional=False), st.just(relation(ORDERS))).map(lambda m: [m])

streams = st.lists(st.one_of(_transactions(), _transactions(), _outside), max_size=6).map(
    lambda parts: [frame(message) for part in parts for message in part]
)
"""Frames of whole transactions and what may stand between them; LSNs of messages are not in order."""
