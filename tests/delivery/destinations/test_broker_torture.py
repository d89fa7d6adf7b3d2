"""Long: processes, servers and connections that end at random moments, again and again, lose no event of a delivery."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.delivery.destinations.receivers import Receiver, killable, module_of
from tests.delivery.destinations.sending import Assignment, deliver, numbered, start_process
from tests.delivery.destinations.test_destination_contract import check_delivered
from tests.fixtures.aws import Aws
from tests.fixtures.tcp_relay import TcpRelay, tcp_relay

KILLED: Final = tuple(sorted({"amqp", "amqp1", "mqtt", "nats", "pubsub", "redis", "tcp"} & set(killable())))
CUT: Final = ("kinesis", "sns", "sqs")
"""A server of moto would forget everything, so the connections to it are cut instead."""
ALONE: Final = ("multicast", "zeromq")
"""Nobody acknowledges events: only the process is killed, and the receiver gets what it misses from the log."""
PAUSE: Final = 0.05
"""Seconds between two batches of a destination that does not wait for its receiver."""
KILLS: Final = 50
ENDLESS: Final = 10_000_000
"""More events than the processes can send before they are killed."""


class CutConnections:
    """Connections through a relay, which are cut instead of killing the server."""

    def __init__(self, relay: TcpRelay) -> None:
        self._relay = relay

    def kill(self) -> None:
        self._relay.cut()

    def start(self) -> None:
        """Do nothing: the relay accepts new connections."""


@pytest.fixture(name="relay")
def _relay(aws_endpoint: str) -> Iterator[TcpRelay]:
    with tcp_relay(urlsplit(aws_endpoint).port or 0) as relay:
        yield relay


@pytest.fixture(name="aws")
def _aws(aws: Aws, relay: TcpRelay) -> Aws:
    """AWS behind the relay."""
    return replace(aws, endpoint=f"http://127.0.0.1:{relay.port}")


@pytest.fixture(name="receiver", params=(*KILLED, *CUT, *ALONE))
def _receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    module = module_of(request.param)
    with (module.killable if request.param in KILLED else module.receiver)(request) as made:
        server = CutConnections(request.getfixturevalue("relay")) if request.param in CUT else made.server
        yield replace(made, server=server)


def sent_by_now(receiver: Receiver, given: Assignment) -> int:
    """Number of events up to the stored progress."""
    destination = receiver.make()
    stored = destination.open()
    destination.close()
    return int(stored or given.progress.read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_random_kills_lose_nothing(receiver: Receiver, tmp_path: Path) -> None:
    numbers, pause = random.Random(1), Event()
    killed: Counter[str] = Counter()
    between = 0.0 if receiver.server else PAUSE
    given = Assignment(receiver.make, receiver.topics, ENDLESS, 20, tmp_path / "progress", between)
    longest = 4.0 if isinstance(receiver.server, CutConnections) else 2.0  # the client library of AWS starts slowly
    for _ in range(KILLS):
        process = start_process(given, tmp_path / "log")
        pause.wait(numbers.uniform(0.3, longest))
        if receiver.server and numbers.random() < 0.3:
            receiver.server.kill()
            killed[type(receiver.server).__name__] += 1
            pause.wait(numbers.uniform(0, 0.5))
            receiver.server.start()
            pause.wait(numbers.uniform(0, 0.5))
        process.kill()
        process.wait(60)
        killed["process"] += 1
    number = sent_by_now(receiver, given) + 100
    deliver(replace(given, events=number))
    got = [one.id for one in receiver.received()]
    sys.stderr.write(f"\nkills {dict(killed)}, events {len(set(got)):,}, duplicates {len(got) - len(set(got)):,}\n")

    missing = sorted({one.id for one in numbered(range(number), receiver.topics)} - set(got))
    assert not missing, f"{len(missing):,} of {number:,} events are missing, for example {missing[:3]}"
    check_delivered(receiver, numbered(range(number), receiver.topics), again=True)
