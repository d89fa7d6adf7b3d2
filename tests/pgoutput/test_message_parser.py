"""Frame batches, and the parser: it reads what the encoder of the tests writes and rejects everything else."""

from __future__ import annotations

import pytest

from cdc.errors import MalformedFrame
from cdc.lsn import Lsn
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import (
    UNCHANGED,
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
from tests.pgoutput.encode import POSTGRES_EPOCH, frame

LSN = Lsn.parse("16/B374D848")
SIMPLE_CASES = [
    BeginMessage(LSN, POSTGRES_EPOCH - 5, 2**32 - 1),
    CommitMessage(LSN, Lsn(LSN + 8), POSTGRES_EPOCH + 5),
    Relation(
        2**32 - 1, "shop", "Käse", "f", (RelationColumn("id", 23, -1, True), RelationColumn("n", 1700, 655366, False))
    ),
    Insert(1, ("a", None, "", "ü")),
    Update(1, None, ("a", UNCHANGED)),
    Update(1, OldTuple(OldKind.KEY, ("a", None)), ("b", UNCHANGED)),
    Delete(1, OldTuple(OldKind.ROW, ("a", None))),
    Truncate((1, 2), True, False),
    Truncate((), False, True),
    Message(True, LSN, "audit", b"\0\1", POSTGRES_EPOCH + 9),
    Message(False, LSN, "", b"", POSTGRES_EPOCH),
    OriginMessage(LSN, "other"),
    Type(5, "shop", "mood"),
    Keepalive(LSN, True),
    Keepalive(LSN, False),
]
HEADER = b"w" + bytes(24)


@pytest.mark.parametrize("frames", [[], [b""], [b"a", b"", b"bcd"]])
def test_a_batch_gives_its_frames_back(frames):
    batch = FrameBatch.of(frames)
    assert [batch[index] for index in range(len(batch))] == list(batch) == frames
    assert batch.nbytes == sum(map(len, frames))


def test_a_batch_says_whether_a_keepalive_is_its_last_frame() -> None:
    change, keepalive = frame(Insert(1, ("a",))), frame(Keepalive(LSN, reply_requested=False))

    assert FrameBatch.of([change, keepalive]).ends_with_keepalive
    assert not FrameBatch.of([keepalive, change]).ends_with_keepalive
    assert not FrameBatch.of([]).ends_with_keepalive


@pytest.mark.parametrize("index", [-1, 1])
def test_a_frame_outside_the_batch_is_an_index_error(index):
    with pytest.raises(IndexError, match="expected 0 to 0"):
        FrameBatch.of([b"a"])[index]


@pytest.mark.parametrize("message", SIMPLE_CASES, ids=lambda m: type(m).__name__)
def test_every_message_is_read_as_written(message):
    assert parse_frame(frame(message)) == message


@pytest.mark.parametrize("message", SIMPLE_CASES, ids=lambda m: type(m).__name__)
def test_every_truncation_and_every_extra_byte_is_malformed(message):
    whole = frame(message)
    for bad in [*(whole[:size] for size in range(len(whole))), whole + b"\0"]:
        with pytest.raises(MalformedFrame):
            parse_frame(bad)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"x", "expected 'w' or 'k', got 'x'"),
        (HEADER + b"S", "unknown message 'S'"),
        (HEADER + b"I\0\0\0\1K", "expected a new tuple 'N', got 'K'"),
        (HEADER + b"U\0\0\0\1X", "expected a new tuple 'N', got 'X'"),
        (HEADER + b"D\0\0\0\1N", "expected an old tuple 'K' or 'O', got 'N'"),
        (HEADER + b"I\0\0\0\1N\0\1b\0\0\0\1x", "expected a value of kind 't', 'n' or 'u', got 'b'"),
        (HEADER + b"I\0\0\0\1N\0\1t\xff\xff\xff\xff", "expected -1 bytes"),
        (HEADER + b"Y\0\0\0\1\xff\0\0", "is not UTF-8"),
        (HEADER + b"B" + bytes(8) + b"\x7f" + b"\xff" * 7 + bytes(4), "time out of range"),
        (HEADER + b"B" + bytes(8) + b"\x80" + bytes(7) + bytes(4), "time out of range"),
        (b"w" + bytes(16) + b"\x7f" + b"\xff" * 7 + b"M\1" + bytes(8) + b"p\0\0\0\0\0", "time out of range"),
    ],
)
def test_the_error_says_what_was_expected(bad, reason):
    with pytest.raises(MalformedFrame, match=reason):
        parse_frame(bad)
