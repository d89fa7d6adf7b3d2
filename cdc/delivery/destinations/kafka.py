"""Kafka: events and progress in one transaction per commit, so that a consumer sees each event exactly once.

The progress is a record in a compacted topic that belongs to the same transaction as the events. `open` initializes the
transactions of the delivery: brokers abort the transaction that an earlier process has left open, and refuse that
process from now on. Only then it reads the progress, to the end of the topic.

After an error the client is given up, and the next `open` makes a new one: the outcome of a transaction whose end was
not answered is known only then. Consumers have to read with `isolation.level=read_committed`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from time import monotonic
from typing import Any, ClassVar, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from cdc import failpoint
from cdc.config.destinations import KafkaDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, EventsRefused, Promise
from cdc.delivery.destinations.event_columns import EventColumns
from cdc.delivery.destinations.kafka_bulk import BulkSender
from cdc.delivery.destinations.kafka_client import (
    PYTHON_SETTINGS,
    REFUSED,
    SLICE,
    TOO_LARGE,
    ClientErrors,
    client_settings,
    producer_settings,
    repeat,
)
from cdc.delivery.destinations.kafka_producer import KafkaMessage, KafkaProducer
from cdc.delivery.destinations.kafka_progress import PARTITION, TOPIC_CONFIG, StoredProgress
from cdc.delivery.destinations.kafka_topics import TopicDirectory, is_possible_name
from cdc.errors import CdcError, DeliveryError, DeliveryFenced, DestinationUnavailable, EventRefused, EventTooLarge

_BATCH_SIZE: Final = 1_000_000
"""Bytes of events that one request for a partition contains."""
_FEWEST: Final = 1_000
_FAILED_BEFORE: Final = (KafkaError._STATE, KafkaError._FATAL)
"""Codes of a call after an error of the transaction or of the client."""
_ABORT_SECONDS: Final = 2.0
"""How long `close` waits for the end of a transaction that it aborts; consumers wait for the next `open` otherwise."""


class KafkaDestination:
    """Topics of a Kafka cluster."""

    promise: ClassVar[Promise] = Promise.EXACTLY_ONCE
    stores_progress: ClassVar[bool] = True
    collect_seconds: ClassVar[float] = 0.5
    """The end of a transaction takes as long as sending 8,000 events. With one window of 10,000 events in each
    transaction, 190,000 events were sent per second; 265,000 with a transaction of 0.25 s, and 280,000 with this.
    """

    def __init__(self, settings: KafkaDelivery, identity: DeliveryIdentity) -> None:
        self._settings = settings
        self._name = f"cdc.{identity}"
        self._key = str(identity).encode()
        self._transactional_id = settings.transactional_id or f"{self._name}.{identity.log_id[:8]}"
        self._progress_topic = settings.progress_topic or f"cdc.progress.{identity}"
        self._errors = ClientErrors("")
        self._client: dict[str, Any] = {}
        self._producer: KafkaProducer | None = None
        self._bulk: BulkSender | None = None
        """Passes columns of events to the producer."""
        self._topics: TopicDirectory | None = None
        self._began: float | None = None
        """When the open transaction was begun."""
        self._suspected: set[str] = set()
        """Topics of which a broker refused events; theirs are sent one by one, so that the refused one is known."""
        self._batch_too_large = False
        """Whether a broker refused a batch of a suspected topic because of its size, and no single event so far."""
        self._batch_size = _BATCH_SIZE
        self._unanswered = 0
        """Initializations since the last commit that no broker answered; each may still fence a later one."""

    def open(self) -> bytes | None:
        self.close()
        self._errors = errors = ClientErrors(f"Kafka at {self._settings.servers[0]!r}")
        client, timeout = client_settings(self._settings, self._name, errors), self._settings.timeout
        producer = self._new_producer(client)
        admin = AdminClient(client)
        topics = TopicDirectory(admin, self._settings.topics, errors, timeout)
        progress = None
        if not topics.create_compacted(self._progress_topic, TOPIC_CONFIG):
            progress = StoredProgress(client, self._progress_topic, errors, timeout).read(admin, self._key)
        self._client, self._topics = client, topics
        self._use(producer)
        return progress

    def check(self, topics: Collection[str]) -> None:
        errors = ClientErrors(f"Kafka at {self._settings.servers[0]!r}")
        admin = AdminClient(client_settings(self._settings, self._name, errors))
        directory = TopicDirectory(admin, self._settings.topics, errors, self._settings.timeout)
        directory.check([self._progress_topic, *filter(is_possible_name, topics)])

    def send(self, events: Sequence[Event]) -> None:
        producer, topics = self._transaction()
        refused = _require_topics(topics, events)
        if self._suspected:
            refused |= self._send_each(events, set(refused))
        else:
            accepted = [event for event in events if event.id not in refused] if refused else events
            refused |= self._send_together(producer, accepted)
        if refused:
            raise EventsRefused(refused)
        self._check()

    def commit(self, progress: bytes) -> None:
        producer, _ = self._transaction()
        self._produce_later(producer, KafkaMessage(self._progress_topic, progress, self._key, partition=PARTITION))
        failpoint.hit("kafka_progress_sent")
        self._flush(producer)
        failpoint.hit("kafka_flushed")
        try:
            repeat(producer.commit_transaction, self._errors, "a transaction was not committed", self._settings.timeout)
        except DeliveryFenced as exc:
            raise self._fenced(exc) from exc
        failpoint.hit("kafka_committed")
        self._began = None
        self._unanswered = 0
        if self._suspected:
            self._trust_again()

    def close(self) -> None:
        producer, self._producer, self._bulk, self._topics = self._producer, None, None, None
        began, self._began = self._began, None
        if producer is None:
            return
        if began is not None and self._errors.fatal is None:
            producer.purge()
            with suppress(KafkaException):  # the next `open` aborts it
                producer.abort_transaction(_ABORT_SECONDS)
        producer.close()

    def _new_producer(self, client: dict[str, Any]) -> KafkaProducer:
        """A client whose transactions are initialized: no earlier one can commit, or has an open transaction."""
        errors = self._errors
        shared = {name: value for name, value in client.items() if name not in PYTHON_SETTINGS}
        own = producer_settings(self._settings, self._transactional_id, self._batch_size)
        try:
            producer = KafkaProducer({**shared, **own}, errors)
        except KafkaException as exc:
            raise errors.meaning(exc.args[0], "the client does not start") from exc

        def initialize(seconds: float) -> None:
            producer.poll(0)
            producer.init_transactions(seconds)

        self._unanswered += 1
        repeat(initialize, errors, "transactions cannot be initialized", self._settings.timeout)
        self._unanswered -= 1
        failpoint.hit("kafka_initialized")
        return producer

    def _use(self, producer: KafkaProducer) -> None:
        if self._producer is not None:
            self._producer.close()
        self._producer, self._bulk = producer, BulkSender(producer)

    def _transaction(self) -> tuple[KafkaProducer, TopicDirectory]:
        """Begin a transaction unless one is open; return the client and the topics."""
        if self._producer is None or self._topics is None:
            raise DestinationUnavailable("the Kafka client is closed")
        if self._began is None:
            try:
                self._producer.begin_transaction()
            except KafkaException as exc:
                self._fail(exc)
            self._began = monotonic()
        return self._producer, self._topics

    def _send_together(self, producer: KafkaProducer, events: Sequence[Event]) -> dict[str, CdcError]:
        """Pass the events to the client; return those that it refuses."""
        refused: dict[str, CdcError] = {}
        assert self._bulk is not None  # noqa: S101 - it belongs to the producer
        with closing(self._bulk.send(events)) as left_out:
            for index in left_out:
                fields = events.fields if isinstance(events, EventColumns) else None
                event = events[index] if fields is None else fields.slice(index, index + 1).events()[0]
                refused |= self._send(producer, event)  # the client had no room, or will never take it
        return refused

    def _send(self, producer: KafkaProducer, event: Event) -> dict[str, CdcError]:
        """Pass an event to the client as soon as it has room; return the event if the client refuses it."""
        message = KafkaMessage(event.topic, event.value, event.key, event.headers)
        try:
            producer.produce(message)
        except BufferError:
            self._produce_later(producer, message)
        except KafkaException as exc:
            if exc.args[0].code() not in TOO_LARGE:
                self._fail(exc)
            return {event.id: self._too_large(event)}
        return {}

    def _send_each(self, events: Sequence[Event], skipped: set[str]) -> dict[str, CdcError]:
        """Send each event of the suspected topics alone; return those that a broker refuses, with the transaction.

        A refused event ends the transaction, so the next one is sent in another. Nothing of either is committed:
        the caller raises EventsRefused.
        """
        refused: dict[str, CdcError] = {}
        for event in events:
            if event.id in skipped:
                continue
            producer, _ = self._transaction()
            refused |= self._send(producer, event)
            if event.topic not in self._suspected or event.id in refused:
                continue
            try:
                self._flush(producer)
            except (DeliveryError, EventsRefused):
                reason = self._errors.failed
                if reason is None or reason[0].code() not in REFUSED or reason[1] != event.topic:
                    raise
                refused[event.id] = self._errors.meaning(reason[0], f"event {event.id!r} was refused")
                self._errors.failed = None
                self._began = None
                self._batch_too_large = False
                # an old client would number its next messages wrongly
                self._use(self._new_producer(self._client))
        return refused

    def _trust_again(self) -> None:
        """Send events together again; smaller batches if only a batch was too large, and none of its events."""
        if self._batch_too_large:
            self._batch_size = max(_FEWEST, self._batch_size // 2)
            self._use(self._new_producer(self._client))
        self._batch_too_large = False
        self._suspected.clear()

    def _too_large(self, event: Event) -> CdcError:
        size = len(event.key or b"") + len(event.value or b"")
        size += sum(len(name.encode()) + len(value) for name, value in event.headers)
        return EventTooLarge(
            f"event {event.id!r} has {size} bytes; the delivery sends at most {self._settings.max_event_size}",
            remedy="raise 'max_event_size', and 'message.max.bytes' of the brokers, then run 'cdc dlq retry SINK'",
        )

    def _produce_later(self, producer: KafkaProducer, message: KafkaMessage) -> None:
        """Wait until the client has room for a message."""
        deadline = monotonic() + self._settings.timeout
        while True:
            try:
                producer.produce(message)
            except BufferError:
                if producer.poll(SLICE):
                    deadline = monotonic() + self._settings.timeout
                self._check(deadline, "events wait to be sent")
            except KafkaException as exc:
                self._fail(exc)
            else:
                return

    def _flush(self, producer: KafkaProducer) -> None:
        """Return when brokers have acknowledged every event."""
        deadline, waiting = monotonic() + self._settings.timeout, producer.waiting
        while left := producer.flush(SLICE):
            if left < waiting:
                deadline, waiting = monotonic() + self._settings.timeout, left
            self._check(deadline, "events were not acknowledged")
        self._check(deadline, "events were not acknowledged")

    def _check(self, deadline: float = math.inf, what: str = "") -> None:
        """Raise an error that the client has reported, or one for brokers that have not answered until a deadline."""
        if self._producer is not None:
            self._producer.poll(0)
        if self._errors.failed or self._errors.fatal:
            self._fail()
        if monotonic() >= deadline:
            raise self._errors.silence(what)

    def _fail(self, exc: Any = None) -> Any:
        """Raise what an error of the client means."""
        errors = self._errors
        # the client has failed before this call did, and may not have reported yet why
        seconds = SLICE if isinstance(exc, KafkaException) and exc.args[0].code() in _FAILED_BEFORE else 0
        if self._producer is not None and not (errors.failed or errors.fatal):
            self._producer.poll(seconds)
        failed = errors.failed
        if errors.fatal is None and failed is not None and self._is_refusal(*failed):
            error, topic = failed
            self._suspected.add(topic)
            self._batch_too_large = error.code() in TOO_LARGE
            raise EventsRefused({}) from exc  # the batch comes again, and is sent one by one
        try:
            errors.check()
        except DeliveryFenced as fenced:
            raise self._fenced(fenced) from exc
        error = exc.args[0] if isinstance(exc, KafkaException) else KafkaError(KafkaError._FAIL, str(exc))
        raise errors.meaning(error, "events cannot be sent") from exc

    def _is_refusal(self, error: KafkaError, topic: str) -> bool:
        return error.code() in REFUSED and topic != self._progress_topic

    def _fenced(self, error: DeliveryFenced) -> CdcError:
        """What it means that brokers refuse the client as an old one: there may be no newer one."""
        if self._unanswered:
            self._unanswered -= 1
            return DestinationUnavailable(
                "Kafka answered an earlier attempt of this process to open the delivery, which ended the present one"
            )
        if self._began is None or monotonic() - self._began < self._settings.transaction_timeout:
            return error
        return DestinationUnavailable(
            f"Kafka aborted a transaction that took longer than {self._settings.transaction_timeout:g} s",
            remedy="raise 'transaction_timeout', and 'transaction.max.timeout.ms' of the brokers, or lower 'batch'",
        )


def _require_topics(topics: TopicDirectory, events: Sequence[Event]) -> dict[str, CdcError]:
    """Return when the topics of the events exist; return the events whose topics cannot exist."""
    fields = events.fields if isinstance(events, EventColumns) else None
    unknown = ({event.topic for event in events} if fields is None else {*fields.topics}) - topics.known
    if not unknown:
        return {}
    impossible = {topic for topic in unknown if not is_possible_name(topic)}
    if possible := unknown - impossible:
        topics.require(possible)
    if not impossible:
        return {}
    reason = "is no name of a Kafka topic: letters, digits, '.', '_' and '-', at most 249"
    return {
        event.id: EventRefused(f"{event.topic!r} {reason}", remedy="set 'topic' in a rule for the table")
        for event in events
        if event.topic in impossible
    }
