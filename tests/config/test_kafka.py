"""Definitions of Kafka deliveries: addresses, TLS, logins and settings of the client."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cdc.config.destinations import KafkaDelivery

CONTEXT = {"environment": {"PASSWORD": "secret"}}
REMOTE = ["kafka-1.example.com:9092", "kafka-2.example.com:9092"]
LOGIN = {"user": "writer", "password": {"env": "PASSWORD"}}


def delivery(servers: Any = REMOTE, **keys: Any) -> KafkaDelivery:
    given = {"type": "kafka", "name": "to_kafka", "servers": servers, **keys}
    return KafkaDelivery.model_validate(given, context=CONTEXT)


@pytest.mark.parametrize("server", ["kafka:9092", "127.0.0.1:1", "[::1]:65535", "a.b-c.example.com:9093"])
def test_a_server_is_a_host_and_a_port(server: str) -> None:
    assert delivery([server]).servers == (server,)


@pytest.mark.parametrize(
    "server", ["", "kafka", "kafka:", ":9092", "kafka:0", "kafka:65536", "kafka:x", "a:1,b:2", "kafka://a:1", "a b:1"]
)
def test_other_text_is_no_server(server: str) -> None:
    with pytest.raises(ValidationError):
        delivery([server])


def test_there_is_at_least_one_server() -> None:
    with pytest.raises(ValidationError):
        delivery([])


@pytest.mark.parametrize(
    ("servers", "keys", "encrypted"),
    [
        (REMOTE, {}, True),
        (["localhost:9092", "127.0.0.1:9093", "[::1]:9094"], {}, False),
        (["localhost:9092", *REMOTE], {}, True),
        (["localhost:9092"], {"tls": True}, True),
        (["localhost:9092"], {"ca_file": "ca.pem"}, True),
        (["localhost:9092"], {"cert_file": "cert.pem", "key_file": "key.pem"}, True),
        (REMOTE, {"insecure_plaintext": True}, False),
        (REMOTE, {"insecure_skip_tls_verification": True}, True),
    ],
)
def test_connections_to_other_machines_are_encrypted(servers: list[str], keys: dict[str, Any], encrypted: bool) -> None:
    assert delivery(servers, **keys).uses_tls is encrypted


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cert_file": "cert.pem"}, "require each other"),
        ({"key_file": "key.pem"}, "require each other"),
        ({"insecure_plaintext": True, "tls": True}, "excludes"),
        ({"insecure_plaintext": True, "ca_file": "ca.pem"}, "excludes"),
        ({"insecure_plaintext": True, "insecure_skip_tls_verification": True}, "excludes"),
        ({"insecure_plaintext": True, "login": {**LOGIN, "mechanism": "plain"}}, "unencrypted"),
        ({"login": {"user": "writer", "password": "secret"}}, "plain text"),
        ({"login": {**LOGIN, "mechanism": "gssapi"}}, "plain"),
        ({"timeout": "30s", "transaction_timeout": "20s"}, "longer than"),
        ({"progress_topic": "größe"}, "pattern"),
        ({"compression": "zip"}, "lz4"),
        ({"client": {"socket.keepalive.enable": True}}, "string"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        delivery(**keys)


def test_a_login_without_encryption_is_possible_with_scram() -> None:
    assert not delivery(insecure_plaintext=True, login=LOGIN).uses_tls


def test_a_setting_of_the_client_is_passed_on() -> None:
    assert delivery(client={"socket.keepalive.enable": "true"}).client == {"socket.keepalive.enable": "true"}


@pytest.mark.parametrize(
    "name", ["transactional.id", "acks", "enable.idempotence", "ssl.ca.location", "sasl.password", "bootstrap.servers"]
)
def test_a_setting_on_which_the_delivery_depends_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="follows from other keys"):
        delivery(client={name: "1"})
