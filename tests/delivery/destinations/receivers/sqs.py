"""Amazon SQS as the tests of the contract use it: FIFO queues, read to their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from cdc.config.destinations import SqsDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.aws_messages import escaped_topic
from cdc.delivery.destinations.contract import DeliveryIdentity
from tests.delivery.destinations.receivers import Receiver
from tests.fixtures.aws import Aws, QueueReader

CRASH_POINTS: Final = ("sqs_acknowledged",)
IDENTITY: Final = DeliveryIdentity("shop", "to_aws", "0123456789abcdef")


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    aws: Aws = request.getfixturevalue("aws")
    topics = f"{aws.prefix}.shop.orders", f"{aws.prefix}-.Ödd_ / table?"
    queues = [f"{escaped_topic(topic)}.fifo" for topic in topics]
    client = aws.client("sqs")
    urls = [f"{aws.endpoint}/123456789012/{name}" for name in queues]
    delivery = SqsDelivery.model_validate(aws.settings("sqs"))
    yield Receiver(
        partial(new_destination, delivery, IDENTITY),
        QueueReader(client, urls),
        topics,
        many=80,
        missing={"stores progress": "a queue does not store progress with its messages"},
        too_large=1 << 18,
        largest=(1 << 18) - 2048,
    )
    client.close()
