"""Signals as messages: handed out before their place can be durable, in both decoders, and never a row of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.change import SIGNAL_PREFIX
from cdc.lsn import Lsn
from cdc.pgoutput.decoder_events import Decoded, SignalSeen
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.messages import AnyMessage, Insert, Message
from cdc.position import Position
from tests.pgoutput.encode import POSTGRES_EPOCH, frame
from tests.pgoutput.streams import DECODERS, Decoder, ready, transaction

SIGNAL = Message(True, Lsn(550), SIGNAL_PREFIX, b"{}", POSTGRES_EPOCH)
ROW = Insert(1, ("1", "a", "b"))
both = pytest.mark.parametrize("kind", DECODERS)


def told(decoder: Decoder, messages: list[AnyMessage]) -> list[SignalSeen | Decoded]:
    """Signals and rows in the order in which they come."""
    found = ready(decoder).decode(FrameBatch.of([frame(message) for message in messages]))
    return [event for event in found if isinstance(event, SignalSeen | Decoded)]


@both
def test_one_in_a_transaction_stands_at_its_commit_and_counts_the_rows_before_it(kind: type[Decoder]) -> None:
    signal, decoded = told(kind(epoch=3), transaction(600, ROW, SIGNAL, ROW))
    assert signal == SignalSeen(b"{}", Position.of(600, 3), 1)
    assert isinstance(decoded, Decoded)
    assert decoded.rows["op"].to_pylist() == ["c", "c"]


@both
def test_one_outside_of_transactions_stands_before_its_own_place_is_finished(kind: type[Decoder]) -> None:
    before = transaction(600, ROW)
    signal, decoded = told(kind(epoch=3), [*before, replace(SIGNAL, transactional=False, lsn=Lsn(701))])
    assert signal == SignalSeen(b"{}", Position.of(700, 3), 0)
    assert isinstance(decoded, Decoded)
    assert (decoded.last, decoded.transactions, decoded.rows.num_rows) == (Position.of(700, 3), 2, 1)


@both
@pytest.mark.parametrize("transactional", [True, False])
def test_one_that_the_log_has_passed_is_not_handed_out_again(kind: type[Decoder], transactional: bool) -> None:
    signal = replace(SIGNAL, transactional=transactional, lsn=Lsn(601))
    stream: list[AnyMessage] = transaction(600, signal) if transactional else [signal]
    assert not [e for e in told(kind(after=Position(600)), stream) if isinstance(e, SignalSeen)]
    assert [e for e in told(kind(after=Position(599)), stream) if isinstance(e, SignalSeen)]


@both
def test_one_behind_a_dropped_transaction_is_handed_out(kind: type[Decoder]) -> None:
    stream = [*transaction(500, ROW), replace(SIGNAL, transactional=False, lsn=Lsn(701))]
    (signal, decoded) = told(kind(after=Position(600)), stream)
    assert isinstance(signal, SignalSeen)
    assert isinstance(decoded, Decoded)
    assert decoded.rows.num_rows == 0
