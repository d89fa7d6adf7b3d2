"""RabbitMQ: a queue for each topic, from which a consumer reads without removing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote
from uuid import uuid4

import pika
import pytest

from cdc.config.destinations import AmqpDelivery
from cdc.config.secret import Secret
from cdc.delivery.destinations.amqp import AmqpDestination, routing_key
from cdc.delivery.destinations.broker_connection import KEY_HEADER, TOMBSTONE_HEADER
from cdc.delivery.destinations.contract import DeliveryIdentity
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.broker_process import PASSWORD, USER, own_broker
from tests.fixtures.brokers import RabbitProcess
from tests.fixtures.waiting import until

CRASH_POINTS = ()


def settings(port: int, **changed: object) -> AmqpDelivery:
    given = {
        "name": "events",
        "type": "amqp",
        "url": f"amqp://127.0.0.1:{port}",
        "user": USER,
        "password": Secret(PASSWORD, "${BROKER_PASSWORD}"),
        "max_size": 2 << 20,
        "timeout": "10s",
        "create": True,
    }
    return AmqpDelivery.model_validate({**given, **changed}, context={})


def make(port: int, name: str = "perf", **changed: object) -> AmqpDestination:
    return AmqpDestination(settings(port, **changed), DeliveryIdentity("shop", name, "0123456789abcdef"))


@contextmanager
def reading(port: int, name: str, topics: Sequence[str]) -> Iterator[Callable[[], list[Received]]]:
    """What a consumer gets of these topics."""
    del name
    yield partial(received, port, topics)


def connect(port: int) -> pika.BlockingConnection:
    login = pika.PlainCredentials(USER, PASSWORD)
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, credentials=login))


def received(port: int, topics: Sequence[str]) -> list[Received]:
    with connect(port) as connection:
        return [message for topic in topics for message in _read(connection, routing_key(topic))]


def _read(connection: pika.BlockingConnection, queue: str) -> Iterator[Received]:
    channel = connection.channel()
    try:
        while True:
            method, properties, body = channel.basic_get(queue)
            if method is None:
                break
            headers = dict(properties.headers)
            key = headers.pop(KEY_HEADER, None)
            value = None if headers.pop(TOMBSTONE_HEADER, False) else body
            given = tuple((name, _bytes(content)) for name, content in headers.items())
            yield Received(
                properties.message_id, unquote(method.routing_key), None if key is None else _bytes(key), value, given
            )
    except pika.exceptions.ChannelClosedByBroker:
        return  # there is no such queue yet
    channel.close()


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    server: RabbitProcess = request.getfixturevalue("rabbit")
    yield _receiver(server)


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with own_broker(request.getfixturevalue("tmp_path") / "rabbit", RabbitProcess) as server:
        made = _receiver(server, server)
        declare_durably(server, made.topics)
        yield made


def declare_durably(server: RabbitProcess, topics: Sequence[str]) -> None:
    """Declare the queues, and wait until the broker has written that to its files.

    It confirms a declaration some seconds earlier, and a queue that is gone after a crash takes its events with it.
    """
    names = [routing_key(topic) for topic in topics]
    with connect(server.ports["plain"]) as connection:
        for name in names:
            connection.channel().queue_declare(name, durable=True)
        files = server.folder / "data" / "test@localhost"
        until(lambda: _are_written(names, files), "queues in the files of the broker")


def _are_written(names: Sequence[str], files: Path) -> bool:
    """Whether the broker keeps all these declarations over a crash: one in its log counts only with its decision."""
    tables = b"".join(file.read_bytes() for file in files.glob("rabbit_durable_queue.DC*"))
    log = (files / "LATEST.LOG").read_bytes()
    logged = [name.encode() for name in names if name.encode() not in tables]
    if not all(name in log for name in logged):
        return False
    return not logged or log.partition(logged[0])[2].count(b"committed") >= len(logged)


def _receiver(server: RabbitProcess, killed: RabbitProcess | None = None) -> Receiver:
    port, prefix = server.ports["plain"], uuid4().hex
    topics = f"{prefix}.shop.orders", f'{prefix} S."ödd" / *#+ \U0001f600 table?\n'
    return Receiver(
        partial(make, port, prefix),
        partial(received, port, topics),
        topics,
        too_large=(2 << 20) + 1,
        missing={"stores progress": "a queue does not store the progress"},
        server=killed,
    )
