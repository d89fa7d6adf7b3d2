"""Receiving in tests: frames until a condition holds, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from cdc.pgoutput.decode import parse_frame
from cdc.pgoutput.messages import Keepalive, Relation
from cdc.postgres.replication import ReplicationStream

PATIENCE = 30.0
"""Seconds."""


def receive_until(stream: ReplicationStream, enough: Callable[[list[object]], bool]) -> list[object]:
    """Messages of the stream, keepalives left out, until there are enough."""
    messages: list[object] = []
    deadline = time.monotonic() + PATIENCE
    while not enough(messages):
        assert time.monotonic() < deadline, f"stream gave only {messages!r}"
        frames = stream.receive(0.5)
        for frame in frames or ():
            message = parse_frame(frame)
            if not isinstance(message, Keepalive):
                messages.append(message)
    return messages


def until(condition: Callable[[], bool]) -> None:
    """Ask until it holds; each question is a round trip to the server."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"


def relations(messages: list[object]) -> list[Relation]:
    """Only the Relation messages."""
    return [message for message in messages if isinstance(message, Relation)]
