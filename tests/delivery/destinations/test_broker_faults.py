"""What destinations at brokers do when a broker refuses them, is silent, or cuts the connection in a batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

import pytest

from cdc.config.secret import Secret
from cdc.delivery.destinations.amqp import routing_key
from cdc.delivery.destinations.amqp1 import address_of
from cdc.delivery.destinations.contract import ChecksAccess, Destination, Event
from cdc.delivery.destinations.mqtt import topic_name
from cdc.delivery.destinations.nats import subject_of
from cdc.errors import (
    CdcError,
    DestinationDenied,
    DestinationNotTrusted,
    DestinationUnavailable,
    Reaction,
    TopicMissing,
)
from tests.delivery.destinations.receivers import Receiver, amqp, amqp1, mqtt, nats, redis
from tests.delivery.destinations.sending import Assignment, deliver, event, numbered
from tests.delivery.destinations.test_destination_contract import check_delivered
from tests.fixtures.broker_process import PASSWORD, BrokerProcess
from tests.fixtures.tcp_relay import TcpRelay, tcp_relay

ODD_NAMES: Final = (
    "select", 'a"b', "a.b", "../../etc/passwd", "a/b", "a\tb", "a\nb", "a\r\nb", "%s{0}", " lead", "trail ", "CON",
    "_delta_log", ".hidden", "e\u0301", "\u00e9", "A", "a", '"s.x".y', 's."x.y"', "user%data", "user_test_data", "$1",
    "$SYS", "o'clock", "\U0001f600" * 15, "a*b", "*", ">", "a>b", "+", "#", "a+b/#", "a%2Fb", "a%252Fb", "..", ".",
    "a..b", "_INBOX.x",
    "\u0085", "\u200b", "\x7f", "\ufffe", "a\\b", "a:b", "a b", "a\u3000b", "{a}", "[::1]", "?", "&",
)  # fmt: skip
WRONG: Final = "the wrong password"


@dataclass(frozen=True)
class Broker:
    """One kind of broker: a server that tests share, with a place of its own for this test."""

    kind: str
    module: ModuleType
    server: BrokerProcess
    name: str

    @property
    def schemes(self) -> tuple[str, str]:
        """Beginnings of URLs without and with TLS."""
        found = {"amqp1": ("amqp", "amqps"), "nats": ("nats", "tls")}
        return found.get(self.kind, (self.kind, f"{self.kind}s"))

    def destination(self, port: int | None = None, *, is_secure: bool = False, **changed: object) -> Destination:
        """A destination at this port, by default that of the server."""
        found = port or self.server.ports["plain"]
        url = f"{self.schemes[is_secure]}://127.0.0.1:{found}"
        made: Destination = self.module.make(found, self.name, **{"url": url, **changed})
        return made

    def topic(self, name: str) -> str:
        return f"{self.name}.{name}"


FIXTURES: Final = {
    "amqp": ("rabbit", amqp),
    "amqp1": ("artemis", amqp1),
    "mqtt": ("mosquitto", mqtt),
    "nats": ("nats", nats),
    "redis": ("redis", redis),
}


@pytest.fixture(name="broker", params=sorted(FIXTURES))
def _broker(request: pytest.FixtureRequest) -> Broker:
    fixture, module = FIXTURES[request.param]
    return Broker(request.param, module, request.getfixturevalue(fixture), uuid4().hex)


@pytest.fixture(name="relay")
def _relay(broker: Broker) -> Iterator[TcpRelay]:
    with tcp_relay(broker.server.ports["plain"]) as relay:
        yield relay


@pytest.fixture(name="receiver")
def _receiver(request: pytest.FixtureRequest, broker: Broker) -> Iterator[Receiver]:
    with broker.module.receiver(request) as made:
        yield made


def error_of(act: Callable[[], object]) -> CdcError:
    with pytest.raises(CdcError) as caught:
        act()
    assert PASSWORD not in str(caught.value)
    assert WRONG not in str(caught.value)
    return caught.value


def test_a_wrong_password_is_refused(broker: Broker) -> None:
    destination = broker.destination(password=Secret(WRONG, "${BROKER_PASSWORD}"), timeout="15s")
    error = error_of(destination.open)
    destination.close()

    assert type(error) is DestinationDenied


def test_a_check_finds_what_opening_would_find(broker: Broker) -> None:
    denied = broker.destination(password=Secret(WRONG, "${BROKER_PASSWORD}"), timeout="15s")
    absent, found = broker.destination(port=1), broker.destination()
    assert isinstance(denied, ChecksAccess)
    assert isinstance(absent, ChecksAccess)
    assert isinstance(found, ChecksAccess)
    found.check(())

    assert type(error_of(lambda: denied.check(()))) is DestinationDenied
    assert type(error_of(lambda: absent.check(()))) is DestinationUnavailable


@pytest.mark.parametrize("kind", ["amqp", "nats"])
def test_a_check_finds_a_topic_without_a_queue_or_stream_and_does_not_create_it(
    kind: str, request: pytest.FixtureRequest
) -> None:
    fixture, module = FIXTURES[kind]
    broker = Broker(kind, module, request.getfixturevalue(fixture), uuid4().hex)
    fields: Any = {"create": False, **({"stream": None, "subjects": ()} if kind == "nats" else {})}
    for _ in range(2):
        destination = broker.destination(**fields)
        assert isinstance(destination, ChecksAccess)
        error = error_of(partial(destination.check, [broker.topic("orders")]))
        assert type(error) is TopicMissing


def test_a_broker_that_does_not_run_is_unavailable(broker: Broker) -> None:
    destination = broker.destination(port=1)
    error = error_of(destination.open)
    destination.close()

    assert type(error) is DestinationUnavailable
    assert error.reaction is Reaction.RETRY


@pytest.fixture(name="secure_port")
def _secure_port(broker: Broker, request: pytest.FixtureRequest) -> tuple[int, Path]:
    if broker.kind == "nats":
        server = request.getfixturevalue("secure_nats")
        return server.ports["plain"], server.certificate
    return broker.server.ports["secure"], broker.server.certificate


def test_a_certificate_has_to_be_trusted(broker: Broker, secure_port: tuple[int, Path]) -> None:
    port, certificate = secure_port
    untrusted = broker.destination(port, is_secure=True, timeout="15s")
    error = error_of(untrusted.open)
    untrusted.close()
    trusted = broker.destination(port, is_secure=True, ca_file=str(certificate), timeout="15s")
    trusted.open()
    trusted.close()

    assert type(error) is DestinationNotTrusted


def test_a_broker_that_is_silent_from_the_beginning_is_unavailable(broker: Broker, relay: TcpRelay) -> None:
    relay.pause()
    destination = broker.destination(relay.port, timeout="1s")
    began = time.monotonic()
    error = error_of(destination.open)
    destination.close()

    assert type(error) is DestinationUnavailable
    assert time.monotonic() - began < 10


def test_a_broker_that_falls_silent_in_a_batch_is_unavailable(
    broker: Broker, relay: TcpRelay, receiver: Receiver
) -> None:
    destination = at_relay(relay, receiver, timeout="2s")
    sent = numbered(range(90), receiver.topics)
    destination.open()
    send_and_commit(destination, sent[:30])
    relay.pause()
    began = time.monotonic()
    error = error_of(lambda: send_and_commit(destination, sent[30:60]))
    destination.close()
    took = time.monotonic() - began
    relay.resume()
    destination.open()
    send_and_commit(destination, sent[30:])
    destination.close()

    assert type(error) is DestinationUnavailable
    assert took < 10
    check_delivered(receiver, sent, again=True)


def test_a_connection_that_ends_while_the_delivery_is_idle_is_found(
    broker: Broker, relay: TcpRelay, receiver: Receiver
) -> None:
    destination = at_relay(relay, receiver)
    sent = numbered(range(20), receiver.topics)
    destination.open()
    send_and_commit(destination, sent[:10])
    relay.cut()
    error = error_of(lambda: send_and_commit(destination, sent[10:]))
    destination.close()
    destination.open()
    send_and_commit(destination, sent[10:])
    destination.close()

    assert error.reaction is Reaction.RETRY
    check_delivered(receiver, sent, again=True)


def test_cut_connections_lose_nothing(broker: Broker, relay: TcpRelay, receiver: Receiver, tmp_path: Path) -> None:
    numbers = random.Random(0)
    relay.cut_after([numbers.randrange(3_000, 30_000) for _ in range(4)])
    given = Assignment(partial(at_relay, relay, receiver), receiver.topics, 500, 50, tmp_path / "progress")
    deliver(given)

    assert relay.number_of_cuts == 4
    check_delivered(receiver, numbered(range(500), receiver.topics), again=True)


def at_relay(relay: TcpRelay, receiver: Receiver, **changed: object) -> Destination:
    """The receiver's destination, through the relay."""
    assert isinstance(receiver.make, partial)
    made: Destination = receiver.make.func(relay.port, *receiver.make.args[1:], **changed)
    return made


