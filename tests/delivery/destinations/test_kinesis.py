"""Kinesis under throttling: records that fail in a request are sent again before later ones of their key."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from cdc.config.destinations import KinesisDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.kinesis import KinesisDestination, escaped_stream, partition_key
from tests.delivery.destinations.receivers.kinesis import records
from tests.delivery.destinations.sending import event, numbered
from tests.fixtures.aws import Aws
from tests.fixtures.http_relay import Forward, HttpRelay, Reply


@dataclass
class ThrottleRecords:
    """A share of the records of each PutRecords does not reach the stream; their failure is in the answer."""

    share: float
    random: Random = field(default_factory=lambda: Random(3))
    failed: int = 0

    def reply(self, body: bytes, forward: Forward, /) -> Reply:
        request = json.loads(body)
        if "Records" not in request:
            return forward(body)
        away = [self.random.random() < self.share for _ in request["Records"]]
        passed = [one for one, gone in zip(request["Records"], away, strict=True) if not gone]
        self.failed += sum(away)
        failure = {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "slow down"}
        if not passed:
            answer: Any = {"FailedRecordCount": len(away), "Records": [failure] * len(away)}
            return Reply(200, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps(answer).encode())
        given = forward(json.dumps(request | {"Records": passed}).encode())
        taken = iter(json.loads(given.body)["Records"])
        found = [failure if gone else next(taken) for gone in away]
        return replace(given, body=json.dumps({"FailedRecordCount": sum(away), "Records": found}).encode(), headers={})


def test_the_order_of_a_key_survives_throttled_records(aws: Aws) -> None:
    topic = f"{aws.prefix}.orders"
    throttle = ThrottleRecords(0.4)
    with HttpRelay(aws.endpoint) as relay:
        relay.fault("POST", throttle, times=None)
        settings = KinesisDelivery.model_validate(aws.settings("kinesis", endpoint=relay.url))
        destination = KinesisDestination(settings, DeliveryIdentity("shop", "to_aws", "0123456789abcdef"))
        destination.open()
        sent = numbered(range(40), [topic])
        destination.send(sent)
        destination.commit(b"40")
        destination.close()
    client = aws.client("kinesis")
    got = records(client, [topic])
    client.close()

    assert throttle.failed > 5
    for key in {one.key for one in sent}:
        assert [one.id for one in got if one.key == key] == [one.id for one in sent if one.key == key]


@pytest.mark.parametrize("key", [b"", b"\xff", b"x" * 257, b"plain", "ü".encode() * 256])
def test_every_key_has_a_partition_key(key: bytes) -> None:
    assert 1 <= len(partition_key(event(1, "orders", key, b"x"))) <= 256


def test_names_of_streams_are_reversible() -> None:
    assert escaped_stream("shop.orders_1") == "shop.orders_1"
    assert escaped_stream("a-b/ü") == "a-2Db-2F-C3-BC"
