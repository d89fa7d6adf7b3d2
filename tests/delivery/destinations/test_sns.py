"""SNS: the account of the topics, and topics without order."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config.destinations import SnsDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.sns import SnsDestination
from cdc.errors import TopicMissing
from tests.delivery.destinations.sending import event
from tests.fixtures.aws import Aws


def send_one(aws: Aws, **given: Any) -> None:
    settings = SnsDelivery.model_validate(aws.settings("sns", **given))
    destination = SnsDestination(settings, DeliveryIdentity("shop", "to_aws", "0123456789abcdef"))
    destination.open()
    try:
        destination.send([event(1, f"{aws.prefix}.orders", b"key", b"value")])
        destination.commit(b"1")
    finally:
        destination.close()


def test_a_topic_without_order_takes_events_too(aws: Aws) -> None:
    send_one(aws, topic_name="{topic}")
    client = aws.client("sns")
    found = [one["TopicArn"] for one in client.list_topics()["Topics"]]
    client.close()

    assert f"arn:aws:sns:us-east-1:123456789012:{aws.prefix}-orders" in found


def test_topics_of_another_account_are_not_found_here(aws: Aws) -> None:
    send_one(aws)
    with pytest.raises(TopicMissing):
        send_one(aws, owner="210987654321", create=False)
