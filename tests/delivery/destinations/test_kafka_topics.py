"""Topics of a Kafka delivery: names and creation; `test_kafka.py` has what a delivery makes of it."""

from __future__ import annotations

import pytest

from cdc.config.kafka import KafkaTopics
from cdc.delivery.destinations.kafka_client import ClientErrors
from cdc.delivery.destinations.kafka_topics import TopicDirectory, is_possible_name
from cdc.errors import DeliveryError, DestinationUnavailable
from tests.delivery.destinations.receivers.kafka import admin_client
from tests.fixtures.kafka import SharedKafka


def directory(server: str, timeout: float = 10, **settings: object) -> TopicDirectory:
    admin = admin_client(server)
    return TopicDirectory(admin, KafkaTopics.model_validate(settings), ClientErrors("Kafka"), timeout)


@pytest.mark.parametrize("name", ["a", "Shop-1_.orders", ".a", "...", "x" * 249, "0"])
def test_a_name_may_be_that_of_a_topic(kafka: SharedKafka, name: str) -> None:
    assert is_possible_name(name)
    directory(kafka.address.plain).require([name])


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ü", "x" * 250, "a\n", "a,b", "a\x00"])
def test_other_names_are_not_possible(name: str) -> None:
    assert not is_possible_name(name)


def test_a_topic_that_another_process_creates_at_the_same_time_is_used(kafka: SharedKafka) -> None:
    first, second = directory(kafka.address.plain), directory(kafka.address.plain)
    topic = f"{kafka.prefix}progress"

    assert first.create_compacted(topic, {})
    assert not second.create_compacted(topic, {})


def test_a_setting_that_brokers_do_not_know_is_named(kafka: SharedKafka) -> None:
    with pytest.raises(DeliveryError, match=r"no\.such") as failed:
        directory(kafka.address.plain, config={"no.such": "1"}).require([f"{kafka.prefix}orders"])

    assert "topics.config" in failed.value.fix


def test_too_many_replicas_are_named(kafka: SharedKafka) -> None:
    with pytest.raises(DeliveryError) as failed:
        directory(kafka.address.plain, replication=3).require([f"{kafka.prefix}orders"])

    assert "topics.replication" in failed.value.fix


def test_brokers_that_do_not_answer_are_reported() -> None:
    with pytest.raises(DestinationUnavailable):
        directory("127.0.0.1:1", timeout=1).require(["orders"])
