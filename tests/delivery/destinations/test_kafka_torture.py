"""A Kafka delivery whose process and brokers are killed again and again: a consumer sees each event once, in order.

A consumer reads committed messages all the time, and so does a group of two, of which one is replaced after each fault.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Final

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewTopic

from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import ID_HEADER, Event
from tests.delivery.destinations.receivers.kafka import admin_client, committed, delivery, identity
from tests.delivery.destinations.sending import Assignment, numbered, start_process
from tests.fixtures.forked import Forked
from tests.fixtures.kafka import KafkaServer, SharedKafka
from tests.fixtures.kafka_cluster import KafkaCluster
from tests.fixtures.waiting import until

BATCH: Final = 50
PARTITIONS: Final = 3
KILLED: Final = -signal.SIGKILL
TIMEOUT: Final = 2.0
"""Seconds after which the delivery gives a broker up."""


class Watchers:
    """A consumer of all partitions, and two consumers of one group, in threads; they see only what is committed."""

    def __init__(self, server: str, topics: Sequence[str]) -> None:
        self._server, self._topics = server, topics
        self._replace, self._ended = Flag(), Flag()
        self.seen: dict[tuple[str, int, int], tuple[str, bytes]] = {}
        """Topic, partition and offset → id and key, as the first consumer saw them."""
        self.shared: dict[tuple[str, int, int], tuple[str, bytes]] = {}
        """The same of the group; a message may come twice, or late, if the partitions are assigned again."""
        self._threads = [Thread(target=self._watch, daemon=True), Thread(target=self._watch_together, daemon=True)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        admin = admin_client(self._server)
        for answer in admin.create_topics([NewTopic(name, PARTITIONS) for name in self._topics]).values():
            answer.result(30)
        for thread in self._threads:
            thread.start()
        yield
        self._ended.set()
        for thread in self._threads:
            thread.join(30)

    def rebalance(self) -> None:
        """Replace one of the consumers of the group."""
        self._replace.set()

    def _watch(self) -> None:
        consumer = self._consumer(f"{self._topics[0]}.alone")
        consumer.assign([TopicPartition(name, number, 0) for name in self._topics for number in range(PARTITIONS)])
        while not self._ended.is_set():
            _see(consumer, self.seen)
        consumer.close()

    def _watch_together(self) -> None:
        consumers = [self._member(), self._member()]
        while not self._ended.is_set():
            if self._replace.is_set():
                self._replace.clear()
                consumers.append(self._member())
                consumers.pop(0).close()
            for consumer in consumers:
                _see(consumer, self.shared)
        for consumer in consumers:
            consumer.close()

    def _member(self) -> Consumer:
        made = self._consumer(f"{self._topics[0]}.together")
        made.subscribe(list(self._topics))
        return made

    def _consumer(self, group: str) -> Consumer:
        settings = {
            "bootstrap.servers": self._server,
            "group.id": group,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 200,
            "session.timeout.ms": 6000,
            "log_level": 0,
        }
        return Consumer(settings)


def _see(consumer: Consumer, found: dict[tuple[str, int, int], tuple[str, bytes]]) -> None:
    """Read what has arrived."""
    while (message := consumer.poll(0.02)) is not None:
        if message.error() is None:
            name = dict(message.headers())[ID_HEADER].decode()
            found[message.topic(), message.partition(), message.offset()] = (name, message.key())


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
    """What happens to the sender and the brokers."""

    def __init__(self, sender: Sender, random: Random, brokers: Sequence[KafkaServer]) -> None:
        self._sender, self._random, self._brokers = sender, random, brokers

    def kill_process(self) -> None:
        self._sender.kill()

    def kill_broker(self) -> None:
        broker = self._random.choice(self._brokers)
        broker.kill()
        broker.start()

    def silence_broker(self) -> None:
        """It does not answer for less time than the delivery waits, or for more."""
        broker = self._random.choice(self._brokers)
        continued = monotonic() + self._random.uniform(0.1, 2.5 * TIMEOUT)
        broker.pause()
        until(lambda: monotonic() >= continued, "the end of the pause")
        broker.resume()


def differences(expected: Mapping[str, Event], found: Sequence[tuple[str, str, bytes | None]]) -> dict[str, object]:
    """Events that are missing, came more than once, or before an earlier one of their key; found: topic, id and key."""
    counts, last, late = Counter(name for _, name, _ in found), dict[tuple[str, bytes | None], int](), []
    for topic, name, key in found:
        position = expected[name].position
        if last.get((topic, key), -1) > position:
            late.append(name)
        last[topic, key] = position
    wrong = {
        "missing": sorted(expected.keys() - counts.keys()),
        "more than once": sorted(name for name, count in counts.items() if count > 1),
        "out of order": late,
    }
    return {kind: names for kind, names in wrong.items() if names}


@dataclass
class Torture:
    """A delivery with topics of its own."""

    server: str
    """Address of a broker, or of several with commas between them."""
    prefix: str
    folder: Path
    brokers: Sequence[KafkaServer] = ()
    """Those that may be killed."""

    def run(self, faults: Sequence[str], seed: int) -> None:
        """Deliver while the faults happen, and check what the consumers saw."""
        random, between = Random(seed), 800
        settings = delivery(self.server, timeout=f"{TIMEOUT:g}s", transaction_timeout="20s")
        make = partial(new_destination, settings, identity(self.prefix))
        topics = (f"{self.prefix}orders", f"{self.prefix}items")
        assignment = Assignment(make, topics, (len(faults) + 1) * between, BATCH, self.folder / "progress")
        watchers = Watchers(self.server, topics)
        with watchers.watching():
            sender = Sender(assignment, self.folder / "log")
            happening = Faults(sender, random, self.brokers)
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
        ids = {event.id: event for event in numbered(range(assignment.events), assignment.topics)}
        left = committed(self.server, self.prefix)
        watched = [(topic, *found) for (topic, _, _), found in sorted(watchers.seen.items())]

        assert differences(ids, [(one.topic, one.id, one.key) for one in left]) == {}
        assert differences(ids, watched) == {}
        assert watchers.shared
        assert watchers.shared.items() <= watchers.seen.items()


def test_a_delivery_survives_kills_of_its_process(kafka: SharedKafka, tmp_path: Path) -> None:
    Torture(kafka.address.plain, kafka.prefix, tmp_path).run(["kill_process"] * 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_delivery_survives_fifty_faults(kafka_cluster: KafkaCluster, tmp_path: Path, seed: int) -> None:
    """Of three brokers: a single one that is killed can forget that it was ending a transaction (see RUNBOOK.md)."""
    faults = Random(seed).choices(["kill_process", "kill_broker", "silence_broker"], weights=[5, 2, 3], k=50)

    Torture(kafka_cluster.addresses, "own.", tmp_path, kafka_cluster.brokers).run(faults, seed)
