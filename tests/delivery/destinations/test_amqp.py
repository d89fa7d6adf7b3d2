"""The destination at RabbitMQ: queues that are missing, full or of another kind, and what a message looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pika
import pytest

from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.errors import CdcError, DestinationDenied, DestinationFull, EventRefused, TopicMissing
from tests.delivery.destinations.receivers import amqp
from tests.delivery.destinations.sending import event, numbered
from tests.fixtures.brokers import RabbitProcess


@pytest.fixture(name="port")
def _port(rabbit: RabbitProcess) -> int:
    return rabbit.ports["plain"]


@pytest.fixture(name="channel")
def _channel(port: int) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    with amqp.connect(port) as connection:
        yield connection.channel()


@pytest.fixture(name="name")
def _name() -> str:
    return uuid4().hex


def deliver(port: int, *events: Event, **changed: Any) -> CdcError | EventsRefused | None:
    """Send events in one batch; the error that comes."""
    destination = amqp.make(port, **changed)
    try:
        destination.open()
        destination.send(events)
        destination.commit(b"")
    except (CdcError, EventsRefused) as error:
        return error
    finally:
        destination.close()
    return None


def test_a_message_is_persistent_and_says_what_it_is(port: int, channel, name: str) -> None:
    error = deliver(port, event(1, name, b"key", b'{"a": 1}', ("text", "grün".encode())), create=True)
    _, properties, body = channel.basic_get(name)

    assert error is None
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")
    assert properties.message_id == event(1, name, None, None).id
    assert (properties.headers["text"], properties.headers["cdc.key"], body) == ("grün", "key", b'{"a": 1}')


def test_a_missing_queue_stops_its_topic_before_a_later_event(port: int, channel, name: str) -> None:
    channel.queue_declare(f"{name}.there", durable=True)
    sent = numbered(range(20), [f"{name}.there", f"{name}.missing"])
    error = deliver(port, *sent, create=False)
    channel.queue_declare(f"{name}.missing", durable=True)
    again = deliver(port, *sent, create=False)
    got = amqp.received(port, [f"{name}.missing"])

    assert isinstance(error, TopicMissing)
    assert f"{name}.missing" in str(error)
    assert again is None
    assert [one.id for one in got] == [one.id for one in sent if one.topic == f"{name}.missing"]


def test_a_queue_that_goes_away_is_missing(port: int, channel, name: str) -> None:
    destination = amqp.make(port, create=True)
    destination.open()
    destination.send([event(1, name, b"k", b"1")])
    destination.commit(b"1")
    channel.queue_delete(name)
    destination.send([event(2, name, b"k", b"2")])
    with pytest.raises(TopicMissing):
        destination.commit(b"2")
    destination.close()


def test_an_exchange_is_created_and_needs_a_queue(port: int, channel, name: str) -> None:
    sent = event(1, f"{name}.orders", b"k", b"x")
    error = deliver(port, sent, exchange=name, create=True)
    channel.queue_declare(f"{name}.all", durable=True)
    channel.queue_bind(f"{name}.all", name, f"{name}.*")
    again = deliver(port, sent, exchange=name, create=False)
    method, _, body = channel.basic_get(f"{name}.all")

    assert isinstance(error, TopicMissing)
    assert again is None
    assert (method.routing_key, body) == (f"{name}.orders", b"x")


def test_a_missing_exchange_is_named(port: int, name: str) -> None:
    error = deliver(port, event(1, "orders", b"k", b"x"), exchange=name, create=False)

    assert isinstance(error, TopicMissing)
    assert name in str(error)


def test_a_queue_that_rejects_events_makes_the_delivery_wait(port: int, channel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
    sent = numbered(range(10), [name])
    error = deliver(port, *sent, create=False, in_flight=1)
    got = amqp.received(port, [name])
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True)
    again = deliver(port, *sent, create=False, in_flight=1)

    assert isinstance(error, DestinationFull)
    assert [one.id for one in got] == [one.id for one in sent[:3]]
    assert again is None


def test_a_queue_of_another_kind_is_used_as_it_is(port: int, channel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 100})

    assert deliver(port, event(1, name, b"k", b"x"), create=True) is None


@pytest.mark.parametrize("topic", ["", "x" * 256, "%" * 100])
def test_a_topic_that_cannot_be_a_routing_key_is_refused(port: int, topic: str) -> None:
    error = deliver(port, event(1, topic, b"k", b"x"))

    assert isinstance(error, EventsRefused)
    assert [type(reason) for reason in error.refused.values()] == [EventRefused]


def test_a_name_that_the_broker_reserves_is_denied(port: int, name: str) -> None:
    error = deliver(port, exchange=f"amq.{name}", create=True)

    assert type(error) is DestinationDenied
    assert "ACCESS_REFUSED" in str(error)


def test_a_virtual_host_that_does_not_exist_is_denied(port: int) -> None:
    error = deliver(port, url=f"amqp://127.0.0.1:{port}/nowhere")

    assert isinstance(error, DestinationDenied)
    assert "'nowhere'" in str(error)
