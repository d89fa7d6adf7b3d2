"""Mosquitto: a subscriber with a session that the broker keeps, from before the first event on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from urllib.parse import unquote, unquote_to_bytes
from uuid import uuid4

import pytest
from paho.mqtt.client import CallbackAPIVersion, Client, MQTTMessage, MQTTv5
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from cdc.config.destinations import MqttDelivery
from cdc.config.secret import Secret
from cdc.delivery.destinations.broker_connection import KEY_HEADER, TOMBSTONE_HEADER
from cdc.delivery.destinations.contract import ID_HEADER, DeliveryIdentity
from cdc.delivery.destinations.mqtt import MqttDestination, topic_name
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.broker_process import PASSWORD, USER, own_broker
from tests.fixtures.brokers import MosquittoProcess
from tests.fixtures.waiting import until

CRASH_POINTS = ()


def settings(port: int, **changed: object) -> MqttDelivery:
    given = {
        "name": "events",
        "type": "mqtt",
        "url": f"mqtt://127.0.0.1:{port}",
        "user": USER,
        "password": Secret(PASSWORD, "${BROKER_PASSWORD}"),
        "timeout": "10s",
    }
    return MqttDelivery.model_validate({**given, **changed}, context={})


def make(port: int, name: str = "perf", **changed: object) -> MqttDestination:
    return MqttDestination(settings(port, **changed), DeliveryIdentity("shop", name, "0123456789abcdef"))


@contextmanager
def reading(port: int, name: str, topics: Sequence[str]) -> Iterator[Callable[[], list[Received]]]:
    """What a consumer gets of these topics from now on."""
    del name
    subscriber = Subscriber(port, topics)
    yield subscriber.received
    subscriber.close()


class Subscriber:
    """A subscriber that comes back to its session, and keeps every message."""

    def __init__(self, port: int, topics: Sequence[str]) -> None:
        self._topics, self._marker = topics, f"marker/{uuid4().hex}"
        self._messages: list[MQTTMessage] = []
        self._is_subscribed = False
        self._client = Client(CallbackAPIVersion.VERSION2, client_id=uuid4().hex, protocol=MQTTv5)
        self._client.username_pw_set(USER, PASSWORD)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_message = lambda _client, _data, message: self._messages.append(message)
        self._client.on_connect = self._subscribe
        self._client.on_subscribe = self._confirm
        session = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = 3600
        self._client.connect("127.0.0.1", port, clean_start=False, properties=session)
        self._client.loop_start()
        until(lambda: self._is_subscribed, "a subscription")

    def received(self) -> list[Received]:
        """What it has got by now: everything that comes before a message of its own."""
        name = uuid4().hex.encode()
        until(self._client.is_connected, "a connected subscriber")
        self._client.publish(self._marker, name, 1)
        until(lambda: any(one.payload == name for one in self._messages), "its own message")
        return [_message(one) for one in self._messages if one.topic != self._marker]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _subscribe(self, client: Client, *_: object) -> None:
        client.subscribe([(topic_name(topic), 1) for topic in [*self._topics, self._marker]])

    def _confirm(self, *_: object) -> None:
        self._is_subscribed = True


def _message(message: MQTTMessage) -> Received:
    pairs = [(unquote(name), unquote_to_bytes(text)) for name, text in message.properties.UserProperty]
    found = dict(pairs)
    value = None if TOMBSTONE_HEADER in found else bytes(message.payload)
    headers = tuple(pair for pair in pairs if pair[0] not in {KEY_HEADER, TOMBSTONE_HEADER})
    return Received(found[ID_HEADER].decode(), unquote(message.topic), found.get(KEY_HEADER), value, headers)


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with _receiver(request.getfixturevalue("mosquitto")) as made:
        yield made


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    folder = request.getfixturevalue("tmp_path") / "mosquitto"
    with own_broker(folder, MosquittoProcess) as server, _receiver(server, server) as made:
        yield made


@contextmanager
def _receiver(server: MosquittoProcess, killed: MosquittoProcess | None = None) -> Iterator[Receiver]:
    port, name = server.ports["plain"], uuid4().hex
    topics = f"{name}.shop.orders", f'{name} S."ödd" / *#+ %23 \U0001f600 table?\n'
    with reading(port, name, topics) as received:
        yield Receiver(
            partial(make, port, name),
            received,
            topics,
            too_large=3 << 20,
            missing={"stores progress": "a broker of MQTT does not store the progress"},
            server=killed,
        )
