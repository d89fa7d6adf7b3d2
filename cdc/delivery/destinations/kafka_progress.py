"""The progress of a Kafka delivery: the newest record with the delivery's key in one partition of a compacted topic."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from cdc.delivery.destinations.kafka_client import SLICE, ClientErrors
from cdc.errors import CdcError, DestinationUnavailable

TOPIC_CONFIG: Final = {
    # only closed segments are compacted
    "segment.bytes": str(4 * 2**20),
    "min.cleanable.dirty.ratio": "0.1",
}
"""Settings of a topic that gets one small record per commit."""
PARTITION: Final = 0
_OPEN_TRANSACTION: Final = (
    "wait until the brokers abort it, which they do after its timeout; if they have lost it, find it with "
    "'kafka-transactions.sh find-hanging', and end it with 'kafka-transactions.sh abort'"
)
_FIRST_STEP: Final = 64
"""Records at the end of the partition that are read first."""
_STEP_FACTOR: Final = 16
_NO_LEADER: Final = (
    KafkaError._NOENT,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)
"""Codes for a partition that gets its leader at the moment."""


class StoredProgress:
    """Reads the progress of one delivery.

    The client of the delivery has initialized its transactions before, so the delivery has no open transaction. Others
    may share the topic: while a transaction of theirs is open, later records are not yet visible, and the call waits.
    """

    def __init__(self, client: dict[str, Any], topic: str, errors: ClientErrors, timeout: float) -> None:
        self._client = client
        self._topic = topic
        self._errors = errors
        self._timeout = timeout

    def read(self, admin: AdminClient, key: bytes) -> bytes | None:
        """Return the newest committed progress; None if there is none."""
        first = self._offset(admin, OffsetSpec.earliest())
        after = self._offset(admin, OffsetSpec.latest())
        consumer = Consumer(
            {
                **self._client,
                "group.id": self._client["client.id"],
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
            }
        )
        try:
            return self._newest(consumer, key, first, after)
        finally:
            consumer.close()

    def _newest(self, consumer: Consumer, key: bytes, first: int, after: int) -> bytes | None:
        """Read from a little before the end, and from ever earlier until there is a record.

        Offsets are counted also for records that were compacted away, aborted, or end a transaction.
        """
        step, found = _FIRST_STEP, None
        start = after
        while found is None and start > first:
            start = max(first, after - step)
            found = self._last_record(consumer, key, start, after)
            step *= _STEP_FACTOR
        return found

    def _last_record(self, consumer: Consumer, key: bytes, start: int, after: int) -> bytes | None:
        """The last record of the key from one offset to another."""
        consumer.assign([TopicPartition(self._topic, PARTITION, start)])
        found = None
        end = None
        deadline = monotonic() + self._timeout
        while end is None or end < after:
            message = consumer.poll(SLICE)
            if message is not None and message.error() is None:
                found = message.value() if message.key() == key else found
                deadline = monotonic() + self._timeout
                continue
            if message is not None:
                end = self._visible_end(message, end)
            self._errors.check_connection()
            if monotonic() >= deadline:
                raise self._late(is_silent=end is None)
        return found

    def _visible_end(self, message: Any, known: int | None) -> int | None:
        """The offset up to which records are visible, of a message without record that may contain it."""
        error = message.error()
        if error.code() == KafkaError._PARTITION_EOF:
            return int(message.offset())
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return known  # the consumer is in no group
        raise self._errors.meaning(error, f"topic {self._topic!r} cannot be read")

    def _late(self, *, is_silent: bool) -> CdcError:
        what = f"topic {self._topic!r} cannot be read to its end"
        if is_silent:
            return self._errors.silence(what)
        return DestinationUnavailable(f"{what}: another client has an open transaction there", remedy=_OPEN_TRANSACTION)

    def _offset(self, admin: AdminClient, position: OffsetSpec) -> int:
        partition, deadline = TopicPartition(self._topic, PARTITION), monotonic() + self._timeout
        while True:
            answers = admin.list_offsets(
                {partition: position}, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=self._timeout
            )
            try:
                found: int = answers[partition].result().offset
            except KafkaException as exc:
                error, what = exc.args[0], f"topic {self._topic!r} cannot be read"
                admin.poll(SLICE if error.code() in _NO_LEADER else 0)
                if error.code() == KafkaError._TIMED_OUT:
                    raise self._errors.silence(what) from exc
                if error.code() not in _NO_LEADER or monotonic() >= deadline:
                    raise self._errors.meaning(error, what) from exc
            else:
                return found
