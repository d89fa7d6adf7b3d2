"""What the destinations of AWS have in common: refusals before anything is sent, and the state of the client."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cdc.config.destinations import SqsDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, EventsRefused
from cdc.delivery.destinations.sqs import SqsDestination
from cdc.errors import DestinationUnavailable, EventRefused, EventTooLarge
from tests.delivery.destinations.sending import event
from tests.fixtures.aws import Aws
from tests.fixtures.http_relay import Forward, HttpRelay, Reply


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


class RefusedEntry:
    """Refuses the second message of each batch, as AWS does for content that it does not take."""

    def reply(self, body: bytes, forward: Forward, /) -> Reply:
        entries = json.loads(body).get("Entries")
        if entries is None or len(entries) < 2:
            return forward(body)
        bad = {"Id": entries[1]["Id"], "Code": "InvalidMessageContents", "SenderFault": True, "Message": "secret"}
        passed = json.dumps(json.loads(body) | {"Entries": [entries[0], *entries[2:]]}).encode()
        given = forward(passed)
        return replace(given, body=json.dumps({**json.loads(given.body), "Failed": [bad]}).encode(), headers={})


def test_an_entry_that_the_service_refuses_is_a_dead_letter_and_the_others_arrive(aws: Aws) -> None:
    topic = f"{aws.prefix}.orders"
    with HttpRelay(aws.endpoint) as relay:
        relay.fault("POST", RefusedEntry(), times=None)
        settings = SqsDelivery.model_validate(aws.settings("sqs", endpoint=relay.url))
        made = SqsDestination(settings, DeliveryIdentity("shop", "to_aws", "0123456789abcdef"))
        made.open()
        sent = [event(number, topic, b"key %d" % number, b"x") for number in range(3)]
        made.send(sent)
        with pytest.raises(EventsRefused) as refused:
            made.commit(b"3")
        made.close()

    assert {name: type(error) for name, error in refused.value.refused.items()} == {sent[1].id: EventRefused}
    assert refused.value.others_acknowledged
    assert "secret" not in str(refused.value.refused[sent[1].id])


def test_a_closed_client_is_an_unavailable_destination(aws: Aws) -> None:
    made = destination(aws)
    with pytest.raises(DestinationUnavailable):
        made.send([event(1, "orders", b"key", b"x")])
    with pytest.raises(DestinationUnavailable):
        made.commit(b"1")
