"""Access to a Kafka cluster and the topics that a delivery creates there: keys of a delivery with `type: kafka`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from cdc.config.field_types import Model, Switch, Whole, invalid
from cdc.config.secret import ReferencedSecret

_LOCAL: Final = ("localhost", "127.0.0.1", "[::1]")
_OWNED: Final = frozenset({
    "bootstrap.servers", "metadata.broker.list", "client.id", "security.protocol", "partitioner", "acks",
    "request.required.acks", "transactional.id", "transaction.timeout.ms", "enable.idempotence", "message.max.bytes",
    "message.timeout.ms", "delivery.timeout.ms", "linger.ms", "queue.buffering.max.ms", "compression.type",
    "compression.codec", "isolation.level", "group.id", "enable.auto.commit", "enable.partition.eof",
    "delivery.report.only.error", "on_delivery", "error_cb", "logger", "socket.timeout.ms",
})  # fmt: skip
"""Settings of the client that follow from other keys of the delivery, or on which its guarantees depend."""
_OWNED_GROUPS: Final = ("ssl.", "enable.ssl.", "sasl.")


def _server(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise invalid("expected host and port, for example kafka.example.com:9092")
    return text


def _client_setting(name: str) -> str:
    if name in _OWNED or name.startswith(_OWNED_GROUPS):
        raise invalid("the client setting {name} follows from other keys of the delivery", name=repr(name))
    return name


KafkaServerAddress = Annotated[str, Field(pattern=r"^[^\s,/]+$"), AfterValidator(_server)]
"""Host and port of a broker."""
KafkaClientSetting = Annotated[str, AfterValidator(_client_setting)]
"""Name of a setting of librdkafka for which the delivery has no key of its own."""


def is_local(server: str) -> bool:
    """Return True if the broker is on this machine."""
    return server.rpartition(":")[0] in _LOCAL


class KafkaLogin(Model):
    """Login at a Kafka cluster (SASL)."""

    mechanism: Literal["plain", "scram-sha-256", "scram-sha-512"] = "scram-sha-512"
    """How the login is proven."""
    user: Annotated[str, Field(min_length=1)]
    """Name of the user."""
    password: ReferencedSecret
    """Password of the user, as a reference such as `${VAR}`."""


class KafkaTopics(Model):
    """How a delivery creates topics that do not exist."""

    create: Switch = True
    """Whether to create them; otherwise the delivery waits until they exist."""
    partitions: Annotated[Whole, Field(ge=1)] | None = None
    """Number of partitions; default: the broker's."""
    replication: Annotated[Whole, Field(ge=1)] | None = None
    """Number of replicas of each partition; default: the broker's."""
    config: Mapping[str, str] = {}
    """Settings of the topics, as text, for example `cleanup.policy: compact`."""
