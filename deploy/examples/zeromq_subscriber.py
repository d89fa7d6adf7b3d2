"""Subscriber of a delivery `zeromq`: prints each event once, in order, and asks for what the socket has lost.

`python zeromq_subscriber.py PUBLISH HISTORY [TOPIC PREFIX [START]]`, for example
`python zeromq_subscriber.py tcp://127.0.0.1:5556 tcp://127.0.0.1:5557 shop.shop.orders`. START is the id of the last
event that an earlier run has processed; without it, everything that the log has comes first. Needs only `pyzmq`.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

import zmq

NUMBERS = struct.Struct("!QQQIB")
WITHOUT_KEY, TOMBSTONE = 1, 2


class Event(NamedTuple):
    """One event."""

    topic: str
    id: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    session: int
    number: int
    order: tuple[int, int, bool]
    """Position, ordinal, and whether it is the tombstone that follows a delete."""


class HistoryFailed(Exception):
    """The delivery cannot answer; the text says why."""


def read_event(frames: list[bytes]) -> Event:
    """Read the six frames of an event."""
    topic, name, key, value, headers, numbers = frames
    session, number, position, ordinal, flags = NUMBERS.unpack(numbers)
    return Event(
        topic.decode(),
        name.decode(),
        None if flags & WITHOUT_KEY else key,
        None if flags & TOMBSTONE else value,
        tuple((one, base64.b64decode(text) if coded else text.encode()) for one, text, *coded in json.loads(headers)),
        session,
        number,
        (position, ordinal, name.endswith(b"/tombstone")),
    )


class Subscriber:
    """Events of the topics that begin with a prefix, each once, those of a topic in log order."""

    def __init__(self, publish: str, history: str, prefix: str = "", start: str = "") -> None:
        self.answer_seconds = 5.0
        self._context = zmq.Context()
        self._history, self._prefix, self._requests = history, prefix.encode(), 0
        self.start = start
        """Where to continue: nothing up to here is missing. Store it to begin there next time."""
        self._last: dict[str, tuple[int, int, bool]] = {}
        """Topic → place of its last event."""
        self._session: int | None = None
        self._expected: dict[str, int] = {}
        self._live = self._context.socket(zmq.SUB)
        self._live.set(zmq.RCVHWM, 100_000)
        self._live.connect(publish)
        self._live.subscribe(self._prefix)

    def poll(self, seconds: float) -> Iterator[Event]:
        """Yield live events, and before them those that were lost; after some time without one, ask for lost ones."""
        while self._live.poll(int(seconds * 1000)):
            event = read_event(self._live.recv_multipart())
            if event.session != self._session:
                # another process sends: the end of the earlier session may be lost
                yield from self.catch_up()
                self._session, self._expected = event.session, {}
            elif event.number != self._expected.get(event.topic, 0):
                yield from self.catch_up()
            self._expected[event.topic] = event.number + 1
            yield from self._if_new(event)
        yield from self.catch_up()

    def catch_up(self) -> Iterator[Event]:
        """Yield the events of the log that were not received; raises HistoryFailed without an answer.

        The log has an event before the socket sends it. So nothing that was sent before this call is missing after it.
        """
        with self._context.socket(zmq.DEALER) as asking:
            asking.set(zmq.LINGER, 0)
            asking.connect(self._history)
            is_last = False
            while not is_last:
                self._requests += 1
                number = b"%d" % self._requests
                asking.send_multipart([number, self.start.encode(), self._prefix])
                while True:
                    if not asking.poll(int(self.answer_seconds * 1000)):
                        raise HistoryFailed("no answer")
                    answered, kind, *rest = asking.recv_multipart()
                    if answered != number:
                        continue
                    if kind == b"error":
                        raise HistoryFailed(b" ".join(rest).decode())
                    if kind == b"end":
                        self.start, is_last = rest[0].decode(), rest[1] == b"1"
                        break
                    yield from self._if_new(read_event(rest))

    def close(self) -> None:
        """Disconnect."""
        self._context.destroy(linger=0)

    def _if_new(self, event: Event) -> Iterator[Event]:
        if event.order > self._last.get(event.topic, (-1, -1, False)):
            self._last[event.topic] = event.order
            yield event


def main() -> None:
    """Print events until the process is interrupted."""
    subscriber = Subscriber(*sys.argv[1:5])
    while True:
        try:
            for event in subscriber.poll(1.0):
                print(event.id, event.topic, event.key, event.value, flush=True)
        except HistoryFailed as failed:
            print(f"the history is not available: {failed}", file=sys.stderr)


if __name__ == "__main__":
    main()
