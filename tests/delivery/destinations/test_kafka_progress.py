"""The stored progress of a Kafka delivery: the newest committed record, whatever else is at the end of the topic."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

from cdc.delivery.destinations.kafka_client import ClientErrors
from cdc.delivery.destinations.kafka_progress import StoredProgress
from cdc.errors import DestinationUnavailable
from tests.delivery.destinations.receivers.kafka import admin_client, end_offset, messages
from tests.fixtures.kafka import SharedKafka
from tests.fixtures.waiting import until

KEY = b"shop.to_kafka"


class ProgressTopic:
    """A topic with progress, and clients that write to it."""

    def __init__(self, kafka: SharedKafka, **config: str) -> None:
        self.server, self.topic = kafka.address.plain, f"{kafka.prefix}progress"
        self.admin = admin_client(self.server)
        settings = {name.replace("_", "."): value for name, value in config.items()}
        self.admin.create_topics([NewTopic(self.topic, 1, config=settings)], operation_timeout=30)[self.topic].result()

    def writer(self, name: str = "one") -> Producer:
        made = Producer({"bootstrap.servers": self.server, "transactional.id": f"{self.topic}.{name}", "log_level": 0})
        made.init_transactions(30)
        return made

    def begin(self, writer: Producer, *values: bytes, key: bytes = KEY) -> None:
        """Write records in a transaction that stays open."""
        writer.begin_transaction()
        for value in values:
            writer.produce(self.topic, value, key)
        writer.flush(30)

    def write(self, writer: Producer, *values: bytes, key: bytes = KEY) -> None:
        """Write records in a transaction."""
        self.begin(writer, *values, key=key)
        writer.commit_transaction(30)

    def read(self, timeout: float = 10) -> bytes | None:
        client = {"bootstrap.servers": self.server, "client.id": f"{self.topic}.reader"}
        return StoredProgress(client, self.topic, ClientErrors("Kafka"), timeout).read(self.admin, KEY)


def test_an_empty_topic_has_no_progress(kafka: SharedKafka) -> None:
    assert ProgressTopic(kafka).read() is None


def test_the_newest_record_of_the_key_is_the_progress(kafka: SharedKafka) -> None:
    topic = ProgressTopic(kafka)
    writer = topic.writer()
    topic.write(writer, b"1", b"2")
    topic.write(writer, b"3")
    topic.write(writer, b"other", key=b"shop.other")

    assert topic.read() == b"3"


def test_aborted_records_at_the_end_are_no_progress(kafka: SharedKafka) -> None:
    topic = ProgressTopic(kafka)
    writer = topic.writer()
    topic.write(writer, b"1")
    for number in range(40):
        topic.begin(writer, b"aborted %d" % number)
        writer.abort_transaction(30)
    # each one is a record and the end of a transaction: the progress is not among those that are read first
    assert end_offset(topic.server, topic.topic) == 82
    assert topic.read() == b"1"


def test_a_topic_with_aborted_records_only_has_no_progress(kafka: SharedKafka) -> None:
    topic = ProgressTopic(kafka)
    writer = topic.writer()
    topic.begin(writer, *[b"aborted"] * 2000)
    writer.abort_transaction(30)

    assert topic.read() is None


def test_records_of_others_at_the_end_do_not_hide_the_progress(kafka: SharedKafka) -> None:
    topic = ProgressTopic(kafka)
    topic.write(topic.writer(), b"1")
    topic.write(topic.writer("two"), *[b"other"] * 3000, key=b"shop.other")

    assert topic.read() == b"1"


def test_compaction_keeps_the_progress(kafka: SharedKafka) -> None:
    topic = ProgressTopic(kafka, cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01")
    writer, written = topic.writer(), [0]

    def is_compacted() -> bool:
        written[0] += 1
        topic.write(writer, b"%d" % written[0])
        return len(messages(topic.server, topic.topic)) < written[0]

    until(is_compacted, "a compacted topic")

    assert topic.read() == b"%d" % written[0]


def test_a_transaction_of_another_client_is_waited_for(kafka: SharedKafka) -> None:
    topic = ProgressTopic(kafka)
    own, other = topic.writer(), topic.writer("two")
    topic.write(own, b"1")
    topic.begin(other, b"other", key=b"shop.other")
    topic.write(own, b"2")
    with pytest.raises(DestinationUnavailable, match="open transaction") as raised:
        topic.read(timeout=1)
    assert "find-hanging" in (raised.value.fix or "")
    other.commit_transaction(30)

    assert topic.read() == b"2"
