"""Destinations of deliveries: one module per broker, file or socket, behind one contract."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from cdc.delivery.destinations.contract import DeliveryIdentity, Destination, Promise
from cdc.errors import ClientMissing

CLASSES: Final[Mapping[str, str]] = {
    "amqp": "amqp:AmqpDestination",
    "amqp1": "amqp1:Amqp1Destination",
    "file": "file:FileDestination",
    "kafka": "kafka:KafkaDestination",
    "kinesis": "kinesis:KinesisDestination",
    "mqtt": "mqtt:MqttDestination",
    "multicast": "multicast:MulticastDestination",
    "nats": "nats:NatsDestination",
    "pubsub": "pubsub:PubsubDestination",
    "redis": "redis:RedisDestination",
    "sns": "sns:SnsDestination",
    "sqs": "sqs:SqsDestination",
    "statsd": "statsd:StatsdDestination",
    "stdout": "lines:StdoutDestination",
    "tcp": "lines:SocketDestination",
    "zeromq": "zeromq:ZeromqDestination",
}
"""Type of a delivery → module and class of its destination. Modules are imported when they are needed, because each
imports its client library."""
PROMISES: Final[Mapping[str, Promise]] = {
    "amqp": Promise.AT_LEAST_ONCE,
    "amqp1": Promise.AT_LEAST_ONCE,
    "file": Promise.EXACTLY_ONCE,
    "kafka": Promise.EXACTLY_ONCE,
    "kinesis": Promise.AT_LEAST_ONCE,
    "mqtt": Promise.AT_LEAST_ONCE,
    "multicast": Promise.AT_MOST_ONCE,
    "nats": Promise.AT_LEAST_ONCE,
    "pubsub": Promise.AT_LEAST_ONCE,
    "redis": Promise.EXACTLY_ONCE,
    "sns": Promise.AT_LEAST_ONCE,
    "sqs": Promise.AT_LEAST_ONCE,
    "statsd": Promise.AT_MOST_ONCE,
    "stdout": Promise.AT_LEAST_ONCE,
    "tcp": Promise.AT_LEAST_ONCE,
    "zeromq": Promise.AT_MOST_ONCE,
}
"""Type of a delivery → the promise of its class, which can be shown without the client library."""
EXTRAS: Final[Mapping[str, str]] = {
    "amqp": "amqp",
    "amqp1": "amqp1",
    "kafka": "kafka",
    "kinesis": "aws",
    "mqtt": "mqtt",
    "nats": "nats",
    "pubsub": "gcp",
    "redis": "redis",
    "sns": "aws",
    "sqs": "aws",
    "zeromq": "zeromq",
}
"""Type of a delivery → package extra with its client library; a type that needs no other package is missing."""


def promise_of(settings: Any) -> Promise:
    """Return how often a delivery delivers each event. settings: a model of `cdc.config.destinations`."""
    if settings.type == "tcp" and not settings.acknowledge:
        return Promise.AT_MOST_ONCE  # what the operating system has taken is lost if the receiver dies
    return PROMISES[settings.type]


def new_destination(settings: Any, identity: DeliveryIdentity) -> Destination:
    """Return the destination of a delivery, not yet connected. settings: a model of `cdc.config.destinations`."""
    module, _, name = CLASSES[settings.type].partition(":")
    try:
        kind = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as exc:
        if settings.type not in EXTRAS or (exc.name or "").startswith("cdc"):
            raise
        extra = EXTRAS[settings.type]
        raise ClientMissing(
            f"delivery {identity.name!r} needs the package {exc.name!r}, which is not installed",
            remedy=f"install the package extra {extra!r}: uv pip install 'cdc[{extra}]'",
        ) from exc
    destination: Destination = kind(settings, identity)
    return destination
