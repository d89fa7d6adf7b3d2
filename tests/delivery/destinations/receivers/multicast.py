"""Multicast as the tests of the contract use it: the receiver of the examples, joined before the first event."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from cdc.config.destinations import MulticastDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity
from tests.delivery.destinations.receivers import Received, Receiver
from tests.delivery.destinations.recorded import example, recorded

CRASH_POINTS: Final = ("multicast_sent",)
IDENTITY: Final = DeliveryIdentity("shop", "live", "0123456789abcdef")


def free_group() -> tuple[str, int]:
    """A group and a port that no other test has; skips the test if the machine has no multicast."""
    numbers = random.SystemRandom()
    group = f"239.255.{numbers.randrange(1, 255)}.{numbers.randrange(1, 255)}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiving:
        receiving.bind((group, 0))
        port = receiving.getsockname()[1]
        receiving.settimeout(1)
        joined = struct.pack("!4s4s", socket.inet_aton(group), socket.inet_aton("127.0.0.1"))
        try:
            receiving.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
            with sender(group, port) as sending:
                sending.send(b"probe")
            assert receiving.recv(10) == b"probe"
        except OSError as failed:
            pytest.skip(f"this machine has no multicast on its loopback interface: {failed}")
    return group, port


def sender(group: str, port: int) -> socket.socket:
    """A socket whose datagrams go to a group on this machine."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
    made.connect((group, port))
    return made


def delivery(group: str, port: int, **given: Any) -> MulticastDelivery:
    """A delivery on this machine."""
    fields = {"name": "live", "type": "multicast", "group": group, "port": port, "heartbeat": "20ms"}
    return MulticastDelivery.model_validate({**fields, **given})


class GroupReader:
    """Reads what the receiver has got; opens the destination for the repair if no process has done so."""

    def __init__(self, receiver: Any, make: Any, failure: type[Exception]) -> None:
        self._receiver, self._make, self._failures = receiver, make, (OSError, failure)
        self._read: list[Received] = []

    def __call__(self) -> list[Received]:
        self._poll(0.05)
        try:
            self._repair()
        except self._failures:
            server = self._make()
            server.open()
            self._poll(0.2)
            self._repair()
            server.close()
        return self._read

    def _poll(self, seconds: float) -> None:
        with suppress(*self._failures):
            self._read += [received(one) for one in self._receiver.poll(seconds)]

    def _repair(self) -> None:
        for one in self._receiver.repair():
            self._read.append(received(one))


def received(one: Any) -> Received:
    """An event as the tests compare it."""
    return Received(one.id, one.topic, one.key, one.value, one.headers)


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    module = example("multicast_receiver")
    group, port = free_group()
    file: Path = request.getfixturevalue("tmp_path") / "events"
    make = partial(recorded, partial(new_destination, delivery(group, port), IDENTITY), file)
    receiving = module.Receiver(group, port)
    yield Receiver(
        make,
        GroupReader(receiving, make, module.RepairFailed),
        ("shop.orders", 'S."ödd" / table?\n'),
        missing={"stores progress": "a socket does not store progress"},
    )
    receiving.close()
