"""Amazon Kinesis Data Streams: one record per event, at least once, in the order of the keys.

A record has no attributes, so it contains the event as one JSON object, as `file` and `stdout` write it. Its partition
key is the key of the event. `PutRecords` may fail single records and keeps no order between them: see KeyedRequests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from cdc.config.destinations import KinesisDelivery
from cdc.delivery.destinations.aws_client import FAILURES, is_missing, meaning
from cdc.delivery.destinations.aws_destination import AwsDestination, answer_of
from cdc.delivery.destinations.broker_connection import hashed_key, text_of
from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.destinations.event_json import line_encoder
from cdc.delivery.destinations.keyed_requests import RequestAnswer, RequestEntry
from cdc.errors import DestinationUnavailable, TopicMissing

_LONGEST_KEY: Final = 256
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.")
_READY: Final = ("ACTIVE", "UPDATING")


class KinesisDestination(AwsDestination[KinesisDelivery]):
    """Streams of one account and region."""

    service: ClassVar[str] = "kinesis"
    longest_name: ClassVar[int] = 128
    entries: ClassVar[int] = 500
    request_bytes: ClassVar[int] = 5 << 20

    def __init__(self, settings: KinesisDelivery, identity: DeliveryIdentity) -> None:
        super().__init__(settings, identity)
        self._line = line_encoder(settings)

    def _entry(self, event: Event) -> RequestEntry:
        name = self._settings.stream.format(topic=escaped_stream(event.topic))
        key, content = partition_key(event), self._line(event)[:-1]
        return RequestEntry(event, name, key, len(content) + len(key.encode()), content)

    def _find(self, name: str, *, create: bool) -> str:
        try:
            state = self._state(name)
        except FAILURES as exc:
            if not is_missing(exc):
                raise meaning(exc, f"stream {name!r} cannot be found") from exc
            if not create:
                raise TopicMissing(f"stream {name!r} does not exist") from exc
            state = self._create(name)
        if state not in _READY:
            raise DestinationUnavailable(f"stream {name!r} is {state!r}; the delivery waits until it is 'ACTIVE'")
        return name

    def _state(self, name: str) -> str:
        found: str = self._client.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamStatus"]
        return found

    def _create(self, name: str) -> str:
        try:
            self._client.create_stream(StreamName=name, StreamModeDetails={"StreamMode": "ON_DEMAND"})
            return self._state(name)
        except FAILURES as exc:
            raise meaning(exc, f"stream {name!r} cannot be created") from exc

    def _post(self, place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        records: list[dict[str, Any]] = [{"Data": entry.content, "PartitionKey": entry.lane} for entry in entries]
        try:
            answer = self._client.put_records(StreamName=place, Records=records)
        except FAILURES as exc:
            raise meaning(exc, f"events cannot be sent to stream {place!r}") from exc
        codes = {index: one["ErrorCode"] for index, one in enumerate(answer["Records"]) if one.get("ErrorCode")}
        return answer_of(codes, entries)


def partition_key(event: Event) -> str:
    """Return the partition key: the key of the event, hashed if it is no text of 1 to 256 characters."""
    if event.key is None:
        return event.id
    text = text_of(event.key)
    return text if text and len(text) <= _LONGEST_KEY else hashed_key(event.key)


def escaped_stream(topic: str) -> str:
    """Return a topic as a part of the name of a stream: `-` and two digits for a byte that it cannot have."""
    return "".join(one if one in _PLAIN else "".join(f"-{byte:02X}" for byte in one.encode()) for one in topic)
