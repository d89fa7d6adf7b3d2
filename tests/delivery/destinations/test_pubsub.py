"""Google Pub/Sub: messages, failures of the service and of connections, credentials, and where events are sent."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cdc.config.destinations import PubsubDelivery
from cdc.delivery.destinations.contract import Destination, Event, EventsRefused
from cdc.delivery.destinations.pubsub import EMULATOR, LARGEST, PubsubDestination, attributes_of, ordering_key
from cdc.errors import (
    CdcError,
    DestinationDenied,
    DestinationFull,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    Reaction,
    TopicMissing,
)
from tests.delivery.destinations.receivers import Received
from tests.delivery.destinations.receivers.pubsub import IDENTITY, received_message
from tests.delivery.destinations.sending import Assignment, deliver, event, numbered
from tests.fixtures.pubsub import Pubsub, Subscriber
from tests.fixtures.tcp_relay import TcpRelay, tcp_relay
from tests.fixtures.waiting import until


def make(**given: Any) -> PubsubDestination:
    return PubsubDestination(PubsubDelivery.model_validate(given), IDENTITY)


@pytest.fixture(name="topic")
def _topic(pubsub: Pubsub) -> str:
    return f"{pubsub.prefix}.orders"


@pytest.fixture(name="received")
def _received(pubsub: Pubsub, topic: str) -> Iterator[Callable[[], list[Received]]]:
    """What a subscriber of the topic has got by now, in its order, what came twice included."""
    subscriber = Subscriber(pubsub.server.ports["plain"], [topic])
    yield lambda: [received_message(message) for message in subscriber()]
    subscriber.close()


@pytest.fixture(name="relay")
def _relay(pubsub: Pubsub) -> Iterator[TcpRelay]:
    with tcp_relay(pubsub.server.ports["plain"]) as relay:
        yield relay


def send(destination: Destination, events: Sequence[Event]) -> None:
    """Send one batch, as the loop does after an error: with a new connection."""
    destination.open()
    try:
        destination.send(events)
        destination.commit(b"1")
    finally:
        destination.close()


def error_of(destination: Destination, events: Sequence[Event]) -> CdcError:
    with pytest.raises(CdcError) as caught:
        send(destination, events)
    return caught.value


def refused(destination: Destination, events: Sequence[Event]) -> EventsRefused:
    with pytest.raises(EventsRefused) as caught:
        send(destination, events)
    return caught.value


def names(events: Sequence[Event | Received]) -> list[str]:
    return [one.id for one in events]


@pytest.mark.parametrize(
    ("code", "is_taken"),
    [("UNAVAILABLE", False), ("RESOURCE_EXHAUSTED", False), ("DEADLINE_EXCEEDED", True), ("INTERNAL", True)],
)
def test_the_order_of_a_key_survives_a_request_in_its_middle_that_fails(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]], code: str, is_taken: bool
) -> None:
    sent = [event(number, topic, b"%d" % (number % 7 == 0), b"x") for number in range(3500)]
    pubsub.inject(code, id=sent[1501].id, times=2, takes=is_taken)
    send(make(**pubsub.settings()), sent)
    got = received()

    assert pubsub.hits == 2
    for key in (b"0", b"1"):
        assert list(dict.fromkeys(names([one for one in got if one.key == key]))) == names(
            [one for one in sent if one.key == key]
        )
    assert (len(got) > len(sent)) == is_taken


def test_a_message_that_the_service_refuses_is_found_among_others_of_its_request(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]
) -> None:
    sent = [event(number, topic, b"%d" % (number % 2), b"x") for number in range(40)]
    pubsub.inject("INVALID_ARGUMENT", id=sent[10].id, times=1000)
    found = refused(make(**pubsub.settings()), sent)

    assert {name: type(error) for name, error in found.refused.items()} == {sent[10].id: EventRefused}
    assert found.others_acknowledged
    assert names([one for one in received() if one.key == b"0"]) == names(sent[:10:2])
    assert names([one for one in received() if one.key == b"1"]) == names(sent[1::2])


def test_a_service_that_fails_before_the_refused_message_is_found_is_unavailable(pubsub: Pubsub, topic: str) -> None:
    sent = [event(number, topic, b"key", b"x") for number in range(40)]
    pubsub.inject("INVALID_ARGUMENT", id=sent[30].id, times=1000)
    pubsub.inject("UNAVAILABLE", id=sent[10].id, times=1000)
    error = error_of(make(**pubsub.settings(timeout="1s")), sent)

    assert type(error) is DestinationUnavailable


def test_a_refused_event_without_key_does_not_stop_others(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]
) -> None:
    sent = [event(number, topic, None, b"x") for number in range(9)]
    pubsub.inject("INVALID_ARGUMENT", id=sent[4].id, times=1000)
    found = refused(make(**pubsub.settings()), sent)

    assert list(found.refused) == [sent[4].id]
    assert sorted(names(received())) == names([*sent[:4], *sent[5:]])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("NOT_FOUND", TopicMissing),
        ("PERMISSION_DENIED", DestinationDenied),
        ("UNAUTHENTICATED", DestinationDenied),
        ("RESOURCE_EXHAUSTED", DestinationFull),
        ("UNAVAILABLE", DestinationUnavailable),
        ("ABORTED", DestinationUnavailable),
        ("FAILED_PRECONDITION", DestinationUnavailable),
    ],
)
def test_the_delivery_waits_while_the_service_takes_nothing(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]], code: str, expected: type[CdcError]
) -> None:
    destination, sent = make(**pubsub.settings(timeout="1s")), [event(1, topic, b"key", b"secret value")]
    send(destination, sent)
    pubsub.inject(code, times=1000)
    pubsub.inject(code, method="CreateTopic", times=1000)
    error = error_of(destination, [event(2, topic, b"key", b"secret value")])

    assert type(error) is expected
    assert error.reaction is Reaction.RETRY
    assert "secret" not in str(error)
    assert names(received()) == names(sent)


def test_what_is_larger_than_the_server_takes_is_a_dead_letter(pubsub: Pubsub, topic: str) -> None:
    pubsub.inject("RESOURCE_EXHAUSTED", details="Received message larger than max (11 vs. 10)", times=1000)
    sent = [event(1, topic, b"key", b"x")]

    assert type(refused(make(**pubsub.settings()), sent).refused[sent[0].id]) is EventTooLarge


def test_the_largest_event_fills_a_request(pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]) -> None:
    destination, empty = make(**pubsub.settings()), event(1, topic, b"key", b"")
    most = LARGEST - 5 - sum(len(name) + len(value) + 8 for name, value in attributes_of(empty).items()) - 20
    send(destination, [event(1, topic, b"key", b"x" * most), event(2, topic, b"key", b"x" * most)])
    found = refused(destination, [event(3, topic, b"key", b"x" * (most + 100))])

    assert [len(one.value or b"") for one in received()] == [most, most]
    assert [type(one) for one in found.refused.values()] == [EventTooLarge]


def test_a_topic_that_is_missing_is_created_only_if_the_delivery_may(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]
) -> None:
    sent = [event(1, topic, b"key", b"x")]
    error = error_of(make(**pubsub.settings(create=False)), sent)
    before = received()
    send(make(**pubsub.settings(create=True)), sent)
    send(make(**pubsub.settings(create=False)), sent)

    assert type(error) is TopicMissing
    assert before == []
    assert names(received()) == names([*sent, *sent])


def test_a_check_finds_missing_topics_and_creates_none(pubsub: Pubsub, topic: str) -> None:
    fixed = make(**pubsub.settings(create=False))
    fixed.check([])
    with pytest.raises(TopicMissing):
        fixed.check([topic])
    make(**pubsub.settings(create=True)).check([topic])
    with pytest.raises(TopicMissing):
        fixed.check([topic])
    send(make(**pubsub.settings(create=True)), [event(1, topic, b"key", b"x")])
    fixed.check([topic])


def test_a_check_needs_no_right_to_see_topics_but_credentials(pubsub: Pubsub, topic: str) -> None:
    pubsub.inject("PERMISSION_DENIED", method="GetTopic", topic=topic, times=1)
    make(**pubsub.settings(create=False)).check([topic])
    pubsub.inject("UNAUTHENTICATED", method="GetTopic", topic=topic, times=1)
    with pytest.raises(DestinationDenied):
        make(**pubsub.settings(create=True)).check([topic])


def test_a_topic_that_may_not_be_created_is_a_denied_destination(pubsub: Pubsub, topic: str) -> None:
    pubsub.inject("PERMISSION_DENIED", method="CreateTopic")
    error = error_of(make(**pubsub.settings()), [event(1, topic, b"key", b"x")])

    assert type(error) is DestinationDenied
    assert "cannot be created" in str(error)
    assert "roles/pubsub.editor" in error.fix


def test_one_topic_may_take_all_events(pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]) -> None:
    sent = numbered(range(20), ["orders", "1 / %", "goog"])
    send(make(**pubsub.settings(topic_name=topic)), sent)

    assert {(one.id, one.topic) for one in received()} == {(one.id, one.topic) for one in sent}


@pytest.mark.parametrize("topic", ["1orders", "googles", "ab", "x" * 256, "ü"])
def test_a_name_that_can_be_no_topic_makes_dead_letters(pubsub: Pubsub, topic: str) -> None:
    found = refused(make(**pubsub.settings()), [event(1, topic, b"key", b"x")])

    assert [type(one) for one in found.refused.values()] == [EventRefused]


@pytest.mark.parametrize("key", [b"x" * 1025, b"\xff" * 769])
def test_a_key_that_no_attribute_can_have_makes_dead_letters(pubsub: Pubsub, topic: str, key: bytes) -> None:
    found = refused(make(**pubsub.settings()), [event(1, topic, key, b"x")])

    assert [type(one) for one in found.refused.values()] == [EventRefused]


def test_the_longest_keys_and_headers_arrive(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]
) -> None:
    headers = [*((f"h{number:03}", b"v" * 1000) for number in range(90)), *((f"i{n}", b"") for n in range(30))]
    sent = [
        event(1, topic, b"x" * 1024, b"x"),
        event(2, topic, b"\xff" * 768, b"x"),
        event(3, topic, b"key", b"x", *headers),
        event(4, topic, b"key", b"x", ("cdc.key", b"1"), ("google", b"2"), ("n" * 257, b"3"), ("", b"4")),
    ]
    send(make(**pubsub.settings()), sent)

    assert {one.id: (one.key, set(one.headers)) for one in received()} == {
        one.id: (one.key, set(one.headers)) for one in sent
    }


def test_keys_that_share_an_ordering_key_keep_their_order_and_are_refused_alone(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]]
) -> None:
    sent = [event(number, topic, b"%d" % (number % 100), b"x") for number in range(1000)]
    pubsub.inject("INVALID_ARGUMENT", id=sent[500].id, times=1000)
    pubsub.inject("UNAVAILABLE", id=sent[701].id)
    found = refused(make(**pubsub.settings(ordering_keys=3)), sent)
    expected = [one for one in sent if one.key != b"0" or one.position < 500]

    assert list(found.refused) == [sent[500].id]
    for key in {one.key for one in sent}:
        assert names([one for one in received() if one.key == key]) == names(
            [one for one in expected if one.key == key]
        )


def test_two_headers_of_one_name_both_arrive() -> None:
    attributes = attributes_of(event(1, "orders", b"key", b"x", ("a", b"1"), ("a", b"2")))

    assert attributes["a"] == "1"
    assert json.loads(attributes["cdc.headers"]) == [["a", "2"]]


@pytest.mark.parametrize("key", [b"", b"\xff", b"sha256:1"])
def test_a_key_that_is_no_ordering_key_is_hashed(key: bytes) -> None:
    assert ordering_key(key).startswith("sha256:")
    assert ordering_key(key) != ordering_key(key + b"x")


def test_keys_are_distributed_among_ordering_keys() -> None:
    assert {ordering_key(b"%d" % number, 8) for number in range(1000)} == set("01234567")
    assert ordering_key(None, 8) == ""


def test_a_closed_client_is_an_unavailable_destination(pubsub: Pubsub) -> None:
    destination = make(**pubsub.settings())
    with pytest.raises(DestinationUnavailable):
        destination.send([event(1, "orders", b"key", b"x")])
    with pytest.raises(DestinationUnavailable):
        destination.commit(b"1")


def test_a_service_that_does_not_run_is_unavailable(pubsub: Pubsub, topic: str) -> None:
    sent = [event(number, topic, b"%d" % number, b"x") for number in range(500)]
    error = error_of(make(**pubsub.settings(endpoint="http://127.0.0.1:1", timeout="1s")), sent)

    assert type(error) is DestinationUnavailable


def test_a_service_that_falls_silent_is_unavailable(
    pubsub: Pubsub, topic: str, relay: TcpRelay, received: Callable[[], list[Received]]
) -> None:
    destination = make(**pubsub.settings(endpoint=f"http://127.0.0.1:{relay.port}", timeout="1s"))
    sent = [event(number, topic, b"%d" % number, b"x") for number in range(500)]
    destination.open()
    destination.send(sent[:1])
    destination.commit(b"1")
    relay.pause()
    began = time.monotonic()
    destination.send(sent)
    with pytest.raises(DestinationUnavailable):
        destination.commit(b"500")
    destination.close()
    took = time.monotonic() - began
    relay.resume()
    send(destination, sent)

    assert took < 8  # one time limit, not one for each key
    assert set(names(received())) == set(names(sent))


def test_cut_connections_lose_nothing(
    pubsub: Pubsub, topic: str, relay: TcpRelay, received: Callable[[], list[Received]], tmp_path: Path
) -> None:
    numbers = Random(0)
    relay.cut_after([numbers.randrange(3_000, 15_000) for _ in range(4)])
    at_relay = partial(make, **pubsub.settings(endpoint=f"http://127.0.0.1:{relay.port}"))
    deliver(Assignment(at_relay, (topic,), 500, 50, tmp_path / "progress"))
    got, sent = received(), numbered(range(500), [topic])

    assert relay.number_of_cuts == 4
    for key in {one.key for one in sent}:
        assert list(dict.fromkeys(names([one for one in got if one.key == key]))) == names(
            [one for one in sent if one.key == key]
        )


def test_a_service_account_signs_requests_over_tls(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = event(1, topic, b"key", b"x"), event(2, topic, b"key", b"x")
    send(make(**pubsub.secure()), [first])
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(pubsub.server.account))
    send(make(**pubsub.secure(credentials_file=None)), [second])

    assert names(received()) == [first.id, second.id]


def test_a_certificate_has_to_be_trusted(pubsub: Pubsub, topic: str) -> None:
    error = error_of(make(**pubsub.secure(ca_file=None, timeout="1s")), [event(1, topic, b"key", b"x")])

    assert type(error) is DestinationNotTrusted
    assert "ca_file" in error.fix


def test_credentials_that_the_service_does_not_know_are_denied(pubsub: Pubsub, topic: str, tmp_path: Path) -> None:
    other = tmp_path / "key.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(other), "2048"], check=True, capture_output=True)
    account = json.loads(pubsub.server.account.read_text()) | {"private_key": other.read_text()}
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    error = error_of(make(**pubsub.secure(credentials_file=str(file))), [event(1, topic, b"key", b"x")])

    assert type(error) is DestinationDenied
    assert "UNAUTHENTICATED" in str(error)


def test_credentials_that_yield_no_token_are_denied(
    pubsub: Pubsub, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    file = tmp_path / "user.json"
    file.write_text(json.dumps(user | {"token_uri": "http://127.0.0.1:1/token"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    error = error_of(make(**pubsub.secure(credentials_file=None)), [event(1, topic, b"key", b"x")])

    assert type(error) is DestinationDenied
    assert "token" in error.fix


@pytest.mark.parametrize("content", [None, "{}", "no json", '{"type": "service_account", "private_key": "x"}'])
@pytest.mark.parametrize("is_default", [False, True])
def test_credentials_that_cannot_be_read_are_denied(
    pubsub: Pubsub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, is_default: bool
) -> None:
    file = tmp_path / "account.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    destination = make(**pubsub.secure(credentials_file=None if is_default else str(file)))
    with pytest.raises(DestinationDenied) as caught:
        destination.open()
    destination.close()

    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.fix


def test_the_emulator_of_the_environment_is_used_unless_there_is_an_endpoint(
    pubsub: Pubsub, topic: str, received: Callable[[], list[Received]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = event(1, topic, b"key", b"x"), event(2, topic, b"key", b"x")
    monkeypatch.setenv(EMULATOR, f"127.0.0.1:{pubsub.server.ports['plain']}")
    send(make(**pubsub.settings(endpoint=None)), [first])
    monkeypatch.setenv(EMULATOR, "127.0.0.1:1")
    send(make(**pubsub.settings()), [second])

    assert names(received()) == [first.id, second.id]


def test_an_emulator_on_another_machine_has_to_be_allowed(pubsub: Pubsub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATOR, "pubsub.invalid:8085")
    with pytest.raises(DestinationNotTrusted, match=EMULATOR):
        make(**pubsub.settings(endpoint=None)).open()
    allowed = make(**pubsub.settings(endpoint=None, insecure_plaintext=True))
    allowed.open()
    allowed.close()


def test_a_server_that_was_killed_has_what_it_acknowledged(own_pubsub: Pubsub) -> None:
    topic = f"{own_pubsub.prefix}.orders"
    sent = [event(number, topic, b"key", b"x") for number in range(10)]
    send(make(**own_pubsub.settings()), sent)
    own_pubsub.server.kill()
    own_pubsub.server.start()
    subscriber = Subscriber(own_pubsub.server.ports["plain"], [topic])
    got = until(subscriber, "messages")
    subscriber.close()

    assert [message.attributes["cdc.id"] for message in got] == names(sent)
