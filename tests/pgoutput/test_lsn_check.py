"""LsnCheck: a session that repeats every LSN truthfully passes; one changed LSN is found, or changes no position."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ContradictoryLsn
from cdc.lsn import Lsn
from cdc.pgoutput.lsn_check import LsnCheck
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import AnyMessage, CommitMessage, Insert, Keepalive, Message
from tests.pgoutput.encode import POSTGRES_EPOCH, placed_frame
from tests.pgoutput.streams import ORDERS, relation, transaction

ROW = Insert(ORDERS.oid, ("1", "a", "b"))
FLOOR = Lsn(100)
HEADER_LSN, BEGIN_LSN, COMMIT_LSN, COMMIT_END, MESSAGE_LSN = 1, 26, 27, 35, 27
"""Where a frame has them."""


def message(lsn: int, *, transactional: bool = False) -> Message:
    return Message(transactional, Lsn(lsn), "audit", b"x", POSTGRES_EPOCH)


def session(*messages: AnyMessage) -> list[bytes]:
    return [placed_frame(one) for one in messages]


HONEST = session(
    *transaction(100, relation(ORDERS), ROW),
    Keepalive(Lsn(2**50), reply_requested=True),
    message(108),
    *transaction(109),
    *transaction(200, message(190, transactional=True), ROW),
    message(208),
)


def check(frames: Sequence[bytes], cut: int = 0) -> None:
    """Look at the frames in two batches."""
    checker = LsnCheck(FLOOR)
    for part in (frames[:cut], frames[cut:]):
        batch = FrameBatch.of(part)
        assert checker.checked(batch) is batch


def changed(frame: bytes, place: int, lsn: int) -> bytes:
    return frame[:place] + struct.pack(">Q", lsn) + frame[place + 8 :]


@given(st.integers(0, len(HONEST)))
def test_a_session_that_repeats_its_lsns_truthfully_passes_in_any_batches(cut):
    check(HONEST, cut)


@given(
    st.sampled_from([(0, BEGIN_LSN), (3, COMMIT_LSN), (3, COMMIT_END), (3, HEADER_LSN), (5, MESSAGE_LSN)]),
    st.integers(0, 2**64 - 1) | st.integers(90, 220),
    st.integers(0, len(HONEST)),
)
def test_one_lsn_of_a_commit_or_a_message_that_is_not_repeated_is_found(place, lsn, cut):
    number, at = place
    frames = list(HONEST)
    frames[number] = changed(frames[number], at, lsn)
    if frames == HONEST:
        return
    with pytest.raises(ContradictoryLsn):
        check(frames, cut)


@pytest.mark.parametrize(
    "frames",
    [
        session(*transaction(99)),
        session(message(99)),
        session(*transaction(200), *transaction(207)),
        session(*transaction(200), message(207)),
        session(message(200), *transaction(199)),
    ],
)
def test_an_lsn_below_the_end_of_the_preceding_transaction_is_found(frames):
    with pytest.raises(ContradictoryLsn, match="below the end"):
        check(frames)


def test_a_commit_before_a_change_of_its_transaction_is_found():
    begin, row, commit = session(*transaction(200, ROW))
    check([begin, changed(row, HEADER_LSN, 200), commit])
    with pytest.raises(ContradictoryLsn, match="below a change"):
        check([begin, changed(row, HEADER_LSN, 201), commit])


def test_another_commit_time_than_that_of_the_begin_is_found():
    begin, commit = session(*transaction(200))
    with pytest.raises(ContradictoryLsn, match="Commit and Begin differ"):
        check([begin, commit[:-8] + bytes(8)])


def test_an_lsn_of_two_to_the_63_and_more_is_never_a_position():
    with pytest.raises(ContradictoryLsn):
        check(session(message(2**63 + 8)))
    with pytest.raises(ContradictoryLsn):
        check(session(CommitMessage(Lsn(2**63), Lsn(2**63 + 8), POSTGRES_EPOCH)))


def test_the_message_shows_the_headers_and_no_value():
    with pytest.raises(ContradictoryLsn) as found:
        check(session(Message(False, Lsn(3), "secret", b"secret", POSTGRES_EPOCH)))
    assert b"secret".hex() not in found.value.message
