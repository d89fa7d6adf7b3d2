"""AMQP 1.0 at a real broker: refusals, denied and silent brokers, names, and brokers that are killed."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest
from proton.utils import BlockingConnection

from cdc.config.secret import Secret
from cdc.delivery.destinations.amqp1 import MOST_LINKS, Amqp1Destination, group_of
from cdc.delivery.destinations.contract import EventsRefused
from cdc.errors import (
    DestinationDenied,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)
from tests.delivery.destinations.receivers import amqp1
from tests.delivery.destinations.sending import event, numbered
from tests.fixtures.artemis import ArtemisProcess, own_artemis
from tests.fixtures.broker_process import PASSWORD, USER
from tests.fixtures.waiting import until


def opened(port: int, **changed: Any) -> Amqp1Destination:
    made = amqp1.make(port, **changed)
    made.open()
    return made


def send_one(destination: Amqp1Destination, topic: str) -> None:
    destination.send([event(1, topic, b"key", b"value")])
    destination.commit(b"1")


def open_and_send(destination: Amqp1Destination) -> None:
    destination.open()
    send_one(destination, "shop.orders")


def send_batches(destination: Amqp1Destination, size: int) -> None:
    """Send some batches of events without keys."""
    for first in range(0, 30 * size, size):
        destination.send([event(number, "any", None, b"x") for number in range(first, first + size)])
        destination.commit(b"")


def test_messages_are_durable_and_have_the_id_and_the_group(artemis: ArtemisProcess) -> None:
    topic, port = f"t{uuid4().hex[:8]}", artemis.ports["plain"]
    destination = opened(port)
    send_one(destination, topic)
    destination.close()
    connection = BlockingConnection(f"amqp://127.0.0.1:{port}", user=USER, password=PASSWORD, allow_insecure_mechs=True)
    receiver = connection.create_receiver(topic)
    message = receiver.receive(timeout=10)
    receiver.accept()
    connection.close()

    assert (message.id, message.group_id, message.subject) == ("0123456789abcdef/1/0", "key", topic)
    assert message.durable


def test_one_address_can_take_the_events_of_all_topics(artemis: ArtemisProcess) -> None:
    address, port = f"t{uuid4().hex[:8]}", artemis.ports["plain"]
    destination, sent = opened(port, address=address), numbered(range(20), ("shop.orders", "shop.items"))
    destination.send(sent)
    destination.commit(b"20")
    destination.close()

    assert {one.id for one in amqp1.QueueContent(port, [address])()} == {one.id for one in sent}


def test_an_address_that_does_not_exist_is_missing(artemis: ArtemisProcess) -> None:
    destination = opened(artemis.ports["plain"])
    with pytest.raises(TopicMissing, match="absent"):
        send_one(destination, "absent.orders")
    destination.close()


@pytest.mark.parametrize(
    ("user", "reason"),
    [("reader", "CREATE_ADDRESS"), ("stranger", "Authentication failed"), (None, "Unable to validate user")],
)
def test_a_user_without_privileges_is_denied(artemis: ArtemisProcess, user: str | None, reason: str) -> None:
    login: dict[str, Any] = {"user": user, "password": Secret(PASSWORD, "${BROKER_PASSWORD}") if user else None}
    destination = amqp1.make(artemis.ports["plain"], **login)
    with pytest.raises(DestinationDenied, match=reason) as denied:
        open_and_send(destination)
    destination.close()

    assert PASSWORD not in str(denied.value)


def test_a_user_who_may_not_send_to_a_queue_is_denied(artemis: ArtemisProcess) -> None:
    topic, port = f"t{uuid4().hex[:8]}", artemis.ports["plain"]
    allowed, denied = opened(port), opened(port, user="reader")
    send_one(allowed, topic)
    with pytest.raises(DestinationDenied, match="SEND"):
        send_one(denied, topic)
    allowed.close()
    denied.close()


@pytest.mark.parametrize(
    ("kind", "batch", "reason"), [("full", 1, "amqp:resource-limit-exceeded"), ("blocked", 500, "may be full")]
)
def test_a_full_queue_is_tried_until_the_time_is_over(
    artemis: ArtemisProcess, kind: str, batch: int, reason: str
) -> None:
    destination = opened(artemis.ports["plain"], address=f"{kind}.{uuid4().hex}", timeout="1s")
    with pytest.raises(DestinationUnavailable, match=reason):
        send_batches(destination, batch)
    destination.close()


def test_a_full_queue_gets_the_events_of_a_key_in_order_while_it_is_read(artemis: ArtemisProcess) -> None:
    address, port = f"full.{uuid4().hex}", artemis.ports["plain"]
    destination, content = opened(port, address=address), amqp1.QueueContent(port, [address])
    sent = [event(number, "any", b"key", b"x") for number in range(400)]
    destination.send(sent)
    sending = Thread(target=destination.commit, args=(b"",))
    sending.start()
    until(lambda: len(content()) >= len(sent), "all events", every=0)
    sending.join()
    destination.close()

    assert [one.id for one in content()] == [one.id for one in sent]


def test_many_topics_need_few_links(artemis: ArtemisProcess) -> None:
    prefix, port = uuid4().hex, artemis.ports["plain"]
    topics = [f"{prefix}.{number}" for number in range(MOST_LINKS + 20)]
    sent = numbered(range(2 * len(topics)), topics)
    destination = opened(port)
    destination.send(sent)
    destination.commit(b"1")
    number = len(destination._senders)
    destination.close()

    assert number == MOST_LINKS
    assert {one.id for one in amqp1.QueueContent(port, topics)()} == {one.id for one in sent}


def test_a_closed_destination_leaves_no_file_open(artemis: ArtemisProcess) -> None:
    destination, files = amqp1.make(artemis.ports["plain"]), Path("/proc/self/fd")
    destination.open()
    destination.close()
    before = len(list(files.iterdir()))
    for _ in range(20):
        destination.open()
        destination.close()

    assert len(list(files.iterdir())) == before


def test_a_broker_that_stops_answering_is_unavailable_in_bounded_time(tmp_path: Path) -> None:
    with own_artemis(tmp_path / "artemis") as server:
        destination = opened(server.ports["plain"], timeout="1s")
        send_one(destination, "shop.orders")
        server.pause()
        began = monotonic()
        with pytest.raises(DestinationUnavailable):
            send_one(destination, "shop.orders")
        destination.close()
        server.resume()

    assert monotonic() - began < 10


def test_events_that_amqp_does_not_have_are_refused_before_any_is_sent(artemis: ArtemisProcess) -> None:
    topic, port = f"t{uuid4().hex[:8]}", artemis.ports["plain"]
    destination = opened(port, max_size="10kB")
    nowhere = event(4, "", b"m", b"x")
    large, twice = event(2, topic, b"k", b"x" * 10_000), event(3, topic, b"l", b"x", ("a", b"1"), ("a", b"2"))
    with pytest.raises(EventsRefused) as refused:
        destination.send([event(1, topic, b"other", b"x"), large, twice, nowhere])
    destination.commit(b"")
    destination.close()

    assert {name: type(error) for name, error in refused.value.refused.items()} == {
        large.id: EventTooLarge,
        twice.id: EventRefused,
        nowhere.id: EventRefused,
    }
    assert amqp1.QueueContent(port, [topic])() == []


def test_different_keys_have_different_groups() -> None:
    keys = [b"", b"a", b"%", b"%25", b"\xff", b"\n", b"x" * 129, b"x" * 130]

    assert len({group_of(key) for key in keys}) == len(keys)
    assert all(0 < len(group_of(key)) <= 128 for key in keys)
    assert group_of(b"order 7") == "order 7"


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_missing_after_a_broker_was_killed_many_times(kills: int, tmp_path: Path) -> None:
    topics = "shop.orders", "shop.items"
    with own_artemis(tmp_path / "artemis") as server:
        destination = opened(server.ports["plain"], timeout="3s")
        batch, sent = 0, numbered(range(20 * (2 * kills + 1)), topics)
        while batch * 20 < len(sent):
            events = sent[batch * 20 : batch * 20 + 20]
            try:
                destination.send(events[:10])
                if batch % 2 and kills:
                    kills -= 1
                    server.kill()
                    server.start()
                destination.send(events[10:])
                destination.commit(b"")
                batch += 1
            except DestinationUnavailable:
                destination.close()
                destination.open()
        destination.close()
        got = list(dict.fromkeys(one.id for one in amqp1.QueueContent(server.ports["plain"], topics)()))

    for topic in range(2):
        expected = [one.id for one in sent[topic::2]]
        assert [one for one in got if one in set(expected)] == expected
