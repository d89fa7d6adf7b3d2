"""Google Pub/Sub as the tests of the contract use it: topics that the delivery creates, read by subscriptions."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest

from cdc.config.destinations import PubsubDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, DeliveryIdentity
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.broker_process import own_broker
from tests.fixtures.pubsub import Pubsub, PubsubProcess, Subscriber

CRASH_POINTS: Final = ("pubsub_acknowledged",)
IDENTITY: Final = DeliveryIdentity("shop", "to_pubsub", "0123456789abcdef")
_OWN: Final = (ID_HEADER, POSITION_HEADER, XID_HEADER)


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with _receiver(request.getfixturevalue("pubsub")) as made:
        yield made


@contextmanager
def killable(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    folder = request.getfixturevalue("tmp_path") / "pubsub"
    with own_broker(folder, PubsubProcess) as server, _receiver(Pubsub(server), server) as made:
        yield made


@contextmanager
def _receiver(pubsub: Pubsub, killed: PubsubProcess | None = None) -> Iterator[Receiver]:
    delivery = PubsubDelivery.model_validate(pubsub.settings())
    topics = f"{pubsub.prefix}.shop.orders", f"{pubsub.prefix}-.Ödd_ / %2A table?"
    names = topics[0], f"{pubsub.prefix}-.%C3%96dd_%20%2F%20%252A%20table%3F"
    subscriber = Subscriber(pubsub.server.ports["plain"], names)
    yield Receiver(
        partial(new_destination, delivery, IDENTITY),
        lambda: [received_message(message) for message in subscriber()],
        topics,
        headers=(("Größe / x-ü", "Ünïcode ✓".encode()), ("bytes", b"\x00\xff"), ("empty", b""), ("plain", b"text")),
        missing={"stores progress": "a topic does not store progress with its messages"},
        too_large=10_000_000,
        server=killed,
    )
    subscriber.close()


def received_message(message: Any) -> Received:
    """The event that a message contains, as the guide says."""
    attributes = dict(message.attributes)
    key, key64 = attributes.pop("cdc.key", None), attributes.pop("cdc.key_base64", None)
    topic, is_tombstone = attributes.pop("cdc.topic"), attributes.pop("cdc.tombstone", None)
    listed = [
        (name, base64.b64decode(value) if encoding else value.encode())
        for name, value, *encoding in json.loads(attributes.pop("cdc.headers", "[]"))
    ]
    own = tuple((name, attributes.pop(name).encode()) for name in _OWN)
    others = sorted([*((name, value.encode()) for name, value in attributes.items()), *listed])
    return Received(
        own[0][1].decode(),
        topic,
        base64.b64decode(key64) if key64 is not None else key.encode() if key is not None else None,
        None if is_tombstone else message.data,
        (*others, *own),
    )
