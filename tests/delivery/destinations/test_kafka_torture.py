"""A Kafka delivery whose process and broker are killed again and again: a consumer sees each event once, in order.

A group of two consumers reads committed messages all the time, and one of them is replaced after each fault.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Any, Final

import pytest
from confluent_kafka import Consumer

from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import ID_HEADER
from tests.delivery.destinations.receivers.kafka import committed, delivery, identity
from tests.delivery.destinations.sending import Assignment, numbered, start_process
from tests.fixtures.forked import Forked
from tests.fixtures.kafka import KafkaServer, SharedKafka
from tests.fixtures.waiting import until

BATCH: Final = 50
KILLED: Final = -signal.SIGKILL
TIMEOUT: Final = 2.0
"""Seconds after which the delivery gives a broker up."""


class Watchers:
    """Two consumers of one group, in a thread; they see only what is committed."""

    def __init__(self, server: str, topics: Sequence[str]) -> None:
        self._server, self._topics = server, topics
        self._replace, self._ended = Flag(), Flag()
        self.seen: dict[tuple[str, int, int], tuple[str, bytes]] = {}
        """Topic, partition and offset → id and key; a message may come twice if the group is divided anew."""
        self._thread = Thread(target=self._watch, daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        yield
        self._ended.set()
        self._thread.join(30)

    def rebalance(self) -> None:
        """Replace one of the consumers."""
        self._replace.set()

    def _watch(self) -> None:
        consumers = [self._consumer(), self._consumer()]
        while not self._ended.is_set():
            if self._replace.is_set():
                self._replace.clear()
                consumers.append(self._consumer())
                consumers.pop(0).close()
            for consumer in consumers:
                # `consume` may drop messages when the group is divided anew, and commit them
                while (message := consumer.poll(0.02)) is not None:
                    self._see(message)
        for consumer in consumers:
            consumer.close()

    def _see(self, message: Any) -> None:
        if message.error() is None:
            name = dict(message.headers())[ID_HEADER].decode()
            self.seen[message.topic(), message.partition(), message.offset()] = (name, message.key())

    def _consumer(self) -> Consumer:
        made = Consumer(
            {
                "bootstrap.servers": self._server,
                "group.id": f"{self._topics[0]}.watchers",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 200,
                "session.timeout.ms": 6000,
                "topic.metadata.refresh.interval.ms": 500,
                "log_level": 0,
            }
        )
        made.subscribe(list(self._topics))
        return made


class Sender:
    """The process that delivers; a supervisor starts it again."""

    def __init__(self, assignment: Assignment, log: Path) -> None:
        self._assignment, self._log = assignment, log
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(30) in {KILLED, 0}
        self.process = self._start()

    def state(self) -> str:
        """For the message of a failure."""
        return f"exit status {self.process.poll()}: {self._log.read_text(errors='replace')[-3000:]}"

    def wait(self) -> None:
        """Until everything is delivered."""
        assert self.process.wait(240) == 0, self._log.read_text(errors="replace")[-3000:]

    def _start(self) -> Forked:
        return start_process(self._assignment, self._log)


class Faults:
    """What happens to the sender and the broker."""

    def __init__(self, sender: Sender, random: Random, server: KafkaServer | None) -> None:
        self._sender, self._random, self._server = sender, random, server

    def kill_process(self) -> None:
        self._sender.kill()

    def kill_broker(self) -> None:
        assert self._server is not None
        self._server.kill()
        self._server.start()

    def silence_broker(self) -> None:
        """It does not answer for less time than the delivery waits, or for more."""
        assert self._server is not None
        continued = monotonic() + self._random.uniform(0.1, 2.5 * TIMEOUT)
        self._server.pause()
        until(lambda: monotonic() >= continued, "the end of the pause")
        self._server.resume()


@dataclass
class Torture:
    """A delivery with topics of its own."""

    server: str
    prefix: str
    folder: Path
    own: KafkaServer | None = None
    """The broker, if it may be killed."""

    def run(self, faults: Sequence[str], seed: int) -> None:
        """Deliver while the faults happen, and check what the consumers saw."""
        random, between = Random(seed), 800
        settings = delivery(self.server, timeout=f"{TIMEOUT:g}s", transaction_timeout="20s")
        make = partial(new_destination, settings, identity(self.prefix))
        topics = (f"{self.prefix}orders", f"{self.prefix}items")
        assignment = Assignment(make, topics, (len(faults) + 1) * between, BATCH, self.folder / "progress")
        watchers = Watchers(self.server, topics)
        sender = Sender(assignment, self.folder / "log")
        happening = Faults(sender, random, self.own)
        with watchers.watching():
            for number, fault in enumerate(faults):
                self._wait(sender, watchers, number * between + random.randrange(1, between))
                getattr(happening, fault)()
                watchers.rebalance()
            sender.wait()
            self._wait(sender, watchers, assignment.events)
        self._check(watchers, assignment)

    def _wait(self, sender: Sender, watchers: Watchers, number: int) -> None:
        def state() -> str:
            seen, there = len(watchers.seen), len(committed(self.server, self.prefix))
            return f"{number} messages, but {seen} of {there}; sender: {sender.state()}"

        until(lambda: len(watchers.seen) >= number, state, every=0.01)

    def _check(self, watchers: Watchers, assignment: Assignment) -> None:
        expected = defaultdict(list)
        for event in numbered(range(assignment.events), assignment.topics):
            expected[event.topic, event.key].append(event.id)
        watched = defaultdict(list)
        for (topic, _, _), (name, key) in sorted(watchers.seen.items()):
            watched[topic, key].append(name)
        left = defaultdict(list)
        for message in committed(self.server, self.prefix):
            left[message.topic, message.key].append(message.id)

        assert left == expected
        assert watched == expected


def test_a_delivery_survives_kills_of_its_process(kafka: SharedKafka, tmp_path: Path) -> None:
    Torture(kafka.address.plain, kafka.prefix, tmp_path).run(["kill_process"] * 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_delivery_survives_fifty_faults(own_kafka: KafkaServer, tmp_path: Path, seed: int) -> None:
    faults = Random(seed).choices(["kill_process", "kill_broker", "silence_broker"], weights=[5, 2, 3], k=50)

    Torture(own_kafka.address.plain, "own.", tmp_path, own_kafka).run(faults, seed)
