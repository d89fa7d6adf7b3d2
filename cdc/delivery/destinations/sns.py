"""Amazon SNS: one message per event, at least once, in FIFO topics in the order of the keys.

A FIFO topic drops an event that is sent again within 5 minutes, as a FIFO queue does. Subscribers filter by the
attributes of a message, for example `cdc.topic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from cdc.config.destinations import SnsDelivery
from cdc.delivery.destinations.aws_client import FAILURES, is_missing, meaning, new_client
from cdc.delivery.destinations.aws_destination import AwsDestination, answer_of
from cdc.delivery.destinations.aws_messages import (
    ENTRIES,
    batch_entry,
    is_ordered,
    request_entry,
)
from cdc.delivery.destinations.contract import Event
from cdc.delivery.destinations.keyed_requests import RequestAnswer, RequestEntry
from cdc.errors import TopicMissing


class SnsDestination(AwsDestination[SnsDelivery]):
    """Topics of one account and region."""

    service: ClassVar[str] = "sns"
    longest_name: ClassVar[int] = 256
    entries: ClassVar[int] = ENTRIES

    def _entry(self, event: Event) -> RequestEntry:
        return request_entry(event, self._settings.topic_name)

    def _find(self, name: str, *, create: bool) -> str:
        region = self._client.meta.region_name
        arn = f"arn:{self._client.meta.partition}:sns:{region}:{self._owner()}:{name}"
        try:
            self._client.get_topic_attributes(TopicArn=arn)
        except FAILURES as exc:
            if not is_missing(exc):
                raise meaning(exc, f"topic {name!r} cannot be found") from exc
            if not create:
                raise TopicMissing(f"topic {name!r} does not exist in SNS") from exc
            self._create(name)
        return arn

    def _create(self, name: str) -> None:
        attributes = {"FifoTopic": "true", "ContentBasedDeduplication": "false"} if is_ordered(name) else {}
        try:
            self._client.create_topic(Name=name, Attributes=attributes)
        except FAILURES as exc:
            raise meaning(exc, f"topic {name!r} cannot be created") from exc

    def _owner(self) -> str:
        """Return the account that owns the topics; AWS answers this without any privilege."""
        if self._settings.owner is not None:
            return self._settings.owner
        client = new_client("sts", self._settings)
        try:
            account: str = client.get_caller_identity()["Account"]
        except FAILURES as exc:
            raise meaning(exc, "the account of the credentials cannot be found") from exc
        finally:
            client.close()
        return account

    def _post(self, place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        sent: list[dict[str, Any]] = [
            {"Message": entry.content.body, **batch_entry(index, entry)} for index, entry in enumerate(entries)
        ]
        try:
            answer = self._client.publish_batch(TopicArn=self._found[place], PublishBatchRequestEntries=sent)
        except FAILURES as exc:
            raise meaning(exc, f"events cannot be sent to topic {place!r}") from exc
        return answer_of({int(one["Id"]): one["Code"] for one in answer.get("Failed", ())}, entries)
