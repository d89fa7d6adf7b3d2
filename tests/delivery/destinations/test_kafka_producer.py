"""The producer over librdkafka: settings, messages, reports about them, and its end."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from cdc.delivery.destinations.kafka_client import ClientErrors
from cdc.delivery.destinations.kafka_producer import KafkaMessage, KafkaProducer
from cdc.errors import EventRefused
from tests.delivery.destinations.receivers.kafka import admin_client, messages
from tests.delivery.destinations.test_kafka import create
from tests.fixtures.kafka import SharedKafka
from tests.fixtures.waiting import until


def producer_at(server: str, errors: ClientErrors | None = None, **settings: Any) -> KafkaProducer:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return KafkaProducer({"bootstrap.servers": server, **named}, errors or ClientErrors("Kafka"))


@pytest.mark.parametrize("settings", [{"no_such_setting": 1}, {"batch_size": "large"}])
def test_a_setting_that_the_library_does_not_take_is_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(KafkaException) as raised:
        producer_at("127.0.0.1:1", **settings)

    assert raised.value.args[0].code() == KafkaError._INVALID_ARG
    assert next(iter(settings)).replace("_", ".") in raised.value.args[0].str()


def test_settings_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(KafkaException, match="acks"):
        producer_at("127.0.0.1:1", enable_idempotence=True, acks=1)


def test_a_message_arrives_with_its_key_headers_and_partition(kafka: SharedKafka) -> None:
    topic = f"{kafka.prefix}a"
    create(admin_client(kafka.address.plain), topic)
    with closing(producer_at(kafka.address.plain)) as producer:
        producer.produce(KafkaMessage(topic, b"v\0w", b"k", [("name", b"x\0y"), ("empty", b"")], 0))
        producer.produce(KafkaMessage(topic, None, b""))
        assert producer.flush(30) == 0

    found = [(one.key(), one.value(), one.headers()) for one in messages(kafka.address.plain, topic)]
    assert found == [(b"k", b"v\0w", [("name", b"x\0y"), ("empty", b"")]), (b"", None, None)]


def test_a_full_queue_is_a_buffer_error() -> None:
    with closing(producer_at("127.0.0.1:1", queue_buffering_max_messages=1)) as producer:
        producer.produce(KafkaMessage("topic", b"1", None))
        with pytest.raises(BufferError):
            producer.produce(KafkaMessage("topic", b"2", None))
        assert producer.waiting


def test_a_message_that_a_broker_refuses_is_reported_with_its_topic(kafka: SharedKafka) -> None:
    topic, errors = f"{kafka.prefix}a", ClientErrors("Kafka")
    create(admin_client(kafka.address.plain), topic, cleanup_policy="compact")
    with closing(producer_at(kafka.address.plain, errors)) as producer:
        producer.produce(KafkaMessage(topic, b"without a key", None))
        producer.flush(30)

    with pytest.raises(EventRefused, match=topic):
        errors.check()


def test_errors_of_connections_and_log_lines_come_while_it_polls(caplog: pytest.LogCaptureFixture) -> None:
    errors = ClientErrors("Kafka")
    with closing(producer_at("127.0.0.1:1", errors, client_id="one of the tests")) as producer:
        with caplog.at_level(logging.DEBUG, "cdc.delivery.kafka"):
            until(lambda: producer.poll(0.05) and "Connect to" in caplog.text, "a log line of the client")
        assert "[one of the tests#producer-" in caplog.text
        assert "brokers are down" in errors.silence("nothing was sent").message


def test_an_error_of_a_transaction_says_what_may_be_done() -> None:
    with closing(producer_at("127.0.0.1:1", transactional_id="t")) as producer:
        with pytest.raises(KafkaException) as raised:
            producer.begin_transaction()
        assert raised.value.args[0].code() == KafkaError._STATE
        with pytest.raises(KafkaException) as raised:
            producer.init_transactions(0.05)
        assert raised.value.args[0].retriable()


def test_a_producer_that_nobody_has_is_freed() -> None:
    producer = producer_at("127.0.0.1:1")
    finalizer, gone = producer._close, weakref.ref(producer)
    del producer
    gc.collect()

    assert gone() is None
    assert not finalizer.alive
