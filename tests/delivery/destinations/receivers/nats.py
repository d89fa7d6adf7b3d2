"""NATS JetStream: a stream of its own for each test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from urllib.parse import unquote, unquote_to_bytes
from uuid import uuid4

import nats
import pytest
from nats.aio.msg import Msg

from cdc.config.destinations import NatsDelivery
from cdc.config.secret import Secret
from cdc.delivery.destinations.broker_connection import KEY_HEADER, TOMBSTONE_HEADER
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.nats import ID_HEADER, STREAM_HEADER, NatsDestination
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.broker_process import PASSWORD, USER, own_broker
from tests.fixtures.brokers import NatsProcess

CRASH_POINTS = ()
IDENTITY = DeliveryIdentity("shop", "events", "0123456789abcdef")


def settings(port: int, **changed: object) -> NatsDelivery:
    given = {
        "name": "events",
        "type": "nats",
        "url": f"nats://127.0.0.1:{port}",
        "user": USER,
        "password": Secret(PASSWORD, "${BROKER_PASSWORD}"),
        "timeout": "10s",
    }
    return NatsDelivery.model_validate({**given, **changed}, context={})


def make(port: int, name: str = "perf", **changed: object) -> NatsDestination:
    given = {"stream": name, "create": True, "subjects": [name, f"{name}.>"], **changed}
    return NatsDestination(settings(port, **given), IDENTITY)


@contextmanager
def reading(port: int, name: str, topics: Sequence[str]) -> Iterator[Callable[[], list[Received]]]:
    """What a consumer gets of these topics."""
    del topics
    yield partial(received, port, name)


def received(port: int, stream: str) -> list[Received]:
    return asyncio.run(_read(port, stream))


async def _read(port: int, stream: str) -> list[Received]:
    client = await nats.connect(f"nats://127.0.0.1:{port}", user=USER, password=PASSWORD)
    try:
        streams = client.jetstream(timeout=30)
        try:
            number = (await streams.stream_info(stream)).state.messages
        except nats.js.errors.NotFoundError:
            return []
        if not number:
            return []
        subscribed = await streams.subscribe(f"{stream}.>", stream=stream, ordered_consumer=True)
        return [_message(await subscribed.next_msg(30)) for _ in range(number)]
    finally:
        await client.close()


def _message(message: Msg) -> Received:
    headers = dict(message.headers or {})
    assert headers.pop(STREAM_HEADER)
    name = headers.pop(ID_HEADER)
    key = headers.pop(KEY_HEADER, None)
    value = None if headers.pop(TOMBSTONE_HEADER, None) else message.data
    given = tuple((unquote(one), unquote_to_bytes(content)) for one, content in headers.items())
    return Received(name, unquote(message.subject), None if key is None else unquote_to_bytes(key), value, given)


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    yield _receiver(request.getfixturevalue("nats"))


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with own_broker(request.getfixturevalue("tmp_path") / "nats", NatsProcess) as server:
        yield _receiver(server, server)


def _receiver(server: NatsProcess, killed: NatsProcess | None = None) -> Receiver:
    port, stream = server.ports["plain"], uuid4().hex
    topics = f"{stream}.shop.orders", f'{stream}.S."ödd"..\\ / %2A *> \U0001f600 table?\n.'
    return Receiver(
        partial(make, port, stream),
        partial(received, port, stream),
        topics,
        too_large=4 << 20,
        missing={"stores progress": "a stream does not store the progress"},
        server=killed,
    )
