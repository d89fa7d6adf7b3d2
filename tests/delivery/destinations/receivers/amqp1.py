"""AMQP 1.0 as the tests of the contract use it: a queue for each topic, read to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pytest
from proton.utils import BlockingConnection

from cdc.config.destinations import Amqp1Delivery
from cdc.config.secret import Secret
from cdc.delivery.destinations.amqp1 import Amqp1Destination, address_of
from cdc.delivery.destinations.broker_connection import KEY_HEADER, TOMBSTONE_HEADER
from cdc.delivery.destinations.contract import DeliveryIdentity
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.artemis import ArtemisProcess, own_artemis
from tests.fixtures.broker_process import PASSWORD, USER

CRASH_POINTS: Final = ("amqp1_settled",)
_CREDIT: Final = 500


def settings(port: int, **changed: object) -> Amqp1Delivery:
    """A delivery to a broker of this machine."""
    given = {
        "name": "events",
        "type": "amqp1",
        "url": f"amqp://127.0.0.1:{port}",
        "user": USER,
        "password": Secret(PASSWORD, "${BROKER_PASSWORD}"),
        "max_size": 2 << 20,
        "timeout": "10s",
    }
    return Amqp1Delivery.model_validate({**given, **changed}, context={})


def make(port: int, name: str = "events", **changed: object) -> Amqp1Destination:
    return Amqp1Destination(settings(port, **changed), DeliveryIdentity("shop", name, "0123456789abcdef"))


@contextmanager
def reading(port: int, name: str, topics: Sequence[str]) -> Iterator[Callable[[], list[Received]]]:
    """What a consumer gets of these topics."""
    del name
    yield QueueContent(port, [address_of(topic) for topic in topics])


class QueueContent:
    """Reads and removes the messages of queues."""

    def __init__(self, port: int, queues: Sequence[str]) -> None:
        self._port, self._queues = port, queues
        self._read: list[Received] = []

    def __call__(self) -> list[Received]:
        url = f"amqp://127.0.0.1:{self._port}"
        connection = BlockingConnection(url, timeout=30, user=USER, password=PASSWORD, allow_insecure_mechs=True)
        try:
            for queue in self._queues:
                self._read += map(received, _messages(connection, queue))
        finally:
            connection.close()
        return self._read


def _messages(connection: BlockingConnection, queue: str) -> Iterator[Any]:
    """Remove what the queue has; the broker says when that is everything.

    Each drain has a link of its own: Artemis may ignore a second drain of a link that comes while a thread of the
    broker still ends the first one, and would never answer it.
    """
    is_empty = False
    while not is_empty:
        receiver = connection.create_receiver(queue, credit=0)
        receiver.link.drain(_CREDIT)
        connection.wait(lambda link=receiver.link: not link.draining(), msg=f"reading {queue!r} to its end")
        is_empty = not receiver.fetcher.has_message
        while receiver.fetcher.has_message:
            yield receiver.fetcher.pop()
            receiver.accept()
        receiver.close()


def received(message: Any) -> Received:
    """The event of a message."""
    found: Mapping[str, Any] = message.properties
    headers = tuple(
        (name, value.encode() if isinstance(value, str) else bytes(value))
        for name, value in found.items()
        if name not in {KEY_HEADER, TOMBSTONE_HEADER}
    )
    key = bytes(found[KEY_HEADER]) if KEY_HEADER in found else None
    value = None if found.get(TOMBSTONE_HEADER) else bytes(message.body)
    return Received(message.id, message.subject, key, value, headers)


def _receiver(server: ArtemisProcess, killed: ArtemisProcess | None = None, **changed: object) -> Receiver:
    port, prefix = server.ports["plain"], uuid4().hex
    topics = f"{prefix}.shop.orders", f'{prefix}.S."ödd" / table?\n#*,::'
    return Receiver(
        partial(make, port, prefix, **changed),
        QueueContent(port, [address_of(topic) for topic in topics]),
        topics,
        many=800,
        too_large=2 << 20,
        missing={"stores progress": "a queue does not store the progress"},
        server=killed,
    )


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    yield _receiver(request.getfixturevalue("artemis"))


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with own_artemis(request.getfixturevalue("tmp_path") / "artemis") as server:
        yield _receiver(server, server, timeout="3s")
