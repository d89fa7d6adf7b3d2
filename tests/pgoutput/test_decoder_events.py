"""Events of logical messages: both decoders yield DDL messages and signals in WAL order and write no rows for them."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from cdc.log_row import DDL_PREFIX, LOG_SCHEMA, SIGNAL_PREFIX
from cdc.lsn import Lsn
from cdc.pgoutput.decoder_events import DdlSeen, DecodedRows, SignalSeen
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import AnyMessage, Insert, Message
from cdc.position import Position
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.pgoutput.encode import POSTGRES_EPOCH, frame
from tests.pgoutput.streams import DECODERS, Decoder, ready, transaction

DDL = Message(True, Lsn(550), DDL_PREFIX, b"ddl", POSTGRES_EPOCH)
SIGNAL = Message(True, Lsn(550), SIGNAL_PREFIX, b"{}", POSTGRES_EPOCH)
ROW = Insert(1, ("1", "a", "b"))
SCHEMA = TableSchema(
    relation=1,
    oid=1,
    schema="shop",
    name="t",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(Column(id=1, name="id", type_oid=23, type_name="integer", key=0),),
)
each_decoder = pytest.mark.parametrize("kind", DECODERS)


def rows_after_announcing(
    decoder: Decoder, messages: list[AnyMessage], announced: TableSchema
) -> list[tuple[str, str]]:
    """(op, topic) of every row; the test announces the schema at each DDL message."""
    found = []
    for event in decoder.decode(FrameBatch.of([frame(message) for message in messages])):
        if isinstance(event, DdlSeen):
            assert event.content == b"ddl"
            decoder.announce(announced)
        elif isinstance(event, DecodedRows):
            found += [(row["op"], row["topic"]) for row in event.rows.to_pylist()]
    return found


def signals_and_rows(decoder: Decoder, messages: list[AnyMessage]) -> list[SignalSeen | DecodedRows]:
    """Signals and decoded rows in the order in which the decoder yields them."""
    found = ready(decoder).decode(FrameBatch.of([frame(message) for message in messages]))
    return [event for event in found if isinstance(event, SignalSeen | DecodedRows)]


@each_decoder
def test_a_schema_announced_at_a_ddl_message_applies_to_the_rows_after_it(kind: type[Decoder]) -> None:
    decoder = kind()
    decoder.define(SCHEMA, announce=False)
    renamed = replace(SCHEMA, name="later")

    changes = transaction(600, Insert(1, ("1",)), DDL, Insert(1, ("2",)))
    assert rows_after_announcing(decoder, changes, renamed) == [
        ("c", "shop.t"),
        ("s", "shop.later"),
        ("c", "shop.later"),
    ]


@each_decoder
def test_an_announced_schema_with_other_columns_does_not_define_the_tuples(kind: type[Decoder]) -> None:
    decoder = kind()
    decoder.define(SCHEMA, announce=False)
    wider = replace(SCHEMA, columns=(*SCHEMA.columns, Column(id=2, name="a", type_oid=25, type_name="text")))

    changes = transaction(600, DDL, Insert(1, ("1",)))
    assert rows_after_announcing(decoder, changes, wider) == [("s", "shop.t"), ("c", "shop.t")]


@each_decoder
def test_a_dropped_transaction_yields_no_ddl_message(kind: type[Decoder]) -> None:
    assert rows_after_announcing(kind(after=Position(600)), transaction(600, DDL), SCHEMA) == []


@each_decoder
def test_a_ddl_message_outside_transactions_is_ignored(kind: type[Decoder]) -> None:
    assert rows_after_announcing(kind(), [replace(DDL, transactional=False)], SCHEMA) == []


@each_decoder
def test_a_signal_in_a_transaction_has_its_position_and_the_number_of_rows_before_it(kind: type[Decoder]) -> None:
    signal, decoded = signals_and_rows(kind(epoch=3), transaction(600, ROW, SIGNAL, ROW))
    assert signal == SignalSeen(b"{}", Position.of(600, 3), 1)
    assert isinstance(decoded, DecodedRows)
    assert decoded.rows["op"].to_pylist() == ["c", "c"]


@each_decoder
def test_a_signal_outside_transactions_comes_before_the_rows_with_its_position(kind: type[Decoder]) -> None:
    messages = [*transaction(600, ROW), replace(SIGNAL, transactional=False, lsn=Lsn(701))]
    signal, decoded = signals_and_rows(kind(epoch=3), messages)
    assert signal == SignalSeen(b"{}", Position.of(700, 3), 0)
    assert isinstance(decoded, DecodedRows)
    assert (decoded.last, decoded.transactions, decoded.rows.num_rows) == (Position.of(700, 3), 2, 1)


@each_decoder
@pytest.mark.parametrize("transactional", [True, False])
def test_a_signal_at_a_position_that_the_log_contains_is_not_yielded(kind: type[Decoder], transactional: bool) -> None:
    signal = replace(SIGNAL, transactional=transactional, lsn=Lsn(601))
    messages: list[AnyMessage] = transaction(600, signal) if transactional else [signal]
    assert not [e for e in signals_and_rows(kind(after=Position(600)), messages) if isinstance(e, SignalSeen)]
    assert [e for e in signals_and_rows(kind(after=Position(599)), messages) if isinstance(e, SignalSeen)]


@each_decoder
def test_a_signal_after_a_dropped_transaction_is_yielded(kind: type[Decoder]) -> None:
    messages = [*transaction(500, ROW), replace(SIGNAL, transactional=False, lsn=Lsn(701))]
    signal, decoded = signals_and_rows(kind(after=Position(600)), messages)
    assert isinstance(signal, SignalSeen)
    assert isinstance(decoded, DecodedRows)
    assert decoded.rows.num_rows == 0


@pytest.mark.parametrize("copied", [True, False])
def test_the_size_of_copied_rows_does_not_count_reserved_memory(copied: bool) -> None:
    rows = pa.RecordBatch.from_pylist([{"position": n, "op": "r"} for n in range(1000)], LOG_SCHEMA)
    part = DecodedRows(rows.slice(0, 1), 1, None, 0, 0, copied=copied)
    assert (part.nbytes < rows.get_total_buffer_size()) == copied
