"""Receiving in tests: frames until a condition holds, with a deadline."""

from __future__ import annotations

from collections.abc import Callable

from cdc.pgoutput.message_parser import parse_frame
from cdc.pgoutput.messages import Keepalive, Relation
from cdc.postgres.replication import ReplicationStream
from tests.fixtures.waiting import until


def receive_until(stream: ReplicationStream, enough: Callable[[list[object]], bool]) -> list[object]:
    """Messages of the stream, keepalives left out, until there are enough."""
    messages: list[object] = []

    def received() -> bool:
        found = (parse_frame(frame) for frame in stream.receive(0.5) or ())
        messages.extend(message for message in found if not isinstance(message, Keepalive))
        return enough(messages)

    until(received, lambda: f"more than {messages!r}", every=0.0)
    return messages


def relations(messages: list[object]) -> list[Relation]:
    """Only the Relation messages."""
    return [message for message in messages if isinstance(message, Relation)]
