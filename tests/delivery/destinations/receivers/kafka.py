"""Kafka as the tests of the contract use it: a consumer that reads committed messages only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from cdc.config.destinations import KafkaDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import ID_HEADER, DeliveryIdentity
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.kafka import PASSWORD, KafkaServer
from tests.fixtures.waiting import until

CRASH_POINTS: Final = ("kafka_initialized:1", "kafka_flushed", "kafka_committed")
LARGEST: Final = 2 << 20
LONGEST_COMMIT: Final = 5.0
"""Seconds from the answer to a commit to its markers, at most."""


def delivery(server: str, **settings: Any) -> KafkaDelivery:
    """Settings of a delivery to brokers."""
    given = {
        "name": "to_kafka",
        "type": "kafka",
        "servers": server.split(","),
        "max_event_size": LARGEST,
        "timeout": "10s",
        "topics": {"partitions": 3, "config": {"max.message.bytes": str(2 * LARGEST)}},
        **settings,
    }
    return KafkaDelivery.model_validate(given, context={"environment": {"PASSWORD": PASSWORD, "WRONG": "wrong"}})


def identity(prefix: str) -> DeliveryIdentity:
    """Of a delivery in a pipeline of its own."""
    return DeliveryIdentity(prefix.strip("."), "to_kafka", "0123456789abcdef")


def admin_client(server: str) -> AdminClient:
    """A client that prints nothing when its broker ends."""
    return AdminClient({"bootstrap.servers": server, "log_level": 0})


def committed(server: str, prefix: str) -> list[Received]:
    """What a consumer gets from the topics with a prefix."""
    found = []
    for message in messages(server, prefix):
        headers = tuple(message.headers() or ())
        name = dict(headers)[ID_HEADER].decode()
        found.append(Received(name, message.topic(), message.key(), message.value(), headers))
    return found


def messages(server: str, prefix: str) -> list[Any]:
    """Every committed message of the topics with a prefix, each partition in order.

    A commit is answered before the partitions have its markers, so messages that are not committed are waited for; not
    for long, because nobody may commit them.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": server,
            "group.id": f"{prefix}check",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
        }
    )
    found = consumer.list_topics(timeout=30).topics
    parts = [
        TopicPartition(name, number, 0)
        for name, topic in found.items()
        if name.startswith(prefix)
        for number in topic.partitions
    ]
    deadline = monotonic() + LONGEST_COMMIT
    until(lambda: monotonic() > deadline or not _has_open_transaction(server, parts), "no open transaction")
    try:
        return _read(consumer, parts)
    finally:
        consumer.close()


def delete_topic(server: str, topic: str) -> None:
    """Delete a topic, and wait until it is gone."""
    admin = admin_client(server)
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in admin.list_topics(timeout=30).topics, f"topic {topic!r} to be gone")


def _has_open_transaction(server: str, parts: Collection[TopicPartition]) -> bool:
    """Whether a partition has messages that are neither committed nor aborted, or has no leader yet."""
    if not parts:
        return False
    admin, latest = admin_client(server), dict.fromkeys(parts, OffsetSpec.latest())
    try:
        ends = [
            [answer.result().offset for answer in admin.list_offsets(latest, isolation_level=level).values()]
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        ]
    except KafkaException as exc:
        if exc.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
            raise
        return True
    return ends[0] != ends[1]


def end_offset(server: str, topic: str) -> int:
    """The offset after the last record of partition 0, committed or not."""
    consumer = Consumer({"bootstrap.servers": server, "group.id": topic, "isolation.level": "read_uncommitted"})
    _, found = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
    consumer.close()
    return int(found)


def _read(consumer: Consumer, parts: Collection[TopicPartition]) -> list[Any]:
    received, left = [], {(part.topic, part.partition) for part in parts}
    consumer.assign(list(parts))
    while left:
        message = consumer.poll(30)
        assert message is not None, "the broker does not answer"
        if message.error() is None:
            received.append(message)
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            left.discard((message.topic(), message.partition()))
    return received


def receiver_at(server: str, prefix: str, **settings: Any) -> Receiver:
    """A delivery to topics with a prefix."""
    longest = f"{prefix}Shop-1_.orders"
    return Receiver(
        partial(new_destination, delivery(server, **settings), identity(prefix)),
        partial(committed, server, prefix),
        (f"{prefix}shop.orders", longest + "x" * (249 - len(longest))),
        too_large=LARGEST,
        forget_progress=partial(delete_topic, server, f"cdc.progress.{identity(prefix)}"),
    )


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    kafka = request.getfixturevalue("kafka")
    yield receiver_at(kafka.address.plain, kafka.prefix)


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    server: KafkaServer = request.getfixturevalue("own_kafka")
    made = receiver_at(server.address.plain, "own.", timeout="2s")
    yield Receiver(made.make, made.received, made.topics, server=server)
