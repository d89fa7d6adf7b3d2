"""Settings of the Kafka client for a delivery, and what its errors mean for the delivery."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from cdc.config.destinations import KafkaDelivery
from cdc.errors import (
    CdcError,
    DeliveryError,
    DeliveryFenced,
    DestinationDenied,
    DestinationFull,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)

SLICE: Final = 0.5
"""Seconds of one call that waits for brokers; between two, errors of connections are looked at."""
_BUFFERED: Final = 32 * 2**20
"""Bytes of events that wait for brokers at most; `send` waits for room."""
_IN_FLIGHT: Final = 1
"""Maximum number of requests that wait for the answer of one broker.

A leader that is not ready refuses the first batch of a producer, and may accept the second, as it does not know yet
which number comes first. The client then counts both as delivered, and the first is lost (confluent-kafka-go #921).
"""
_PROBABLE_CAUSE: Final = (KafkaError._SSL, KafkaError._AUTHENTICATION)
TOO_LARGE: Final = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
REFUSED: Final = (
    *TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError._INVALID_DIFFERENT_RECORD,
)
"""Codes with which a broker refuses what was sent; the same is refused again."""
_PURGED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
_KINDS: Final[dict[int, type[DeliveryError]]] = {
    **dict.fromkeys(REFUSED, EventRefused),
    **dict.fromkeys(TOO_LARGE, EventTooLarge),
    KafkaError._FENCED: DeliveryFenced,
    KafkaError.PRODUCER_FENCED: DeliveryFenced,
    KafkaError.INVALID_PRODUCER_EPOCH: DeliveryFenced,
    KafkaError._AUTHENTICATION: DestinationDenied,
    KafkaError.SASL_AUTHENTICATION_FAILED: DestinationDenied,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: DestinationDenied,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: DestinationDenied,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: DestinationDenied,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: DestinationDenied,
    KafkaError.THROTTLING_QUOTA_EXCEEDED: DestinationFull,
    KafkaError._UNKNOWN_TOPIC: TopicMissing,
    KafkaError._UNKNOWN_PARTITION: TopicMissing,
    KafkaError.UNKNOWN_TOPIC_OR_PART: TopicMissing,
}
_SETTINGS: Final[dict[int, str]] = {
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "set 'transaction_timeout' to at most the brokers' "
    "'transaction.max.timeout.ms'",
    KafkaError._INVALID_ARG: "correct the key 'client' of the delivery",
    KafkaError.INVALID_CONFIG: "correct 'topics.config' of the delivery",
    KafkaError.INVALID_REPLICATION_FACTOR: "set 'topics.replication' to at most the number of brokers",
    KafkaError.INVALID_PARTITIONS: "correct 'topics.partitions' of the delivery",
}
"""Codes that only another definition changes → what to do."""
LOGGED_EVERY: Final = 60.0
"""Minimum seconds between two log lines of clients about the same broker that begin with the same word."""


class RareLines(logging.Filter):
    """Leaves out log lines that repeat: a client without a broker writes the same line four times a second.

    The client writes `WORD [client] [thrd:broker]: text`.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._due: dict[tuple[str, ...], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written."""
        words, now = record.getMessage().split(" ", 3), self._clock()
        kind = (words[0], *words[2:3])
        if now < self._due.get(kind, 0.0):
            return False
        self._due[kind] = now + LOGGED_EVERY
        return True


LOG: Final = logging.getLogger("cdc.delivery.kafka")
"""Log of all clients."""
LOG.addFilter(RareLines())
PYTHON_SETTINGS: Final = ("logger", "error_cb")
"""Names in `client_settings` that confluent-kafka knows, and the C library below it does not."""


def client_settings(settings: KafkaDelivery, name: str, errors: ClientErrors) -> dict[str, Any]:
    """Settings that every client of the delivery has."""
    found: dict[str, Any] = {
        **settings.client,
        "bootstrap.servers": ",".join(settings.servers),
        "client.id": name,
        "socket.timeout.ms": _milliseconds(settings.timeout),
        "logger": LOG,
        "error_cb": errors.note,
        "security.protocol": ("sasl_" if settings.login else "") + ("ssl" if settings.uses_tls else "plaintext"),
    }
    if settings.login is not None:
        found["sasl.mechanism"] = settings.login.mechanism.upper()
        found["sasl.username"] = settings.login.user
        found["sasl.password"] = settings.login.password.current()
    if settings.uses_tls:
        files = {
            "ssl.ca.location": settings.ca_file,
            "ssl.certificate.location": settings.cert_file,
            "ssl.key.location": settings.key_file,
        }
        found |= {key: file for key, file in files.items() if file is not None}
        if settings.insecure_skip_tls_verification:
            found["enable.ssl.certificate.verification"] = False
    return found


def producer_settings(settings: KafkaDelivery, transactional_id: str, batch_size: int) -> dict[str, Any]:
    """Settings of the producer, besides those of every client."""
    return {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": _milliseconds(settings.transaction_timeout),
        "max.in.flight.requests.per.connection": _IN_FLIGHT,
        "message.timeout.ms": _milliseconds(settings.timeout),
        "message.max.bytes": settings.max_event_size,
        "queue.buffering.max.kbytes": max(_BUFFERED, 4 * settings.max_event_size) // 1024,
        "queue.buffering.max.messages": 100_000,
        "batch.size": batch_size,
        "batch.num.messages": 100_000,
        "linger.ms": settings.linger * 1000,
        "compression.type": settings.compression,
        "partitioner": "murmur2_random" if settings.partitioner == "murmur2" else "consistent_random",
        "delivery.report.only.error": True,
    }


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


class ClientErrors:
    """Errors that a client reports by callbacks: of its connections, and of single events.

    An object of its own, so that the client, which refers to it, is freed as soon as the destination drops it.
    """

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self.fatal: KafkaError | None = None
        """After it the client does nothing any more."""
        self.failed: tuple[KafkaError, str] | None = None
        """First event that was not delivered: why, and its topic."""
        self._connection: KafkaError | None = None
        self._cause: KafkaError | None = None

    def note(self, error: KafkaError) -> None:
        """Callback of the client for an error that belongs to no call."""
        if error.fatal():
            self.fatal = self.fatal or error
        elif error.code() in _PROBABLE_CAUSE:
            self._cause = error
        else:
            self._connection = error

    def note_event(self, error: KafkaError, topic: str) -> None:
        """Callback of the client for an event of a topic that was not delivered."""
        if error.code() not in _PURGED and self.failed is None:
            self.failed = error, topic

    def check(self) -> None:
        """Raise the error of an event or of the client, if there is one."""
        if self.failed is not None and self.fatal is None:
            error, topic = self.failed
            raise self.meaning(error, f"an event for topic {topic!r} was not delivered")
        if self.fatal is not None:
            raise self.meaning(self.fatal, "the client stopped")

    def check_connection(self) -> None:
        """Raise an error if no connection can succeed: a certificate that is not trusted, or a wrong login."""
        if self._cause is not None:
            raise self.meaning(self._cause, "no connection")

    def silence(self, what: str) -> CdcError:
        """The error for brokers that did not answer in time; what: the action that they did not answer."""
        self.check_connection()
        detail = f": {self._connection.str()}" if self._connection is not None else ""
        return DestinationUnavailable(f"{self._destination} does not answer: {what}{detail}")

    def meaning(self, error: KafkaError, what: str) -> CdcError:
        """The error of the delivery for an error of the client; what: the action that failed."""
        code, text = error.code(), error.str()
        message = f"{self._destination}: {what}: {text}"
        if code == KafkaError._SSL and "verify failed" in text:
            return DestinationNotTrusted(message)
        if code in _SETTINGS:
            return DeliveryError(message, remedy=_SETTINGS[code])
        return _KINDS.get(code, DestinationUnavailable)(message)


def repeat(call: Callable[[float], Any], errors: ClientErrors, what: str, timeout: float) -> None:
    """Repeat a call of a transaction, which may be repeated, until it succeeds; raises errors of the delivery."""
    deadline = monotonic() + timeout
    while True:
        try:
            call(SLICE)
        except KafkaException as exc:
            error = exc.args[0]
            errors.check()
            if not error.retriable() and error.code() != KafkaError._TIMED_OUT:
                raise errors.meaning(error, what) from exc
            if monotonic() >= deadline:
                raise errors.silence(what) from exc
            errors.check_connection()
        else:
            return
