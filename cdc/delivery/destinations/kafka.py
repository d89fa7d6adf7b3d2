"""Kafka: events and progress in one transaction per commit, so that a consumer sees each event exactly once.

The progress is a record in a compacted topic that belongs to the same transaction as the events. `open` initializes the
transactions of the delivery: brokers abort the transaction that an earlier process has left open, and refuse that
process from now on. Only then it reads the progress, to the end of the topic.

After an error the client is given up, and the next `open` makes a new one: the outcome of a transaction whose end was
not answered is known only then. Consumers have to read with `isolation.level=read_committed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar, Final

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from cdc import failpoint
from cdc.config.destinations import KafkaDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, EventsRefused, Promise
from cdc.delivery.destinations.kafka_client import (
    REFUSED,
    TOO_LARGE,
    ClientErrors,
    client_settings,
    producer_settings,
    repeat,
    serve,
)
from cdc.delivery.destinations.kafka_progress import PARTITION, TOPIC_CONFIG, StoredProgress
from cdc.delivery.destinations.kafka_topics import TopicDirectory, is_possible_name
from cdc.errors import CdcError, DeliveryError, DeliveryFenced, DestinationUnavailable, EventRefused, EventTooLarge

_BATCH_SIZE: Final = 1_000_000
"""Bytes of events that one request for a partition contains."""
_FEWEST: Final = 1_000
_ABORT_SECONDS: Final = 2.0
"""How long `close` waits for the end of a transaction that it aborts; consumers wait for the next `open` otherwise."""


class KafkaDestination:
    """Topics of a Kafka cluster."""

    promise: ClassVar[Promise] = Promise.EXACTLY_ONCE
    stores_progress: ClassVar[bool] = True

    def __init__(self, settings: KafkaDelivery, identity: DeliveryIdentity) -> None:
        self._settings = settings
        self._name = f"cdc.{identity}"
        self._key = str(identity).encode()
        self._transactional_id = settings.transactional_id or f"{self._name}.{identity.log_id[:8]}"
        self._progress_topic = settings.progress_topic or f"cdc.progress.{identity}"
        self._errors = ClientErrors("")
        self._producer: Producer | None = None
        self._topics: TopicDirectory | None = None
        self._began: float | None = None
        """When the open transaction was begun."""
        self._suspected: set[str] = set()
        """Topics of which a broker refused events; theirs are sent one by one, so that the refused one is known."""
        self._batch_size = _BATCH_SIZE

    def open(self) -> bytes | None:
        self.close()
        self._errors = errors = ClientErrors(f"Kafka at {self._settings.servers[0]!r}")
        client = client_settings(self._settings, self._name, errors)
        own = producer_settings(self._settings, self._transactional_id, self._batch_size)
        timeout = self._settings.timeout
        try:
            producer = Producer({**client, **own, "on_delivery": errors.note_event})
            admin = AdminClient(client)
        except KafkaException as exc:
            raise errors.meaning(exc.args[0], "the client does not start") from exc

        def initialize(seconds: float) -> None:
            serve(producer.poll, errors, 0)
            producer.init_transactions(seconds)

        repeat(initialize, errors, "transactions cannot be initialized", timeout)
        failpoint.hit("kafka_initialized")
        topics = TopicDirectory(admin, self._settings.topics, errors, timeout)
        progress = None
        if not topics.create_compacted(self._progress_topic, TOPIC_CONFIG):
            progress = StoredProgress(client, self._progress_topic, errors, timeout).read(admin, self._key)
        self._producer, self._topics = producer, topics
        return progress

    def send(self, events: Sequence[Event]) -> None:
        producer, topics = self._transaction()
        refused = _require_topics(topics, events)
        if self._suspected:
            refused |= self._send_each(producer, events, set(refused))
        else:
            refused |= self._send(producer, events, refused)
        if refused:
            raise EventsRefused(refused)
        serve(producer.poll, self._errors, 0)
        if self._errors.failed or self._errors.fatal:
            self._fail()

    def commit(self, progress: bytes) -> None:
        producer, _ = self._transaction()
        try:
            producer.produce(self._progress_topic, progress, self._key, partition=PARTITION)
        except (KafkaException, BufferError) as exc:
            self._fail(exc)
        failpoint.hit("kafka_progress_sent")
        self._flush(producer)
        failpoint.hit("kafka_flushed")
        try:
            repeat(producer.commit_transaction, self._errors, "a transaction was not committed", self._settings.timeout)
        except DeliveryFenced as exc:
            raise self._fenced(exc) from exc
        failpoint.hit("kafka_committed")
        self._began = None
        self._suspected.clear()

    def close(self) -> None:
        producer, self._producer, self._topics = self._producer, None, None
        began, self._began = self._began, None
        if producer is None or began is None or self._errors.fatal is not None:
            return
        producer.purge()
        try:
            producer.abort_transaction(_ABORT_SECONDS)
        except KafkaException:
            return  # the next `open` aborts it

    def _transaction(self) -> tuple[Producer, TopicDirectory]:
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

    def _send(self, producer: Producer, events: Sequence[Event], skipped: dict[str, CdcError]) -> dict[str, CdcError]:
        """Pass the events to the client; return those that it refuses."""
        refused: dict[str, CdcError] = {}
        produce = producer.produce
        for event in events:
            name, _, _, topic, key, value, headers = event
            if skipped and name in skipped:
                continue
            try:
                produce(topic, value, key, headers=list(headers))
            except BufferError:
                self._produce_later(producer, event)
            except KafkaException as exc:
                if exc.args[0].code() not in TOO_LARGE:
                    self._fail(exc)
                refused[name] = self._too_large(event)
        return refused

    def _send_each(self, producer: Producer, events: Sequence[Event], skipped: set[str]) -> dict[str, CdcError]:
        """Send each event of the suspected topics alone; return those that a broker refuses, with the transaction.

        A refused event ends the transaction, so the next one is sent in another. Nothing of either is committed:
        the caller raises EventsRefused.
        """
        refused: dict[str, CdcError] = {}
        for event in events:
            if event.id in skipped:
                continue
            refused |= self._send(producer, [event], {})
            if event.topic not in self._suspected or event.id in refused:
                continue
            try:
                self._flush(producer)
            except DeliveryError as exc:
                if self._errors.failed is None or self._errors.failed[0].code() not in REFUSED:
                    raise
                refused[event.id] = self._errors.meaning(self._errors.failed[0], f"event {event.id!r} was refused")
                refused[event.id].__cause__ = exc
                self._begin_again(producer)
        return refused

    def _begin_again(self, producer: Producer) -> None:
        self._errors.failed = None
        repeat(producer.abort_transaction, self._errors, "a transaction was not aborted", self._settings.timeout)
        producer.begin_transaction()

    def _too_large(self, event: Event) -> CdcError:
        size = len(event.key or b"") + len(event.value or b"")
        size += sum(len(name.encode()) + len(value) for name, value in event.headers)
        return EventTooLarge(
            f"event {event.id!r} has {size} bytes; the delivery sends at most {self._settings.max_event_size}",
            remedy="raise 'max_event_size', and 'message.max.bytes' of the brokers, then run 'cdc dlq retry SINK'",
        )

    def _produce_later(self, producer: Producer, event: Event) -> None:
        """Wait until the client has room for the event."""
        deadline = monotonic() + self._settings.timeout
        while True:
            if serve(producer.poll, self._errors):
                deadline = monotonic() + self._settings.timeout
            self._check(deadline, "events wait to be sent")
            try:
                producer.produce(event.topic, event.value, event.key, headers=list(event.headers))
            except BufferError:
                continue
            except KafkaException as exc:
                self._fail(exc)
            return

    def _flush(self, producer: Producer) -> None:
        """Return when brokers have acknowledged every event."""
        deadline, waiting = monotonic() + self._settings.timeout, len(producer)
        while left := serve(producer.flush, self._errors):
            if left < waiting:
                deadline, waiting = monotonic() + self._settings.timeout, left
            self._check(deadline, "events were not acknowledged")
        self._check(deadline, "events were not acknowledged")

    def _check(self, deadline: float, what: str) -> None:
        if self._errors.failed or self._errors.fatal:
            self._fail()
        if monotonic() >= deadline:
            raise self._errors.silence(what)

    def _fail(self, exc: Any = None) -> Any:
        """Raise what an error of the client means."""
        errors = self._errors
        failed = errors.failed
        if errors.fatal is None and failed is not None and failed[0].code() in REFUSED and not self._suspected:
            error, topic = failed
            self._suspected.add(topic)
            if error.code() in TOO_LARGE:
                # perhaps only the request was: the topic takes less than the client sends together
                self._batch_size = max(_FEWEST, self._batch_size // 2)
            raise DestinationUnavailable(
                f"topic {topic!r} refused events, which are sent again one by one to find out which: {error.str()}"
            ) from exc
        try:
            errors.check()
        except DeliveryFenced as fenced:
            raise self._fenced(fenced) from exc
        error = exc.args[0] if isinstance(exc, KafkaException) else KafkaError(KafkaError._FAIL, str(exc))
        raise errors.meaning(error, "events cannot be sent") from exc

    def _fenced(self, error: DeliveryFenced) -> CdcError:
        """A broker that has aborted a transaction because of its age answers as if there were another process."""
        if self._began is None or monotonic() - self._began < self._settings.transaction_timeout:
            return error
        return DestinationUnavailable(
            f"Kafka aborted a transaction that took longer than {self._settings.transaction_timeout:g} s",
            remedy="raise 'transaction_timeout', and 'transaction.max.timeout.ms' of the brokers, or lower 'batch'",
        )


def _require_topics(topics: TopicDirectory, events: Sequence[Event]) -> dict[str, CdcError]:
    """Return when the topics of the events exist; return the events whose topics cannot exist."""
    unknown = {event.topic for event in events} - topics.known
    if not unknown:
        return {}
    impossible = {topic for topic in unknown if not is_possible_name(topic)}
    if possible := unknown - impossible:
        topics.require(possible)
    reason = "is no name of a Kafka topic: letters, digits, '.', '_' and '-', at most 249"
    return {
        event.id: EventRefused(f"{event.topic!r} {reason}", remedy="set 'topic' in a rule for the table")
        for event in events
        if event.topic in impossible
    }
