"""ZeroMQ: a PUB socket that sends each event once, and a ROUTER socket at which subscribers get lost events again.

A PUB socket drops what a subscriber does not take, and everything while it is not connected. So each event has a
number in its topic. A subscriber that misses a number asks for the events after the last one that it has. The answer
comes from the log, in pages, with the same ids; the order of position and ordinal shows which events are known already.

`deploy/guides/deliveries-direct.md` describes the frames; `deploy/examples/zeromq_subscriber.py` reads them.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Thread
from typing import ClassVar, Final

import zmq

from cdc import failpoint
from cdc.config.destinations import ZeromqDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, EventHistory, Promise
from cdc.delivery.destinations.event_json import header_list
from cdc.delivery.destinations.history_pages import answered_page
from cdc.errors import CdcError, DestinationUnavailable

NUMBERS: Final = struct.Struct("!QQQIB")
"""Session, number of the event in its topic, position, ordinal and flags."""
WITHOUT_KEY: Final = 1
TOMBSTONE: Final = 2
NOT_LIVE: Final = 4
"""Flag of an event that comes from the log; its session and number have no meaning."""
_POLL: Final = 100
"""Milliseconds between two checks whether the thread has to end."""
_LINGER: Final = 500
"""Milliseconds for which `close` waits until connected subscribers have what was sent."""


class ZeromqDestination:
    """Two sockets; subscribers connect and disconnect as they like."""

    promise: ClassVar[Promise] = Promise.AT_MOST_ONCE
    stores_progress: ClassVar[bool] = False

    def __init__(self, settings: ZeromqDelivery, identity: DeliveryIdentity) -> None:
        self._settings, self._name = settings, identity.name
        self._history: EventHistory | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._server: Thread | None = None
        self._ended = Flag()
        self._session = 0
        self._numbers: dict[str, int] = {}

    def serve_history(self, history: EventHistory) -> None:
        """Answer subscribers from this history."""
        self._history = history

    def open(self) -> bytes | None:
        """Bind the sockets, and begin a session with numbers from 0."""
        self.close()
        self._context, self._ended = zmq.Context(), Flag()
        self._session, self._numbers = secrets.randbits(64), {}
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set(zmq.SNDHWM, self._settings.queue)
            self._publisher.set(zmq.LINGER, _LINGER)
            self._publisher.bind(self._settings.publish)
            router = self._context.socket(zmq.ROUTER)
            router.set(zmq.LINGER, _LINGER)
            router.bind(self._settings.history)
        except zmq.ZMQError as exc:
            self.close()
            raise DestinationUnavailable(
                f"delivery {self._name!r} cannot listen at {self._settings.publish!r} and {self._settings.history!r}: "
                f"{exc.strerror}",
                remedy="set addresses of this machine that no other process uses",
            ) from exc
        self._server = Thread(target=self._serve, args=(router, self._ended), name=f"history {self._name}", daemon=True)
        self._server.start()
        return None

    def send(self, events: Sequence[Event]) -> None:
        """Pass the events to the socket, which drops them for subscribers that are too slow."""
        if self._publisher is None:
            raise DestinationUnavailable("the ZeroMQ socket is closed")
        for event in events:
            number = self._numbers.get(event.topic, 0)
            self._numbers[event.topic] = number + 1
            self._publisher.send_multipart(frames(event, self._session, number))

    def commit(self, progress: bytes) -> None:
        """Do nothing: nobody acknowledges an event."""
        del progress
        if self._publisher is None:
            raise DestinationUnavailable("the ZeroMQ socket is closed")
        failpoint.hit("zeromq_sent")

    def close(self) -> None:
        """Close the sockets."""
        self._ended.set()
        publisher, self._publisher = self._publisher, None
        server, self._server = self._server, None
        context, self._context = self._context, None
        if publisher is not None:
            publisher.close()
        if server is not None:
            server.join()
        if context is not None:
            context.destroy()

    def _serve(self, router: zmq.Socket[bytes], ended: Flag) -> None:
        with router:
            while not ended.is_set():
                if router.poll(_POLL):
                    subscriber, *request = router.recv_multipart()
                    for answer in self._answers(request):
                        with suppress(zmq.ZMQError):  # the subscriber is gone
                            router.send_multipart([subscriber, *answer])

    def _answers(self, request: Sequence[bytes]) -> list[list[bytes]]:
        """Return the messages that answer a request of [number, start, prefix of the topics]."""
        if len(request) != len(("number", "start", "prefix")):
            return []
        number, start, prefix = request
        page = answered_page(self._history, start)
        if isinstance(page, CdcError):
            return [[number, b"error", page.code.encode(), page.message.encode()]]
        found = [
            [number, b"event", *frames(event, 0, 0, NOT_LIVE)]
            for event in page.events
            if event.topic.encode().startswith(prefix)
        ]
        return [*found, [number, b"end", page.next.encode(), b"1" if page.is_last else b"0"]]


def frames(event: Event, session: int, number: int, flags: int = 0) -> list[bytes]:
    """Return the frames of an event: topic, id, key, value, headers, numbers."""
    flags |= (WITHOUT_KEY if event.key is None else 0) | (TOMBSTONE if event.value is None else 0)
    return [
        event.topic.encode(),
        event.id.encode(),
        event.key or b"",
        event.value or b"",
        header_list(event.headers).encode(),
        NUMBERS.pack(session, number, event.position, event.ordinal, flags),
    ]
