"""Multicast: receivers that lose datagrams get every event once and in order, by repair from the log."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from threading import Event as Flag
from threading import Thread
from typing import Any

import pytest
from pydantic import ValidationError

from cdc.config.destinations import MulticastDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import Destination, Event, ServesHistory
from cdc.delivery.destinations.multicast import MulticastDestination
from cdc.errors import DestinationUnavailable
from tests.delivery.destinations.receivers import multicast
from tests.delivery.destinations.recorded import example, recorded
from tests.delivery.destinations.sending import Assignment, event, numbered, run_process

TOPICS = ("shop.orders", "shop.items")


def destination(group: tuple[str, int], file: Path, **given: Any) -> Destination:
    return recorded(partial(new_destination, multicast.delivery(*group, **given), multicast.IDENTITY), file)


class LossyRelay(Thread):
    """Passes the datagrams of one group to another, without a share of them, and another share of them later."""

    def __init__(self, given: tuple[str, int], sent: tuple[str, int], seed: int) -> None:
        super().__init__()
        self.lost = self.late = 0
        self._random, self._ended, self._waiting = Random(seed), Flag(), deque[bytes]()
        self._sent = multicast.sender(*sent)
        self._given = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._given.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._given.bind(given)
        joined = struct.pack("!4s4s", socket.inet_aton(given[0]), socket.inet_aton("127.0.0.1"))
        self._given.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        self._given.settimeout(0.02)

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                datagram = self._given.recv(65_535)
            except TimeoutError:
                continue
            chance = self._random.random()
            if chance < 0.05:
                self.lost += 1
            elif chance < 0.1:
                self.late += 1
                self._waiting.append(datagram)
            else:
                self._sent.send(datagram)
                while self._waiting and self._random.random() < 0.5:
                    self._sent.send(self._waiting.popleft())

    def end(self) -> None:
        self._ended.set()
        self.join()
        self._given.close()
        self._sent.close()


def receive(receiver: Any, into: list[Any], is_complete: Callable[[], bool]) -> None:
    """Receive until an event that is the last one, for 60 s at most."""
    for _ in range(600):
        into += receiver.poll(0.1)
        if is_complete():
            return


def test_three_receivers_have_each_event_in_order_although_datagrams_are_lost_and_reordered(tmp_path: Path) -> None:
    given, file = multicast.free_group(), tmp_path / "events"
    groups = [multicast.free_group() for _ in range(3)]
    relays = [LossyRelay(given, group, seed) for seed, group in enumerate(groups)]
    receivers = [example("multicast_receiver").Receiver(*group) for group in groups]
    got: list[list[Any]] = [[] for _ in groups]
    large = [event(number, "shop.large", b"key", b"%d" % number * 2_000) for number in range(600, 610)]
    sent = [*numbered(range(600), TOPICS), *large]
    threads = [
        Thread(target=receive, args=(receiver, into, lambda into=into: len(into) >= len(sent)))
        for receiver, into in zip(receivers, got, strict=True)
    ]
    made = destination(given, file, rate="2MB")
    for thread in (*relays, *threads):
        thread.start()
    made.open()
    for first in range(0, len(sent), 50):
        made.send(sent[first : first + 50])
        made.commit(b"")
    for thread in threads:
        thread.join()
    for relay in relays:
        relay.end()
    made.close()
    for receiver in receivers:
        receiver.close()

    assert all(relay.lost > 10 and relay.late > 10 for relay in relays)
    for one in got:
        assert [found.id for found in one] == [expected.id for expected in sent]
        assert [found.value for found in one[600:]] == [expected.value for expected in large]


def test_the_loss_of_the_last_event_is_seen_by_a_heartbeat(tmp_path: Path) -> None:
    group, file = multicast.free_group(), tmp_path / "events"
    made = destination(group, file)
    made.open()
    receiver = example("multicast_receiver").Receiver(*group)
    got = list(receiver.poll(0.1))
    receiver._socket.setsockopt(
        socket.IPPROTO_IP,
        socket.IP_DROP_MEMBERSHIP,
        joined := socket.inet_aton(group[0]) + socket.inet_aton("127.0.0.1"),
    )
    made.send([event(1, "shop.orders", b"key", b"value")])
    receiver._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
    got += receiver.poll(0.2)
    receiver.close()
    made.close()

    assert [one.value for one in got] == [b"value"]


def test_a_large_event_comes_by_repair(tmp_path: Path) -> None:
    group = multicast.free_group()
    made = destination(group, tmp_path / "events", max_event_size=5_000)
    made.open()
    receiver = example("multicast_receiver").Receiver(*group)
    got = list(receiver.poll(0.1))
    sent = [event(number, "shop.orders", b"key", b"x" * size) for number, size in enumerate((10, 6_000, 3_000))]
    made.send(sent)
    made.commit(b"")
    got += receiver.poll(0.2)
    receiver.close()
    made.close()

    assert [one.value for one in got] == [one.value for one in sent]


def test_a_receiver_continues_after_the_event_that_it_had_processed(tmp_path: Path) -> None:
    group, file = multicast.free_group(), tmp_path / "events"
    made, sent = destination(group, file), numbered(range(20), TOPICS)
    made.open()
    made.send(sent)
    receiver = example("multicast_receiver").Receiver(*group, "127.0.0.1", sent[11].id)
    got = list(receiver.poll(0.2))
    receiver.close()
    made.close()

    assert [one.id for one in got] == [one.id for one in sent[12:]]


def test_a_request_for_repair_that_cannot_be_answered_gets_an_error() -> None:
    group = multicast.free_group()
    made = MulticastDestination(multicast.delivery(*group), multicast.IDENTITY)
    assert isinstance(made, ServesHistory)
    made.open()
    module = example("multicast_receiver")
    receiver = module.Receiver(*group)
    assert list(receiver.poll(0.1)) == []
    with pytest.raises(module.RepairFailed, match="CDC-7001"):
        list(receiver.repair())
    receiver.close()
    made.close()


def test_a_port_for_repair_that_is_used_is_an_unavailable_destination() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = multicast.delivery("239.255.1.1", 9, repair_port=taken.getsockname()[1])
        made = MulticastDestination(settings, multicast.IDENTITY)
        with pytest.raises(DestinationUnavailable, match="cannot send to") as failed:
            made.open()
        made.close()

    assert "repair_port" in failed.value.fix


def test_other_machines_get_events_only_if_the_definition_says_so() -> None:
    fields = {"name": "live", "type": "multicast", "group": "239.1.2.3", "port": 9999}
    for more in ({"ttl": 1}, {"interface": "10.0.0.1"}):
        with pytest.raises(ValidationError, match="insecure_plaintext"):
            MulticastDelivery.model_validate({**fields, **more})
        MulticastDelivery.model_validate({**fields, **more, "insecure_plaintext": True})
    with pytest.raises(ValidationError):
        MulticastDelivery.model_validate({**fields, "group": "10.0.0.1"})


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_missing_after_many_kills(kills: int, tmp_path: Path) -> None:
    module, group = example("multicast_receiver"), multicast.free_group()
    make = partial(
        recorded, partial(new_destination, multicast.delivery(*group), multicast.IDENTITY), tmp_path / "events"
    )
    receiver = module.Receiver(*group)
    given = Assignment(make, TOPICS, 40 * (kills + 1), 20, tmp_path / "progress")
    points = ("batch_half_sent:2", "multicast_sent:2", "batch_sent:1", "batch_committed:1")
    for number in range(kills):
        run_process(given, points[number % len(points)])
    run_process(given)
    got = multicast.GroupReader(receiver, make, module.RepairFailed)()
    receiver.close()

    expected: list[Event] = numbered(range(given.events), TOPICS)
    assert [one.id for one in got] == [one.id for one in expected]
