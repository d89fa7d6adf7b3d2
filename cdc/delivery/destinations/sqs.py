"""Amazon SQS: one message per event, at least once, in FIFO queues in the order of the keys.

A FIFO queue drops an event that is sent again within 5 minutes, also after a crash, because its de-duplication id is
made from the id of the event. A standard queue keeps no order and delivers some messages twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from cdc.config.destinations import SqsDelivery
from cdc.delivery.destinations.aws_client import FAILURES, is_missing, meaning
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

_FIFO_ATTRIBUTES: Final = {
    "FifoQueue": "true",
    "DeduplicationScope": "messageGroup",
    "FifoThroughputLimit": "perMessageGroupId",
}


class SqsDestination(AwsDestination[SqsDelivery]):
    """Queues of one account and region."""

    service: ClassVar[str] = "sqs"
    longest_name: ClassVar[int] = 80
    entries: ClassVar[int] = ENTRIES

    def _entry(self, event: Event) -> RequestEntry:
        return request_entry(event, self._settings.queue)

    def _find(self, name: str, *, create: bool) -> str:
        owner = {} if self._settings.owner is None else {"QueueOwnerAWSAccountId": self._settings.owner}
        try:
            found: str = self._client.get_queue_url(QueueName=name, **owner)["QueueUrl"]
        except FAILURES as exc:
            if not is_missing(exc):
                raise meaning(exc, f"queue {name!r} cannot be found") from exc
            if not create:
                raise TopicMissing(f"queue {name!r} does not exist") from exc
            return self._create(name)
        return found

    def _create(self, name: str) -> str:
        attributes = {"MaximumMessageSize": str(self._settings.max_event_size)}
        if is_ordered(name):
            attributes |= _FIFO_ATTRIBUTES
        try:
            created: str = self._client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        except FAILURES as exc:
            raise meaning(exc, f"queue {name!r} cannot be created") from exc
        return created

    def _post(self, place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        sent: list[dict[str, Any]] = [
            {"MessageBody": entry.content.body, **batch_entry(index, entry)} for index, entry in enumerate(entries)
        ]
        try:
            answer = self._client.send_message_batch(QueueUrl=self._found[place], Entries=sent)
        except FAILURES as exc:
            raise meaning(exc, f"events cannot be sent to queue {place!r}") from exc
        return answer_of({int(one["Id"]): one["Code"] for one in answer.get("Failed", ())}, entries)
