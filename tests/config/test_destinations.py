"""Models of destinations: the keys of each type, URLs, logins that TLS protects, and keys that need each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from cdc.config import load_definition
from cdc.config.destinations import BrokerDelivery, Delivery, FileDelivery, SocketDelivery, StdoutDelivery
from cdc.errors import ConfigError
from tests.config.definitions import SOUND, write

SECRET = {"env": "BROKER_PASSWORD"}


def read(**keys: Any) -> BrokerDelivery:
    context = {"environment": {"BROKER_PASSWORD": "only for tests"}, "directory": "/"}
    found: Any = TypeAdapter(Delivery).validate_python({"name": "out", **keys}, context=context)
    return found


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("amqp", "amqp://host"),
        ("amqp", "amqps://host:5671/shop"),
        ("nats", "nats://host:4222"),
        ("nats", "tls://[::1]:4222"),
        ("redis", "redis://host/2"),
        ("redis", "rediss://host:6379"),
        ("mqtt", "mqtt://host"),
        ("mqtt", "mqtts://host:8883"),
    ],
)
def test_urls_of_brokers(kind: str, url: str) -> None:
    assert read(type=kind, url=url).url == url


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("amqp", "http://host"),
        ("amqp", "amqp://user:secret@host"),
        ("amqp", "amqp://host:x"),
        ("amqp", "amqp://host:70000"),
        ("nats", "nats://host/path"),
        ("redis", "redis://host/name"),
        ("mqtt", "mqtt://"),
        ("mqtt", "mqtt://a b"),
    ],
)
def test_urls_that_are_none_of_a_broker(kind: str, url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read(type=kind, url=url)
    assert not any("secret" in one["msg"] for one in caught.value.errors())


@pytest.mark.parametrize("kind", ["amqp", "nats", "redis", "mqtt"])
def test_a_login_needs_tls_for_another_machine(kind: str) -> None:
    login = {"type": kind, "user": "cdc", "password": SECRET}
    local = read(**login, url=f"{kind}://127.0.0.1")
    insecure = read(**login, url=f"{kind}://host", insecure_plaintext=True)
    with pytest.raises(ValidationError, match="use the scheme with TLS"):
        read(**login, url=f"{kind}://host")

    assert (local.user, insecure.user) == ("cdc", "cdc")


def test_a_token_needs_tls_too() -> None:
    with pytest.raises(ValidationError, match="use the scheme with TLS"):
        read(type="nats", url="nats://host", token=SECRET)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "amqp", "url": "amqps://host", "user": "cdc"}, "'user' requires 'password'"),
        ({"type": "amqp", "url": "amqps://host", "cert_file": "/a"}, "require each other"),
        ({"type": "amqp", "url": "amqps://host", "password": "plain"}, "in plain text"),
        ({"type": "nats", "url": "tls://host", "create": True}, "'create' requires"),
        ({"type": "nats", "url": "tls://host", "create": True, "stream": "s"}, "'create' requires"),
        ({"type": "nats", "url": "tls://host", "token": SECRET, "user": "u", "password": SECRET}, "exclude each other"),
        ({"type": "nats", "url": "tls://host", "stream": "a.b"}, "String should match"),
    ],
)
def test_keys_that_need_or_exclude_others(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read(**keys)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{name: a, type: file, path: out}", FileDelivery),
        ("{name: a, type: stdout}", StdoutDelivery),
        ("{name: a, type: tcp, host: localhost, port: 4000}", SocketDelivery),
    ],
)
def test_the_type_selects_the_model(tmp_path: Path, text: str, kind: type) -> None:
    (found,) = load_definition(write(tmp_path, f"{SOUND}deliveries: [{text}]\n")).deliveries

    assert type(found) is kind


@pytest.mark.parametrize(
    "text", ["{name: a, type: pigeon}", "{name: a, type: stdout, path: x}", "{name: a, type: tcp, host: h, port: 0}"]
)
def test_a_key_of_another_type_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_definition(write(tmp_path, f"{SOUND}deliveries: [{text}]\n"))


PUBSUB = {"type": "pubsub", "project": "shop-prod"}


@pytest.mark.parametrize(
    "keys",
    [
        {"endpoint": "https://europe-west3-pubsub.googleapis.com"},
        {"endpoint": "http://localhost:8085"},
        {"endpoint": "http://emulator:8085", "insecure_plaintext": True},
        {"project": "example.com:shop-prod", "topic_name": "shop-{topic}", "retention": "10m", "ordering_keys": 64},
    ],
)
def test_keys_of_pubsub(keys: dict[str, Any]) -> None:
    found: Any = read(**{**PUBSUB, **keys})

    assert found.endpoint == keys.get("endpoint")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"endpoint": "http://emulator:8085"}, "needs https"),
        ({"endpoint": "https://user:secret@host"}, "String should match"),
        ({"endpoint": "https://host/path"}, "String should match"),
        ({"endpoint": "http://localhost:8085", "credentials_file": "/key.json"}, "is an emulator"),
        ({"endpoint": "http://localhost:8085", "ca_file": "/ca.pem"}, "is an emulator"),
        ({"project": "Shop"}, "String should match"),
        ({"topic_name": "{table}"}, "topic"),
        ({"retention": "32d"}, "less than or equal"),
    ],
)
def test_keys_that_pubsub_does_not_take(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        read(**{**PUBSUB, **keys})
    assert not any("secret" in one["msg"] for one in caught.value.errors())
