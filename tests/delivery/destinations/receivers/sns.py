"""Amazon SNS as the tests of the contract use it: FIFO topics with a subscribed FIFO queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from cdc.config.destinations import SnsDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.aws_messages import escaped_topic
from cdc.delivery.destinations.contract import DeliveryIdentity
from tests.delivery.destinations.receivers import Receiver
from tests.fixtures.aws import Aws, QueueReader

CRASH_POINTS: Final = ("sns_acknowledged",)
IDENTITY: Final = DeliveryIdentity("shop", "to_aws", "0123456789abcdef")


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    aws: Aws = request.getfixturevalue("aws")
    topics = f"{aws.prefix}.shop.orders", f"{aws.prefix}-.Ödd_ / table?"
    queues, publisher = aws.client("sqs"), aws.client("sns")
    url = queues.create_queue(QueueName=f"{aws.prefix}.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    arn = queues.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    for topic in topics:
        made = publisher.create_topic(Name=f"{escaped_topic(topic)}.fifo", Attributes={"FifoTopic": "true"})
        publisher.subscribe(
            TopicArn=made["TopicArn"], Protocol="sqs", Endpoint=arn, Attributes={"RawMessageDelivery": "true"}
        )
    delivery = SnsDelivery.model_validate(aws.settings("sns"))
    yield Receiver(
        partial(new_destination, delivery, IDENTITY),
        QueueReader(queues, [url]),
        topics,
        many=80,
        missing={"stores progress": "a topic does not store progress with its messages"},
        too_large=1 << 18,
        largest=(1 << 18) - 2048,
    )
    queues.close()
    publisher.close()
