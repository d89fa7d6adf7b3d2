"""KafkaProducer: a transactional producer of Kafka over the C API of librdkafka.

The class `Producer` of confluent-kafka needs a Python object with all arguments for each message, 3 µs of CPU, and its
`produce_batch` sends no headers. librdkafka takes a message as a list of pieces of memory, so `kafka_bulk` can pass
addresses in Arrow columns. For that the producer has to be ours: confluent-kafka shows nobody its handle.

One thread uses a producer. librdkafka calls back only while `poll`, `flush` or the end of a transaction runs.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from cdc.delivery.destinations import librdkafka
from cdc.delivery.destinations.kafka_client import LOG, ClientErrors
from cdc.delivery.destinations.librdkafka import Piece

_TEXT_SIZE: Final = 512
"""Bytes for the text of an error; librdkafka cuts off longer ones."""
_LEVELS: Final = (*[logging.CRITICAL] * 3, logging.ERROR, logging.WARNING, *[logging.INFO] * 2, logging.DEBUG)
"""Level of syslog → level of Python."""


class KafkaMessage(NamedTuple):
    """One message for a topic."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Iterable[tuple[str, bytes]] = ()
    partition: int | None = None
    """None: the partitioner chooses one."""


class KafkaProducer:
    """A client that sends messages in transactions."""

    def __init__(self, settings: Mapping[str, object], errors: ClientErrors) -> None:
        """settings: those of librdkafka. errors: gets the errors of connections and of messages.

        Raises KafkaException for a setting that librdkafka does not take.
        """
        library = librdkafka.load().waiting
        self._library = library
        callbacks = _callbacks(library, errors)
        configuration = library.rd_kafka_conf_new()
        try:
            for name, value in {**settings, "log.queue": True}.items():
                _set(library, configuration, name, value)
            for register, callback in callbacks:
                register(configuration, callback)
            self.handle = _new(library, configuration)
            """The `rd_kafka_t *`; valid until `close`."""
        except KafkaException:
            library.rd_kafka_conf_destroy(configuration)
            raise
        library.rd_kafka_set_log_queue(self.handle, None)  # its threads would log otherwise
        self._close = weakref.finalize(self, _destroy, library, self.handle, callbacks)
        self._close.atexit = False

    def close(self) -> None:
        """End the client; messages that wait are forgotten."""
        self._close()

    def produce(self, message: KafkaMessage) -> None:
        """Pass a message to the client. Raises BufferError if it has no room."""
        pieces = [
            _piece(librdkafka.TOPIC_NAME, text=message.topic.encode()),
            _piece(librdkafka.FLAGS, number=librdkafka.COPY),
            _piece(librdkafka.VALUE, memory=(message.value, len(message.value or b""))),
            _piece(librdkafka.KEY, memory=(message.key, len(message.key or b""))),
        ]
        if message.partition is not None:
            pieces.append(_piece(librdkafka.PARTITION, partition=message.partition))
        for name, text in message.headers:
            pieces.append(_piece(librdkafka.HEADER, header=(name.encode(), text, len(text))))
        try:
            self._raise(self._library.rd_kafka_produceva(self.handle, (Piece * len(pieces))(*pieces), len(pieces)))
        except KafkaException as exc:
            if exc.args[0].code() == KafkaError._QUEUE_FULL:
                raise BufferError from exc
            raise

    def poll(self, seconds: float) -> int:
        """Run callbacks, and wait for the first one; return how many ran."""
        return int(self._library.rd_kafka_poll(self.handle, _milliseconds(seconds)))

    def flush(self, seconds: float) -> int:
        """Run callbacks until brokers have acknowledged every message, or time is over; return how many are left."""
        self._library.rd_kafka_flush(self.handle, _milliseconds(seconds))
        return self.waiting

    @property
    def waiting(self) -> int:
        """Number of messages that brokers have not acknowledged, and of callbacks that wait."""
        return int(self._library.rd_kafka_outq_len(self.handle))

    def purge(self) -> None:
        """Forget the messages that brokers have not acknowledged."""
        self._library.rd_kafka_purge(self.handle, librdkafka.PURGE_ALL)

    def init_transactions(self, seconds: float) -> None:
        """Fence every earlier producer of the same transactional id; may be repeated after a time-out."""
        self._raise(self._library.rd_kafka_init_transactions(self.handle, _milliseconds(seconds)))

    def begin_transaction(self) -> None:
        """Begin a transaction."""
        self._raise(self._library.rd_kafka_begin_transaction(self.handle))

    def commit_transaction(self, seconds: float) -> None:
        """Commit the transaction; may be repeated after a time-out."""
        self._raise(self._library.rd_kafka_commit_transaction(self.handle, _milliseconds(seconds)))

    def abort_transaction(self, seconds: float) -> None:
        """Abort the transaction; may be repeated after a time-out."""
        self._raise(self._library.rd_kafka_abort_transaction(self.handle, _milliseconds(seconds)))

    def _raise(self, error: int | None) -> None:
        """Raise the error that a function has returned; None: it has succeeded."""
        if error is None:
            return
        library = self._library
        try:
            raise KafkaException(
                KafkaError(
                    library.rd_kafka_error_code(error),
                    _decoded(library.rd_kafka_error_string(error)),
                    bool(library.rd_kafka_error_is_fatal(error)),
                    bool(library.rd_kafka_error_is_retriable(error)),
                    bool(library.rd_kafka_error_txn_requires_abort(error)),
                )
            )
        finally:
            library.rd_kafka_error_destroy(error)


