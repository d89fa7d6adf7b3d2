"""The destination at Redis: its transaction over crashes, full memory, lost state and keys that are no streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from uuid import uuid4

import pytest
from redis import Redis

from cdc.delivery.destinations.contract import EventsRefused
from cdc.delivery.destinations.redis import PREFIX, RedisDestination
from cdc.errors import (
    CdcError,
    DeliveryFenced,
    DestinationDenied,
    DestinationFull,
    DestinationUnavailable,
    EventRefused,
)
from tests.delivery.destinations.receivers import redis
from tests.delivery.destinations.sending import event, numbered
from tests.fixtures.broker_process import PASSWORD
from tests.fixtures.brokers import RedisProcess


@pytest.fixture(name="port")
def _port(redis: RedisProcess) -> int:
    return redis.ports["plain"]


@pytest.fixture(name="client")
def _client(port: int) -> Iterator[Redis]:
    with redis.client(port) as client:
        yield client


@pytest.fixture(name="name")
def _name() -> str:
    return uuid4().hex


def send(destination: RedisDestination, name: str, first: int, after: int) -> None:
    destination.send(numbered(range(first, after), [name]))
    destination.commit(b"%d" % after)


def error_of_batch(destination: RedisDestination, name: str, first: int, after: int) -> CdcError:
    with pytest.raises(CdcError) as caught:
        send(destination, name, first, after)
    return caught.value


def ids(port: int, name: str) -> list[str]:
    return [one.id for one in redis.received(port, [name])]


def expected(name: str, number: int) -> list[str]:
    return [one.id for one in numbered(range(number), [name])]


def test_a_transaction_that_redis_wrote_in_part_is_not_there(own_redis: RedisProcess, name: str) -> None:
    port = own_redis.ports["plain"]
    with closing(redis.make(port, name)) as destination:
        destination.open()
        send(destination, name, 0, 10)
        (file,) = own_redis.folder.glob("appendonlydir/*.incr.aof")
        whole = file.stat().st_size
        send(destination, name, 10, 20)
        after = file.stat().st_size
        own_redis.kill()
    with file.open("r+b") as opened:
        opened.truncate(whole + (after - whole) * 2 // 3)
    own_redis.start()
    with closing(redis.make(port, name)) as destination:
        progress = destination.open()
        send(destination, name, 10, 30)

    assert progress == b"10"
    assert ids(port, name) == expected(name, 30)


def test_full_memory_makes_the_delivery_wait(own_redis: RedisProcess, name: str) -> None:
    port = own_redis.ports["plain"]
    with closing(redis.make(port, name)) as destination, redis.client(port) as client:
        destination.open()
        send(destination, name, 0, 10)
        client.config_set("maxmemory", 1)
        error = error_of_batch(destination, name, 10, 20)
        destination.close()
        client.config_set("maxmemory", 0)
        progress = destination.open()
        send(destination, name, 10, 20)

    assert isinstance(error, DestinationFull)
    assert "maxmemory" in str(error)
    assert progress == b"10"
    assert ids(port, name) == expected(name, 20)


def test_full_memory_at_the_end_of_a_batch_adds_nothing(own_redis: RedisProcess, name: str) -> None:
    port = own_redis.ports["plain"]
    with closing(redis.make(port, name)) as destination, redis.client(port) as client:
        destination.open()
        destination.send(numbered(range(10), [name]))
        client.config_set("maxmemory", 1)
        with pytest.raises(DestinationUnavailable):
            destination.commit(b"10")
        client.config_set("maxmemory", 0)
        destination.close()
        progress = destination.open()

    assert progress is None
    assert ids(port, name) == []


def test_a_key_that_is_no_stream_stops_the_delivery_before_anything_is_sent(
    port: int, client: Redis, name: str
) -> None:
    client.set(f"{name}.b", "text")
    with closing(redis.make(port, name)) as destination:
        destination.open()
        with pytest.raises(DestinationUnavailable, match="is no stream, but a string"):
            destination.send(numbered(range(10), [f"{name}.a", f"{name}.b"]))

    assert ids(port, f"{name}.a") == []


def test_the_progress_is_not_stored_without_the_events(port: int, client: Redis, name: str) -> None:
    with closing(redis.make(port, name)) as destination:
        destination.open()
        destination.send(numbered(range(10), [name]))
        client.set(name, "text")
        with pytest.raises(DestinationUnavailable, match="WRONGTYPE"):
            destination.commit(b"10")
        destination.close()
        progress = destination.open()

    assert progress is None


def test_a_state_that_was_removed_in_a_batch_is_not_taken_for_another_process(
    port: int, client: Redis, name: str
) -> None:
    state = f"{PREFIX}{redis.identity(name)}"
    with closing(redis.make(port, name)) as destination:
        destination.open()
        send(destination, name, 0, 10)
        client.delete(state)
        between = error_of_batch(destination, name, 10, 20)
        destination.close()
        first = destination.open()
        destination.send(numbered(range(10), [name]))
        client.delete(state)
        with pytest.raises(DestinationUnavailable, match="was removed"):
            destination.commit(b"10")

    assert isinstance(between, DestinationUnavailable)
    assert first is None
    assert ids(port, name) == expected(name, 10)


def test_a_fenced_process_does_not_begin_a_batch(port: int, name: str) -> None:
    with closing(redis.make(port, name)) as first, closing(redis.make(port, name)) as second:
        first.open()
        second.open()
        error = error_of_batch(first, name, 0, 10)

    assert isinstance(error, DeliveryFenced)


def test_a_stream_is_trimmed_only_on_request(port: int, client: Redis, name: str) -> None:
    for topic, changed in ((f"{name}.all", {}), (f"{name}.some", {"max_length": 100})):
        with closing(redis.make(port, topic, **changed)) as destination:
            destination.open()
            send(destination, topic, 0, 1000)

    assert client.xlen(f"{name}.all") == 1000
    assert 100 <= client.xlen(f"{name}.some") < 300
    assert ids(port, f"{name}.some")[-1] == expected(name, 1000)[-1]


def test_a_batch_may_not_be_larger_than_redis_keeps(port: int, name: str) -> None:
    with closing(redis.make(port, name, max_batch=20_000)) as destination:
        destination.open()
        error = error_of_batch(destination, name, 0, 1000)
        destination.close()
        progress = destination.open()
        send(destination, name, 0, 10)

    assert isinstance(error, DestinationUnavailable)
    assert "client-query-buffer-limit" in error.fix
    assert progress is None
    assert ids(port, name) == expected(name, 10)


def test_a_topic_cannot_be_the_state_of_a_delivery(port: int, name: str) -> None:
    with closing(redis.make(port, name)) as destination:
        destination.open()
        with pytest.raises(EventsRefused) as caught:
            destination.send([event(1, f"{PREFIX}shop.{name}", b"k", b"x")])

    assert [type(reason) for reason in caught.value.refused.values()] == [EventRefused]


def test_a_user_without_privileges_is_denied(own_redis: RedisProcess, name: str) -> None:
    port = own_redis.ports["plain"]
    with redis.client(port) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "+@all", "-xadd")
    with closing(redis.make(port, name, user="reader")) as destination:
        destination.open()
        error = error_of_batch(destination, name, 0, 10)

    assert isinstance(error, DestinationDenied)
    assert "xadd" in str(error)


def test_a_database_is_chosen_by_the_url(port: int, name: str) -> None:
    with closing(redis.make(port, name, url=f"redis://127.0.0.1:{port}/3")) as destination:
        destination.open()
        send(destination, name, 0, 10)
    with Redis(port=port, password=PASSWORD, db=3) as client:
        found = client.xlen(name)

    assert found == 10
    assert ids(port, name) == []
