"""Wire format of the delivery `multicast`: datagrams, events and answers to requests for repair, without I/O.

`deploy/guides/multicast.md` describes every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from cdc.delivery.destinations.contract import Event
from cdc.delivery.destinations.event_json import header_list

MAGIC: Final = b"CDCM"
VERSION: Final = 1
HEADER: Final = struct.Struct("!4sBBHQQ")
"""Magic, version, kind, repair port, session, number of the datagram; of a heartbeat, the next number."""
FRAGMENT: Final = struct.Struct("!II")
"""Bytes of the event, offset of this piece."""
EVENT: Final = struct.Struct("!QIBHHIII")
"""Position, ordinal, flags, and the lengths of topic, id, key, value and headers."""
ANSWER: Final = struct.Struct("!BI")
"""Kind and length of a part of an answer."""
WITHOUT_KEY: Final = 1
TOMBSTONE: Final = 2


class DatagramKind(IntEnum):
    """What a datagram contains."""

    PIECE = 1
    HEARTBEAT = 2


class AnswerKind(IntEnum):
    """What a part of an answer contains."""

    EVENT = 1
    END = 2
    MORE = 3
    ERROR = 4


class DatagramSource(NamedTuple):
    """What all datagrams of a session have in common."""

    repair_port: int
    session: int


def encoded_event(event: Event) -> bytes:
    """Return an event as bytes."""
    key, value = event.key or b"", event.value or b""
    flags = (WITHOUT_KEY if event.key is None else 0) | (TOMBSTONE if event.value is None else 0)
    topic, name = event.topic.encode(), event.id.encode()
    headers = header_list(event.headers).encode()
    lengths = map(len, (topic, name, key, value, headers))
    return EVENT.pack(event.position, event.ordinal, flags, *lengths) + topic + name + key + value + headers


def datagrams(content: bytes, number: int, source: DatagramSource, most: int) -> Iterator[bytes]:
    """Yield the datagrams of an event with numbers from `number` on. most: bytes of one"""
    room = most - HEADER.size - FRAGMENT.size
    for index, offset in enumerate(range(0, len(content), room)):
        head = HEADER.pack(MAGIC, VERSION, DatagramKind.PIECE, source.repair_port, source.session, number + index)
        yield head + FRAGMENT.pack(len(content), offset) + content[offset : offset + room]


def heartbeat(number: int, source: DatagramSource) -> bytes:
    """Return a datagram without an event. number: of the next datagram that has a piece of one"""
    return HEADER.pack(MAGIC, VERSION, DatagramKind.HEARTBEAT, source.repair_port, source.session, number)


def answer(kind: AnswerKind, content: bytes) -> bytes:
    """Return a part of an answer to a request for repair."""
    return ANSWER.pack(kind, len(content)) + content
