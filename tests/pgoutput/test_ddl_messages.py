"""Messages of the event triggers: handed out at their place, in both decoders, and never a row of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cdc.change import DDL_PREFIX
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DdlSeen, Decoded
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.messages import AnyMessage, BeginMessage, CommitMessage, Insert, Message
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.position import Position
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.pgoutput.encode import frame

TOLD = Message(True, Lsn(550), DDL_PREFIX, b"told", 0)
SCHEMA = TableSchema(
    relation=1,
    oid=1,
    schema="shop",
    name="t",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(Column(id=1, name="id", type_oid=23, type_name="integer", key=0),),
)
Decoder = ColumnarDecoder | ReferenceDecoder
both = pytest.mark.parametrize("make", [ColumnarDecoder, ReferenceDecoder])


def transaction(*inside: AnyMessage) -> list[AnyMessage]:
    return [BeginMessage(Lsn(600), 0, 7), *inside, CommitMessage(Lsn(600), Lsn(610), 0)]


def rows(decoder: Decoder, messages: list[AnyMessage], announced: TableSchema) -> list[tuple[str, str]]:
    """(op, topic) of every row, the version announced at every message."""
    found = []
    for event in decoder.decode(FrameBatch.of([frame(message) for message in messages])):
        if isinstance(event, DdlSeen):
            assert event.content == b"told"
            decoder.announce(announced)
        elif isinstance(event, Decoded):
            found += [(row["op"], row["topic"]) for row in event.rows.to_pylist()]
    return found


@both
def test_the_version_stands_where_it_was_told_and_renames_what_follows(make: Callable[[], Decoder]) -> None:
    decoder = make()
    decoder.define(SCHEMA, announce=False)
    renamed = replace(SCHEMA, name="later")

    assert rows(decoder, transaction(Insert(1, ("1",)), TOLD, Insert(1, ("2",))), renamed) == [
        ("c", "shop.t"),
        ("s", "shop.later"),
        ("c", "shop.later"),
    ]


@both
def test_a_version_of_another_shape_is_not_how_tuples_are_read(make: Callable[[], Decoder]) -> None:
    decoder = make()
    decoder.define(SCHEMA, announce=False)
    wider = replace(SCHEMA, columns=(*SCHEMA.columns, Column(id=2, name="a", type_oid=25, type_name="text")))

    assert rows(decoder, transaction(TOLD, Insert(1, ("1",))), wider) == [("s", "shop.t"), ("c", "shop.t")]


@pytest.mark.parametrize("kind", [ColumnarDecoder, ReferenceDecoder])
def test_nothing_is_told_of_a_transaction_that_the_log_has(kind: type[Decoder]) -> None:
    assert rows(kind(after=Position(600)), transaction(TOLD), SCHEMA) == []


@both
def test_one_outside_transactions_is_nobodys(make: Callable[[], Decoder]) -> None:
    assert rows(make(), [replace(TOLD, transactional=False)], SCHEMA) == []
