"""Redis: streams with names that begin with the same word, in one server for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from uuid import uuid4

import pytest
from redis import Redis

from cdc.config.destinations import RedisDelivery
from cdc.config.secret import Secret
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.redis import HEADER_PREFIX, PREFIX, RedisDestination
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.broker_process import PASSWORD, own_broker
from tests.fixtures.brokers import RedisProcess

CRASH_POINTS = ("redis_queued", "redis_executed")


def settings(port: int, **changed: object) -> RedisDelivery:
    given = {
        "name": "events",
        "type": "redis",
        "url": f"redis://127.0.0.1:{port}",
        "password": Secret(PASSWORD, "${BROKER_PASSWORD}"),
        "timeout": "10s",
        "max_batch": "16MiB",
    }
    return RedisDelivery.model_validate({**given, **changed}, context={})


def identity(name: str) -> DeliveryIdentity:
    return DeliveryIdentity("shop", name, "0123456789abcdef")


def make(port: int, name: str = "perf", **changed: object) -> RedisDestination:
    return RedisDestination(settings(port, **changed), identity(name))


@contextmanager
def reading(port: int, name: str, topics: Sequence[str]) -> Iterator[Callable[[], list[Received]]]:
    """What a consumer gets of these topics."""
    del name
    yield partial(received, port, topics)


def client(port: int) -> Redis:
    return Redis(port=port, password=PASSWORD, socket_timeout=30)


def received(port: int, topics: Sequence[str]) -> list[Received]:
    with client(port) as connection:
        return [_message(topic, fields) for topic in topics for _, fields in connection.xrange(topic)]


def forget_progress(port: int, name: str) -> None:
    with client(port) as connection:
        assert connection.delete(f"{PREFIX}{identity(name)}")


def _message(topic: str, fields: dict[bytes, bytes]) -> Received:
    begin = HEADER_PREFIX.encode()
    headers = tuple((name.removeprefix(begin).decode(), value) for name, value in fields.items() if begin in name)
    return Received(fields[b"id"].decode(), topic, fields.get(b"key"), fields.get(b"value"), headers)


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    yield _receiver(request.getfixturevalue("redis"))


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with own_broker(request.getfixturevalue("tmp_path") / "redis", RedisProcess) as server:
        yield _receiver(server, server)


def _receiver(server: RedisProcess, killed: RedisProcess | None = None) -> Receiver:
    port, name = server.ports["plain"], uuid4().hex
    topics = f"{name}.shop.orders", f'{name} S."ödd" / *#+ \U0001f600 table?\n'
    return Receiver(
        partial(make, port, name),
        partial(received, port, topics),
        topics,
        too_large=16 << 20,
        server=killed,
        forget_progress=partial(forget_progress, port, name),
    )
