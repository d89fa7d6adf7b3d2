"""Settings of the Kafka client, and what its errors mean."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from confluent_kafka import KafkaError

from cdc.delivery.destinations.kafka_client import (
    LOGGED_EVERY,
    ClientErrors,
    RareLines,
    client_settings,
    producer_settings,
)
from cdc.errors import (
    CdcError,
    DeliveryError,
    DeliveryFenced,
    DestinationDenied,
    DestinationFull,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)
from tests.delivery.destinations.receivers.kafka import delivery
from tests.fixtures.kafka import PASSWORD

UNTRUSTED = "ssl://kafka:9093/bootstrap: SSL handshake failed: error:0A000086: certificate verify failed: broker"


def settings(server: str = "kafka.example.com:9093", **keys: Any) -> dict[str, Any]:
    return client_settings(delivery(server, **keys), "cdc.shop.to_kafka", ClientErrors("Kafka"))


def test_the_files_of_tls_reach_the_client() -> None:
    found = settings(ca_file="/ca.pem", cert_file="/cert.pem", key_file="/key.pem")

    assert found["security.protocol"] == "ssl"
    assert found["ssl.ca.location"] == "/ca.pem"
    assert found["ssl.certificate.location"] == "/cert.pem"
    assert found["ssl.key.location"] == "/key.pem"
    assert "enable.ssl.certificate.verification" not in found


def test_a_login_reaches_the_client() -> None:
    login = {"user": "writer", "password": {"env": "PASSWORD"}}
    found = settings(login=login)
    plain = settings("localhost:9092", login=login | {"mechanism": "plain"})

    assert (found["security.protocol"], found["sasl.mechanism"]) == ("sasl_ssl", "SCRAM-SHA-512")
    assert (found["sasl.username"], found["sasl.password"]) == ("writer", PASSWORD)
    assert (plain["security.protocol"], plain["sasl.mechanism"]) == ("sasl_plaintext", "PLAIN")


def test_a_password_file_is_read_for_every_client(tmp_path: Any) -> None:
    file = tmp_path / "password"
    file.write_text("old", encoding="ascii")
    file.chmod(0o600)
    made = delivery("kafka:9093", login={"user": "writer", "password": {"file": str(file)}})
    file.write_text("new", encoding="ascii")

    assert client_settings(made, "name", ClientErrors("Kafka"))["sasl.password"] == "new"


def test_settings_of_the_client_do_not_replace_those_of_the_delivery() -> None:
    found = settings(client={"socket.keepalive.enable": "true"})

    assert found["socket.keepalive.enable"] == "true"
    assert found["bootstrap.servers"] == "kafka.example.com:9093"


def test_the_buffer_has_room_for_the_largest_event() -> None:
    made = producer_settings(delivery("localhost:9092", max_event_size="100MiB"), "id", 1_000_000)

    assert made["queue.buffering.max.kbytes"] * 1024 > made["message.max.bytes"] == 100 << 20


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KafkaError(KafkaError._TIMED_OUT), DestinationUnavailable),
        (KafkaError(KafkaError._MSG_TIMED_OUT), DestinationUnavailable),
        (KafkaError(KafkaError.NOT_ENOUGH_REPLICAS), DestinationUnavailable),
        (KafkaError(KafkaError._SSL, UNTRUSTED), DestinationNotTrusted),
        (KafkaError(KafkaError._SSL, "SSL handshake failed: disconnected"), DestinationUnavailable),
        (KafkaError(KafkaError._AUTHENTICATION), DestinationDenied),
        (KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), DestinationDenied),
        (KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), DestinationDenied),
        (KafkaError(KafkaError.THROTTLING_QUOTA_EXCEEDED), DestinationFull),
        (KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), TopicMissing),
        (KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), EventTooLarge),
        (KafkaError(KafkaError.INVALID_RECORD), EventRefused),
        (KafkaError(KafkaError._FENCED), DeliveryFenced),
        (KafkaError(KafkaError.PRODUCER_FENCED), DeliveryFenced),
        (KafkaError(KafkaError.INVALID_TRANSACTION_TIMEOUT), DeliveryError),
        (KafkaError(KafkaError.INVALID_REPLICATION_FACTOR), DeliveryError),
    ],
    ids=lambda given: given.name() if isinstance(given, KafkaError) else given.__name__,
)
def test_an_error_of_the_client_has_a_meaning(error: KafkaError, kind: type[CdcError]) -> None:
    found = ClientErrors("Kafka at 'kafka:9093'").meaning(error, "nothing was sent")

    assert type(found) is kind
    assert found.message.startswith("Kafka at 'kafka:9093': nothing was sent: ")


def test_a_probable_cause_explains_a_silence() -> None:
    errors = ClientErrors("Kafka")
    errors.note(KafkaError(KafkaError._TRANSPORT, "connection refused"))
    before = errors.silence("nothing was sent")
    errors.note(KafkaError(KafkaError._AUTHENTICATION, "invalid login"))
    errors.note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))

    assert isinstance(before, DestinationUnavailable)
    assert "connection refused" in before.message
    with pytest.raises(DestinationDenied, match="invalid login"):
        errors.silence("nothing was sent")


def test_the_first_error_of_an_event_counts_and_a_purged_event_is_none() -> None:
    errors = ClientErrors("Kafka")
    errors.note_event(KafkaError(KafkaError._PURGE_QUEUE), "purged")
    errors.check()
    errors.note_event(KafkaError(KafkaError.INVALID_RECORD), "first")
    errors.note_event(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), "second")

    with pytest.raises(EventRefused, match="first"):
        errors.check()


def test_a_line_that_repeats_is_logged_once_a_minute_for_each_broker() -> None:
    now = 100.0
    lines = RareLines(lambda: now)

    def is_written(word: str, client: int, broker: int) -> bool:
        text = f"{word} [cdc.shop.to_kafka#producer-{client}] [thrd:127.0.0.1:{broker}/bootstrap]: Connect failed"
        return lines.filter(logging.LogRecord("kafka", logging.ERROR, "", 0, text, None, None))

    assert is_written("FAIL", 1, 9092)
    assert not is_written("FAIL", 2, 9092)
    assert is_written("FAIL", 2, 9093)
    assert is_written("GETPID", 2, 9092)
    now += LOGGED_EVERY
    assert is_written("FAIL", 3, 9092)
    assert lines.filter(logging.LogRecord("kafka", logging.ERROR, "", 0, "SHORT", None, None))
