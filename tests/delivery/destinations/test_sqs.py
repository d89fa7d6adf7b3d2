"""SQS: one queue for all topics, and queues without order."""

from __future__ import annotations

from cdc.config.destinations import SqsDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.sqs import SqsDestination
from tests.delivery.destinations.sending import event
from tests.fixtures.aws import Aws


def test_one_queue_without_order_takes_the_events_of_all_topics(aws: Aws) -> None:
    settings = SqsDelivery.model_validate(aws.settings("sqs", queue=f"{aws.prefix}-all"))
    destination = SqsDestination(settings, DeliveryIdentity("shop", "to_aws", "0123456789abcdef"))
    destination.open()
    destination.send([event(number, f"topic {number}", b"key", b"value") for number in range(3)])
    destination.commit(b"3")
    destination.close()
    client = aws.client("sqs")
    url = client.get_queue_url(QueueName=f"{aws.prefix}-all")["QueueUrl"]
    found = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"])["Messages"]
    client.close()

    topics = sorted(one["MessageAttributes"]["cdc.topic"]["StringValue"] for one in found)
    assert topics == ["topic 0", "topic 1", "topic 2"]