def _set(library: Any, configuration: int, name: str, value: object) -> None:
    text = ctypes.create_string_buffer(_TEXT_SIZE)
    written = str(value).lower() if isinstance(value, bool) else str(value)
    answer = library.rd_kafka_conf_set(configuration, name.encode(), written.encode(), text, _TEXT_SIZE)
    if answer != librdkafka.CONFIGURATION_OK:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, _decoded(text.value)))


def _new(library: Any, configuration: int) -> int:
    text = ctypes.create_string_buffer(_TEXT_SIZE)
    handle: int | None = library.rd_kafka_new(librdkafka.PRODUCER, configuration, text, _TEXT_SIZE)
    if handle is None:
        raise KafkaException(KafkaError(library.rd_kafka_last_error(), _decoded(text.value)))
    return handle


def _callbacks(library: Any, errors: ClientErrors) -> list[tuple[Callable[[int, Any], None], Any]]:
    """Return each callback, after the function that registers it. None refers to the producer, so that it is freed."""

    def on_report(_handle: int, report: Any, _opaque: int | None) -> None:
        code = report.contents.error
        if code:
            errors.note_event(KafkaError(code), _decoded(library.rd_kafka_topic_name(report.contents.topic)))

    def on_error(handle: int, code: int, reason: bytes, _opaque: int | None) -> None:
        if code != KafkaError._FATAL:
            errors.note(KafkaError(code, _decoded(reason)))
            return
        text = ctypes.create_string_buffer(_TEXT_SIZE)
        cause = library.rd_kafka_fatal_error(handle, text, _TEXT_SIZE)
        errors.note(KafkaError(cause, _decoded(text.value), True))

    def on_log(handle: int, level: int, word: bytes, text: bytes) -> None:
        name = _decoded(library.rd_kafka_name(handle))
        LOG.log(_LEVELS[level], "%s [%s] %s", _decoded(word), name, _decoded(text))

    return [
        (library.rd_kafka_conf_set_dr_msg_cb, librdkafka.ON_REPORT(on_report)),
        (library.rd_kafka_conf_set_error_cb, librdkafka.ON_ERROR(on_error)),
        (library.rd_kafka_conf_set_log_cb, librdkafka.ON_LOG(on_log)),
    ]


def _destroy(library: Any, handle: int, _callbacks: object) -> None:
    """End a client. The callbacks are an argument so that they live as long as it."""
    library.rd_kafka_destroy(handle)


def _piece(kind: int, **content: Any) -> Piece:
    piece = Piece(kind)
    for name, value in content.items():
        setattr(piece.content, name, value)
    return piece


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode(errors="replace")


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
