"""The destination at a broker of MQTT: the limits that the broker states, refused topics, and retained messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from cdc.delivery.destinations.acknowledgements import BrokerAnswer
from cdc.delivery.destinations.contract import EventsRefused
from cdc.delivery.destinations.mqtt import MqttDestination
from cdc.errors import CdcError, DestinationDenied, DestinationFull, DestinationUnavailable, EventRefused
from tests.delivery.destinations.receivers import mqtt
from tests.delivery.destinations.sending import event, numbered
from tests.fixtures.broker_process import USER, own_broker
from tests.fixtures.brokers import MosquittoProcess


@pytest.fixture(name="port")
def _port(mosquitto: MosquittoProcess) -> int:
    return mosquitto.ports["plain"]


@pytest.fixture(name="name")
def _name() -> str:
    return uuid4().hex


class StrictMosquitto(MosquittoProcess):
    """Takes five unacknowledged messages, and only some topics."""

    def command(self) -> list[str]:
        rules = self.folder / "rules"
        rules.write_text(f"user {USER}\ntopic readwrite open/#\ntopic readwrite marker/#\n", encoding="ascii")
        rules.chmod(0o600)
        self.settings = f"acl_file {rules}\nmax_inflight_messages 5\nretain_available false"
        return [*super().command()]


@pytest.fixture(name="strict")
def _strict(tmp_path: Path) -> Iterator[int]:
    with own_broker(tmp_path, StrictMosquitto) as server:
        yield server.ports["plain"]


def test_no_more_events_are_unacknowledged_than_the_broker_takes(strict: int, name: str) -> None:
    sent = [event(number, "open/a", None, b"x") for number in range(500)]
    with mqtt.reading(strict, name, ["open/a"]) as received, closing(mqtt.make(strict, name)) as destination:
        destination.open()
        destination.send(sent)
        destination.commit(b"")
        got = received()

    assert sorted(one.id for one in got) == sorted(one.id for one in sent)


def test_a_topic_that_the_user_may_not_write_is_denied(strict: int, name: str) -> None:
    with closing(mqtt.make(strict, name)) as destination:
        destination.open()
        destination.send([event(1, "closed/a", b"k", b"x")])
        with pytest.raises(DestinationDenied, match="Not authorized"):
            destination.commit(b"")


def test_a_broker_that_retains_nothing_is_named(strict: int, name: str) -> None:
    destination = mqtt.make(strict, name, retain=True)
    with closing(destination), pytest.raises(DestinationDenied, match="retain"):
        destination.open()


@pytest.mark.parametrize("retain", [False, True])
def test_a_later_subscriber_gets_the_last_event_on_request(port: int, name: str, retain: bool) -> None:
    sent = numbered(range(10), [name])
    with closing(mqtt.make(port, name, retain=retain)) as destination:
        destination.open()
        destination.send([one._replace(key=b"k") for one in sent])
        destination.commit(b"")
    with mqtt.reading(port, name, [name]) as received:
        got = received()

    assert [one.id for one in got] == ([sent[-1].id] if retain else [])


@pytest.mark.parametrize("topic", ["", "x" * 70_000, "a/" * 200])
def test_a_topic_that_no_broker_takes_is_refused(port: int, name: str, topic: str) -> None:
    with closing(mqtt.make(port, name)) as destination:
        destination.open()
        with pytest.raises(EventsRefused) as caught:
            destination.send([event(1, topic, b"k", b"x")])

    assert [type(reason) for reason in caught.value.refused.values()] == [EventRefused]


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0x87, DestinationDenied), (0x90, EventRefused), (0x97, DestinationFull)],
)
def test_what_a_broker_answers_to_an_event_has_a_meaning(name: str, code: int, expected: type[CdcError]) -> None:
    answer = mqtt.make(1, name)._answer(1, ReasonCode(PacketTypes.PUBACK, identifier=code))

    assert type(answer.error if isinstance(answer, BrokerAnswer) else answer) is expected


def test_a_second_process_ends_the_connection_of_the_first(port: int, name: str) -> None:
    with closing(mqtt.make(port, name)) as first, closing(mqtt.make(port, name)) as second:
        first.open()
        second.open()
        second.send([event(1, name, b"k", b"x")])
        second.commit(b"")
        with pytest.raises(DestinationUnavailable):
            send_until_it_fails(first, name)


def send_until_it_fails(destination: MqttDestination, name: str) -> None:
    for number in range(1000):
        destination.send([event(number, name, b"k", b"x")])
        destination.commit(b"")
