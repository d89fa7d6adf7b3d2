"""Streamed transactions: control messages, and conversion of frames to those of plain transactions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import MalformedFrame
from cdc.lsn import Lsn
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import (
    AnyMessage,
    BeginMessage,
    CommitMessage,
    Insert,
    Keepalive,
    Message,
    OriginMessage,
    Truncate,
    Type,
)
from cdc.pgoutput.stream_blocks import (
    KEEPALIVE,
    RELATION,
    START,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    kind_set,
    next_of,
    parse_control,
    readonly_arrays,
    unwrap,
)
from tests.fixtures.examples import examples
from tests.pgoutput.encode import (
    POSTGRES_EPOCH,
    WAL,
    frame,
    in_block,
    stream_abort,
    stream_commit,
    stream_start,
    stream_stop,
)
from tests.pgoutput.streams import ORDERS, relation

NONE = np.empty(0, np.int64)
INSIDE: list[AnyMessage] = [
    relation(ORDERS),
    Type(99, "shop", "mood"),
    Insert(1, ("1", None, "x")),
    Truncate((1, 2), cascade=True, restart_identity=False),
    Message(True, Lsn(5), "audit", b"content", POSTGRES_EPOCH),
    OriginMessage(Lsn(9), "elsewhere"),
]


def test_every_message_of_a_block_becomes_its_form_outside_a_block():
    run = FrameBatch.of([in_block(7, message) for message in INSIDE])
    assert list(unwrap(run, NONE)) == [frame(message) for message in INSIDE]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.data())
def test_rolled_back_frames_are_left_out_and_the_others_keep_their_order(xids, data):
    aborted = data.draw(st.sets(st.sampled_from(xids))) if xids else set()
    run = FrameBatch.of([in_block(xid, Insert(1, (str(n),))) for n, xid in enumerate(xids)])
    expected = [frame(Insert(1, (str(n),))) for n, xid in enumerate(xids) if xid not in aborted]
    assert list(unwrap(run, np.array(sorted(aborted), np.int64))) == expected


@pytest.mark.parametrize("told", [False, True])
def test_an_abort_names_transaction_and_subtransaction_with_or_without_lsn_and_time(told):
    assert parse_control(stream_abort(2**32 - 1, 8, told=told)) == StreamAbort(2**32 - 1, 8)


def test_a_commit_gives_the_begin_and_the_commit_of_a_plain_transaction():
    at = POSTGRES_EPOCH + 5
    control = parse_control(stream_commit(7, 2**40, 2**40 + 8, at))
    assert isinstance(control, StreamCommit)
    assert control.xid == 7
    assert parse_frame(control.begin) == BeginMessage(Lsn(2**40), at, 7)
    assert parse_frame(control.commit) == CommitMessage(Lsn(2**40), Lsn(2**40 + 8), at)


def test_starts_and_stops_are_read():
    assert parse_control(stream_start(7, first=True)) == StreamStart(7, first=True)
    assert parse_control(stream_start(7, first=False)) == StreamStart(7, first=False)
    assert parse_control(stream_stop()) == StreamStop()


@pytest.mark.parametrize(
    "whole", [stream_start(7, first=True), stream_stop(), stream_abort(7, 8, told=True), stream_commit(7, 1, 2, 3)]
)
def test_a_control_message_of_another_length_is_malformed(whole):
    for damaged in (*(whole[:size] for size in range(len(WAL) + 1, len(whole)) if size != len(WAL) + 9), whole + b"x"):
        with pytest.raises(MalformedFrame):
            parse_control(damaged)


_frames = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from([frame(Keepalive(Lsn(1), True)), stream_start(7, first=True), frame(relation(ORDERS))]),
        st.binary(max_size=6).map(lambda rest: WAL + rest),
    ),
    max_size=12,
)


@examples(60)
@given(_frames, st.integers(0, 12))
def test_the_next_frame_of_a_kind_is_found_among_bytes_of_any_kind(frames, at):
    def kind(one: bytes) -> bytes:
        return one[25:26] if one[:1] == b"w" else one[:1]

    wanted = bytes([START, RELATION, KEEPALIVE])
    expected = next((n for n in range(at, len(frames)) if kind(frames[n]) and kind(frames[n]) in wanted), len(frames))
    assert next_of(*readonly_arrays(FrameBatch.of(frames)), at, kind_set(wanted)) == expected


@given(_frames)
def test_bytes_of_any_kind_are_unwrapped_without_reading_beyond_them(frames):
    kept = list(unwrap(FrameBatch.of(frames), NONE))
    assert len(kept) == len(frames)
    assert all(found in {given, given[:26] + given[30:]} for found, given in zip(kept, frames, strict=True))
