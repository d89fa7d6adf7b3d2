"""Text that is not UTF-8 is refused or rewritten by the policy, in frames and in COPY lines alike."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.source import Undecodable
from cdc.errors import UndecodableValue
from cdc.logical_message import LogicalMessage
from cdc.lsn import Lsn
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import AnyMessage, Delete, Insert, Message, OldKind, OldTuple, Update
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.position import Position
from cdc.postgres.sql_ascii import PREFIX, CopyTextRepair, FrameTextRepair, repair_value
from tests.fixtures.examples import examples
from tests.pgoutput.encode import POSTGRES_EPOCH, frame
from tests.pgoutput.streams import DECODERS, ORDERS, events, relation, rows, streams, transaction
from tests.pgoutput.test_copy_decoder import ESCAPES

BAD = b"a\xffb"
MARK = "BAD"
NEVER = Position(0)
bounded = examples(15)


def bad_frames(*changes, at: int = 600) -> FrameBatch:
    """A transaction in which MARK is bytes that are no UTF-8."""
    messages = transaction(at, relation(ORDERS), *changes)
    return FrameBatch.of([frame(message).replace(MARK.encode(), BAD) for message in messages])


def decoded(batch: FrameBatch) -> list[dict[str, Any]]:
    return rows(list(events(ReferenceDecoder(), list(batch)))).to_pylist()


@pytest.mark.parametrize(("policy", "value"), [(Undecodable.BASE64, "base64:Yf9i"), (Undecodable.REPLACE, "a\ufffdb")])
def test_a_value_in_any_tuple_is_rewritten_and_the_others_are_not(policy, value):
    changes = [
        Insert(1, ("k", MARK, "ü")),
        Update(1, OldTuple(OldKind.KEY, (MARK, None, None)), ("k", None, MARK)),
        Delete(1, OldTuple(OldKind.ROW, ("k", MARK, ""))),
    ]
    _, inserted, left, moved, deleted = decoded(FrameTextRepair(policy, NEVER)(bad_frames(*changes)))
    assert inserted["after"] == [(10, "k"), (11, value), (12, "ü")]
    assert (left["key"], moved["old_key"], moved["after"][2]) == ([value], [value], (12, value))
    assert deleted["before"] == [(10, "k"), (11, value), (12, "")]


def test_a_refused_value_is_named_by_table_column_transaction_and_byte():
    mender = FrameTextRepair(Undecodable.FAIL, NEVER)
    with pytest.raises(
        UndecodableValue,
        match=r"column 'c2' of table 'shop.orders' has .* at byte 1, in the transaction at 0/258",
    ):
        mender(bad_frames(Insert(1, ("k", "ok", MARK))))
    lines = CopyTextRepair(Undecodable.FAIL, ORDERS)
    assert lines(b"1\t2\t3\n") == b"1\t2\t3\n"
    with pytest.raises(
        UndecodableValue,
        match=r"column 'c1' of table 'shop.orders' has a value that is not UTF-8 at byte 2, in row 1 of the copy",
    ):
        lines(b"1\t\\t2\xff\t3\n")


def sent(prefix: str, *, transactional: bool = True, at: int = 600) -> list[AnyMessage]:
    """A message with a content that is not UTF-8, in the transaction at `at` or alone just before it."""
    message = Message(transactional, Lsn(at - 10), prefix, BAD, POSTGRES_EPOCH)
    return transaction(at, message) if transactional else [message]


def bad_messages(*messages: AnyMessage) -> FrameBatch:
    """Frames in which MARK is bytes that are no UTF-8."""
    return FrameBatch.of([frame(message).replace(MARK.encode(), BAD) for message in messages])


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize(("policy", "prefix"), [(Undecodable.BASE64, "base64:Yf9i"), (Undecodable.REPLACE, "a\ufffdb")])
def test_the_prefix_of_a_message_is_rewritten_and_its_content_is_not(policy, prefix, transactional):
    batch = bad_messages(*sent(MARK, transactional=transactional), *sent("plain é", at=700))
    found = [LogicalMessage.from_row(row) for row in decoded(FrameTextRepair(policy, NEVER)(batch))]
    assert [(message.prefix, message.content) for message in found] == [(prefix, BAD), ("plain é", BAD)]
    assert (found[0].transactional, found[0].lsn) == (transactional, 590)


def test_a_base64_prefix_can_be_decoded_exactly():
    (row,) = decoded(FrameTextRepair(Undecodable.BASE64, NEVER)(bad_messages(*sent("base64:YQ=="))))
    assert row["key"][0] == "base64:YmFzZTY0OllRPT0="


@pytest.mark.parametrize("transactional", [True, False])
def test_a_refused_prefix_is_named_by_lsn_and_byte_unless_the_log_is_past_it(transactional):
    batch = bad_messages(*sent(MARK, transactional=transactional), *sent("later", at=700))
    with pytest.raises(UndecodableValue, match=r"prefix of the logical message at 0/24E has .* at byte 1"):
        FrameTextRepair(Undecodable.FAIL, NEVER)(batch)
    passed = FrameTextRepair(Undecodable.FAIL, Position(600))(batch)
    for make in DECODERS:
        found = rows(list(events(make(after=Position(600)), list(passed)))).to_pylist()
        assert [row["key"][0] for row in found] == ["later"]


def test_a_transaction_that_the_log_has_is_not_looked_at():
    batch = bad_frames(Insert(1, ("k", "ok", MARK)))
    assert FrameTextRepair(Undecodable.FAIL, Position(600))(batch) is batch


@bounded
@given(streams)
def test_frames_of_utf8_text_come_back_as_the_same_object(frames):
    batch = FrameBatch.of(frames)
    for policy in Undecodable:
        assert FrameTextRepair(policy, NEVER)(batch) is batch


@bounded
@given(st.lists(st.binary(max_size=20), min_size=3, max_size=3), st.sampled_from(list(Undecodable)))
def test_frames_and_copy_lines_repair_a_value_alike(values, policy):
    values = [value.replace(b"\0", b"") for value in values]
    marks = ["<0>", "<1>", "<2>"]
    one = frame(Insert(1, tuple(marks)))
    for mark, value in zip(marks, values, strict=True):
        one = one.replace(len(mark).to_bytes(4, "big") + mark.encode(), len(value).to_bytes(4, "big") + value)
    line = b"\t".join(b"".join(_escaped(value)) for value in values) + b"\n"
    begin = frame(transaction(600)[0])
    copy = CopyDecoder(ORDERS, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    try:
        told = [repair_value(value, policy).decode() for value in values]
    except UnicodeDecodeError:
        for refuse in (
            lambda: FrameTextRepair(policy, NEVER)(FrameBatch.of([begin, one])),
            lambda: CopyTextRepair(policy, ORDERS)(line),
        ):
            with pytest.raises(UndecodableValue):
                refuse()
        return
    assert parse_frame(FrameTextRepair(policy, NEVER)(FrameBatch.of([begin, one]))[1]) == Insert(1, tuple(told))
    batch = copy.feed(CopyTextRepair(policy, ORDERS)(line))
    assert batch is not None
    assert [value for _, value in batch.to_pylist()[0]["after"]] == told


def _escaped(value: bytes):
    escapes = {plain.encode(): escaped.encode() for plain, escaped in ESCAPES.items()}
    return (escapes.get(bytes([byte]), bytes([byte])) for byte in value)


@bounded
@given(st.binary(max_size=20) | st.binary(max_size=9).map(PREFIX.__add__))
def test_base64_can_be_decoded_exactly(value):
    told = repair_value(value, Undecodable.BASE64)
    assert (b64decode(told.removeprefix(PREFIX)) if told.startswith(PREFIX) else told) == value


@bounded
@given(streams, st.data())
def test_a_damaged_frame_is_left_to_the_decoder(frames, data):
    frames = frames or [b""]
    at = data.draw(st.integers(0, len(frames) - 1))
    frames[at] = frames[at][: data.draw(st.integers(0, len(frames[at])))] + data.draw(st.binary(max_size=4))
    FrameTextRepair(Undecodable.REPLACE, NEVER)(FrameBatch.of(frames))


def test_nulls_and_empty_text_stay_apart():
    line = b"\\N\t\t\xff\n"
    assert CopyTextRepair(Undecodable.REPLACE, ORDERS)(line) == b"\\N\t\t\xef\xbf\xbd\n"
