"""What the destinations of AWS have in common: refusals before anything is sent, and the state of the client."""

from __future__ import annotations

import pytest

from cdc.config.destinations import SqsDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, EventsRefused
from cdc.delivery.destinations.sqs import SqsDestination
from cdc.errors import DestinationUnavailable, EventRefused, EventTooLarge
from tests.delivery.destinations.sending import event
from tests.fixtures.aws import Aws


def destination(aws: Aws) -> SqsDestination:
    settings = SqsDelivery.model_validate(aws.settings("sqs"))
    return SqsDestination(settings, DeliveryIdentity("shop", "to_aws", "0123456789abcdef"))


def test_events_that_cannot_be_sent_are_refused_before_any_is_sent(aws: Aws) -> None:
    made = destination(aws)
    made.open()
    topic = f"{aws.prefix}.orders"
    large = event(2, topic, b"key", b"x" * 300_000)
    long = event(3, topic + "x" * 80, b"key", b"x")
    with pytest.raises(EventsRefused) as refused:
        made.send([event(1, topic, b"other", b"x"), large, long, event(4, topic, b"key", b"x")])
    made.commit(b"1")
    made.close()

    assert {name: type(error) for name, error in refused.value.refused.items()} == {
        large.id: EventTooLarge,
        long.id: EventRefused,
    }
    client = aws.client("sqs")
    assert "QueueUrls" not in client.list_queues(QueueNamePrefix=aws.prefix)
    client.close()


def test_a_closed_client_is_an_unavailable_destination(aws: Aws) -> None:
    made = destination(aws)
    with pytest.raises(DestinationUnavailable):
        made.send([event(1, "orders", b"key", b"x")])
    with pytest.raises(DestinationUnavailable):
        made.commit(b"1")
