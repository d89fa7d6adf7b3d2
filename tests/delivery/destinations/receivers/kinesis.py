"""Amazon Kinesis as the tests of the contract use it: streams, read shard by shard from their beginning."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest

from cdc.config.destinations import KinesisDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.kinesis import escaped_stream
from tests.delivery.destinations.receivers import Received, Receiver
from tests.fixtures.aws import Aws

CRASH_POINTS: Final = ("kinesis_acknowledged",)
IDENTITY: Final = DeliveryIdentity("shop", "to_aws", "0123456789abcdef")


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    aws: Aws = request.getfixturevalue("aws")
    topics = f"{aws.prefix}.shop.orders", f"{aws.prefix}-.Ödd_ / table?"
    client = aws.client("kinesis")
    delivery = KinesisDelivery.model_validate(aws.settings("kinesis"))
    yield Receiver(
        partial(new_destination, delivery, IDENTITY),
        partial(records, client, [escaped_stream(topic) for topic in topics]),
        topics,
        many=80,
        missing={"stores progress": "a stream does not store progress with its messages"},
        too_large=1 << 20,
        largest=(1 << 20) - 2048,
    )
    client.close()


def records(client: Any, streams: Sequence[str]) -> list[Received]:
    """The events of all shards of the streams."""
    return [
        received_line(record["Data"])
        for stream in streams
        if stream in {one["StreamName"] for one in client.list_streams()["StreamSummaries"]}
        for shard in client.list_shards(StreamName=stream)["Shards"]
        for record in _records_of(client, stream, shard["ShardId"])
    ]


def _records_of(client: Any, stream: str, shard: str) -> Iterator[dict[str, Any]]:
    place = {"StreamName": stream, "ShardId": shard, "ShardIteratorType": "TRIM_HORIZON"}
    iterator = client.get_shard_iterator(**place)["ShardIterator"]
    while True:
        answer = client.get_records(ShardIterator=iterator)
        yield from answer["Records"]
        if not answer["Records"] or not answer.get("MillisBehindLatest"):
            return
        iterator = answer["NextShardIterator"]


def received_line(line: bytes) -> Received:
    """The event that a record contains."""
    found = json.loads(line)
    headers = tuple((name, _bytes(value) or b"") for name, value in found["headers"].items())
    return Received(found["id"], found["topic"], _bytes(found["key"]), _bytes(found["value"]), headers)


def _bytes(given: str | dict[str, str] | None) -> bytes | None:
    if given is None:
        return None
    return base64.b64decode(given["base64"]) if isinstance(given, dict) else given.encode()
