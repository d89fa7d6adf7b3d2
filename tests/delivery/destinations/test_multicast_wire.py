"""Bytes of the delivery `multicast`: the receiver of the examples reads what the sender writes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.destinations.multicast_wire import (
    FRAGMENT,
    HEADER,
    AnswerKind,
    DatagramKind,
    DatagramSource,
    answer,
    datagrams,
    encoded_event,
    heartbeat,
)
from tests.delivery.destinations.recorded import example
from tests.delivery.destinations.sending import event

SOURCE = DatagramSource(7, 1 << 63)


@dataclass(frozen=True)
class Piece:
    number: int
    length: int
    offset: int
    content: bytes


def pieces(content: bytes, most: int) -> list[Piece]:
    found = []
    for one in datagrams(content, 100, SOURCE, most):
        assert len(one) <= most
        assert HEADER.unpack_from(one)[:5] == (b"CDCM", 1, DatagramKind.PIECE, 7, 1 << 63)
        length, offset = FRAGMENT.unpack_from(one, HEADER.size)
        found.append(Piece(HEADER.unpack_from(one)[5], length, offset, one[HEADER.size + FRAGMENT.size :]))
    return found


@given(st.binary(max_size=50) | st.none(), st.binary(max_size=50) | st.none(), st.text(min_size=1, max_size=20))
def test_an_event_is_read_back(key: bytes | None, value: bytes | None, topic: str) -> None:
    sent = event(5, topic.encode(errors="replace").decode(), key, value, ("bytes", b"\xff"), ("ü", "ü".encode()))
    found = example("multicast_receiver").read_event(encoded_event(sent))

    assert (found.topic, found.id, found.key, found.value) == (sent.topic, sent.id, key, value)
    assert found.headers == sent.headers
    assert found.order == (5, 0, False)


@pytest.mark.parametrize("size", [1, 544, 545, 5_000])
def test_the_datagrams_of_an_event_have_its_bytes(size: int) -> None:
    content = bytes(range(256)) * 20
    found = pieces(content[:size], 576)

    assert b"".join(one.content for one in found) == content[:size]
    assert [one.number for one in found] == list(range(100, 100 + len(found)))
    assert {one.length for one in found} == {size}
    assert [one.offset for one in found] == [544 * number for number in range(len(found))]


def test_heartbeats_and_answers() -> None:
    assert HEADER.unpack(heartbeat(9, SOURCE)) == (b"CDCM", 1, DatagramKind.HEARTBEAT, 7, 1 << 63, 9)
    assert answer(AnswerKind.END, b"abc") == b"\x02\x00\x00\x00\x03abc"