def send_and_commit(destination: Destination, events: Sequence[Event]) -> None:
    destination.send(events)
    destination.commit(b"%d" % (events[-1].position + 1))


def test_every_name_is_a_topic_of_its_own(broker: Broker) -> None:
    topics = [broker.topic(name) for name in ODD_NAMES]
    sent = [event(number, topic, topic.encode(), b"x") for number, topic in enumerate(topics)]
    with broker.module.reading(broker.server.ports["plain"], broker.name, topics) as received:
        destination = broker.destination()
        destination.open()
        send_and_commit(destination, sent)
        destination.close()
        got = received()

    assert {(one.id, one.topic, one.key) for one in got} == {(one.id, one.topic, one.key) for one in sent}


@pytest.mark.parametrize("mapped", [address_of, routing_key, topic_name, subject_of])
def test_names_of_topics_can_be_read_back(mapped: Callable[[str], str]) -> None:
    found = [mapped(name) for name in ODD_NAMES]

    assert [unquote(name) for name in found] == list(ODD_NAMES)


def test_subjects_have_no_wildcard_no_empty_part_and_no_white_space() -> None:
    for subject in map(subject_of, ODD_NAMES):
        assert all(subject.split("."))
        assert not set("*> \t\r\n\x00") & set(subject)
        assert not subject.startswith(("$", "_INBOX"))


def test_names_of_mqtt_topics_have_no_wildcard_and_no_reserved_beginning() -> None:
    for name in map(topic_name, ODD_NAMES):
        assert not set("+#\x00\n") & set(name)
        assert not name.startswith("$")
