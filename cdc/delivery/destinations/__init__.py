"""Destinations of deliveries: one module per broker, file or socket, behind one contract.

`KINDS` is the only place in `cdc.delivery` that knows them all; `cdc.config.destinations` has their definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from cdc.delivery.destinations.contract import DeliveryIdentity, Destination, Promise
from cdc.errors import ClientMissing


class DestinationKind(NamedTuple):
    """One kind of destination."""

    place: str
    """Module and class, `module:Class`, below this package. The module imports its client library, so it is imported
    when it is needed."""
    promise: Promise
    """How often the destination delivers an event; the class has it as well, but cannot be imported without the client
    library."""
    extra: str | None = None
    """Package extra with the client library; None if no other package is needed."""
    format: str | None = None
    """Module and class of the format that events have; None if the definition of the delivery chooses one."""


KINDS: Final[Mapping[str, DestinationKind]] = {
    "amqp": DestinationKind("amqp:AmqpDestination", Promise.AT_LEAST_ONCE, "amqp"),
    "amqp1": DestinationKind("amqp1:Amqp1Destination", Promise.AT_LEAST_ONCE, "amqp1"),
    "file": DestinationKind("file:FileDestination", Promise.EXACTLY_ONCE),
    "kafka": DestinationKind("kafka:KafkaDestination", Promise.EXACTLY_ONCE, "kafka"),
    "kinesis": DestinationKind("kinesis:KinesisDestination", Promise.AT_LEAST_ONCE, "aws"),
    "mqtt": DestinationKind("mqtt:MqttDestination", Promise.AT_LEAST_ONCE, "mqtt"),
    "multicast": DestinationKind("multicast:MulticastDestination", Promise.AT_MOST_ONCE),
    "nats": DestinationKind("nats:NatsDestination", Promise.AT_LEAST_ONCE, "nats"),
    "pubsub": DestinationKind("pubsub:PubsubDestination", Promise.AT_LEAST_ONCE, "gcp"),
    "redis": DestinationKind("redis:RedisDestination", Promise.EXACTLY_ONCE, "redis"),
    "sns": DestinationKind("sns:SnsDestination", Promise.AT_LEAST_ONCE, "aws"),
    "sqs": DestinationKind("sqs:SqsDestination", Promise.AT_LEAST_ONCE, "aws"),
    "statsd": DestinationKind(
        "statsd:StatsdDestination", Promise.AT_MOST_ONCE, format="cdc.delivery.statsd_lines:StatsdFormat"
    ),
    "stdout": DestinationKind("lines:StdoutDestination", Promise.AT_LEAST_ONCE),
    "tcp": DestinationKind("lines:SocketDestination", Promise.AT_LEAST_ONCE),
    "zeromq": DestinationKind("zeromq:ZeromqDestination", Promise.AT_MOST_ONCE, "zeromq"),
}
"""Type of a delivery → its destination."""


def promise_of(settings: Any) -> Promise:
    """Return how often a delivery delivers each event. settings: a model of `cdc.config.destinations`."""
    return KINDS[settings.type].promise if settings.is_acknowledged else Promise.AT_MOST_ONCE


def new_destination(settings: Any, identity: DeliveryIdentity) -> Destination:
    """Return the destination of a delivery, not yet connected. settings: a model of `cdc.config.destinations`."""
    kind = KINDS[settings.type]
    try:
        made = resolve_name(f"{__name__}.{kind.place}")
    except ModuleNotFoundError as exc:
        if kind.extra is None or (exc.name or "").startswith("cdc"):
            raise
        raise ClientMissing(
            f"delivery {identity.name!r} needs the package {exc.name!r}, which is not installed",
            remedy=f"install the package extra {kind.extra!r}: uv pip install 'cdc[{kind.extra}]'",
        ) from exc
    destination: Destination = made(settings, identity)
    return destination


def own_format(settings: Any) -> Any | None:
    """Return the format of a delivery whose destination has one of its own; None if its definition chooses one.

    settings: a model of `cdc.config.destinations`.
    """
    place = KINDS[settings.type].format
    if place is None:
        return None
    return resolve_name(place).of(settings)
