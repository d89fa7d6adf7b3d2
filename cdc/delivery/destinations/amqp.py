"""Destination at RabbitMQ, or another broker of AMQP 0.9.1: at least once, in order on one channel.

Events are persistent messages. The broker confirms each of them, and returns those for which no queue is there. The
first event of a topic is confirmed before the next one is sent: a missing queue then shows before a later event of the
same key could find it. A queue that rejects events while it is full (`x-overflow: reject-publish`) may reject one and
take the next, unless `in_flight` is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, ClassVar, Final
from urllib.parse import unquote, urlsplit

import pika
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from cdc.config.destinations import AmqpDelivery
from cdc.delivery.destinations.acknowledgements import AcknowledgementWindow, Answers, BrokerAnswer
from cdc.delivery.destinations.broker_connection import (
    KEY_HEADER,
    TOMBSTONE_HEADER,
    address,
    connection_error,
    content_type,
    escape,
    repeated_header,
    text_or_bytes,
    tls_context,
)
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise, refuse
from cdc.errors import (
    CdcError,
    DestinationDenied,
    DestinationFull,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)

LONGEST: Final = 255
"""Bytes of the longest routing key, and of the longest name of a header."""
_PERSISTENT: Final = 2
_ACCESS_REFUSED: Final = 403
_NOT_FOUND: Final = 404
_NOT_ALLOWED: Final = 530


class AmqpDestination:
    """Publishes events to an exchange, with the topic as routing key."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: AmqpDelivery, identity: DeliveryIdentity) -> None:
        self._settings, self._identity = settings, identity
        self._channel: _ConfirmChannel | None = None
        self._window: AcknowledgementWindow | None = None
        self._known: set[str] = set()
        """Topics of which an event was confirmed since the connection was opened."""

    def open(self) -> bytes | None:
        """Connect, and declare the exchange if the delivery may create it."""
        settings = self._settings
        self._window = AcknowledgementWindow(self._publish, settings.in_flight, settings.timeout, one_per_key=False)
        self._channel = _ConfirmChannel(self._parameters(), self._window.answers, settings.timeout)
        self._known = set()
        self._channel.open()
        if settings.create and settings.exchange:
            self._channel.declare_exchange(settings.exchange)
        return None

    def check(self, topics: Collection[str]) -> None:
        """Connect, and look for the exchange, or for the queues, unless the delivery may create them."""
        settings = self._settings
        channel = _ConfirmChannel(self._parameters(), SimpleQueue(), settings.timeout)
        try:
            channel.open()
            if settings.create:
                return
            if settings.exchange:
                channel.find_exchange(settings.exchange)
            for topic in () if settings.exchange else sorted(topics):
                channel.find_queue(routing_key(topic))
        finally:
            channel.close()

    def _parameters(self) -> pika.ConnectionParameters:
        settings = self._settings
        host, port, is_secure = address(settings.url, 5672, 5671)
        path = unquote(urlsplit(settings.url).path.removeprefix("/"))
        login = (settings.user or "guest", settings.password.current() if settings.password else "guest")
        return pika.ConnectionParameters(
            host=host,
            port=port,
            virtual_host=path or "/",
            credentials=pika.PlainCredentials(*login),
            ssl_options=pika.SSLOptions(tls_context(settings), host) if is_secure else None,
            socket_timeout=settings.timeout,
            stack_timeout=settings.timeout,
            blocked_connection_timeout=settings.timeout,
            client_properties={"connection_name": f"cdc delivery {self._identity}"},
        )

    def send(self, events: Sequence[Event]) -> None:
        """Publish the events, after the first one of each new topic was confirmed."""
        assert self._window is not None  # noqa: S101 - the contract: opened before
        refuse((event, self._refusal(event)) for event in events)
        first = {event.topic: event for event in reversed(events) if event.topic not in self._known}
        if first:
            self._send_first([event for event in events if first.get(event.topic) is event])
        self._window.send(event for event in events if first.get(event.topic) is not event)

    def commit(self, progress: bytes) -> None:
        """Wait until every event is confirmed."""
        del progress
        assert self._window is not None  # noqa: S101 - the contract: opened before
        assert self._channel is not None  # noqa: S101 - the contract: opened before
        self._window.wait()
        if returned := self._channel.take_returned():
            raise _missing(min(returned), self._settings.exchange)

    def close(self) -> None:
        """Disconnect."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send_first(self, events: Sequence[Event]) -> None:
        """Send the first events of new topics; declare the queues that are missing, if the delivery may do so."""
        assert self._window is not None  # noqa: S101 - the contract: opened before
        assert self._channel is not None  # noqa: S101 - the contract: opened before
        self._deliver(events)
        returned = self._channel.take_returned()
        if returned and self._settings.create and not self._settings.exchange:
            for name in returned:
                self._channel.declare_queue(name)
            self._deliver([event for event in events if routing_key(event.topic) in returned])
            returned = self._channel.take_returned()
        if returned:
            raise _missing(min(returned), self._settings.exchange)
        self._known.update(event.topic for event in events)

    def _deliver(self, events: Sequence[Event]) -> None:
        assert self._window is not None  # noqa: S101 - the contract: opened before
        self._window.send(events)
        self._window.wait()

    def _refusal(self, event: Event) -> CdcError | None:
        """Return why the broker cannot take the event; None if it can."""
        if len(event.value or b"") > self._settings.max_size:
            return EventTooLarge(f"event {event.id!r} has more than {self._settings.max_size:,} bytes ('max_size')")
        if not 0 < len(routing_key(event.topic).encode()) <= LONGEST:
            return EventRefused(f"the topic of event {event.id!r} is empty or longer than {LONGEST} bytes")
        if repeated_header(event) or any(len(name.encode()) > LONGEST for name, _ in event.headers):
            return EventRefused(f"event {event.id!r} has two headers of one name, or a name of over {LONGEST} bytes")
        return None

    def _publish(self, events: Sequence[Event]) -> Sequence[int]:
        assert self._channel is not None  # noqa: S101 - the contract: opened before
        return self._channel.publish(self._settings.exchange, events)


class _ConfirmChannel:
    """A channel in confirm mode and its connection, which live in a thread of their own."""

    def __init__(self, parameters: pika.ConnectionParameters, answers: Answers, timeout: float) -> None:
        self._parameters = parameters
        self._answers = answers
        self._timeout = timeout
        self._place = f"{parameters.host}:{parameters.port}"
        self._connection: Any = None
        self._channel: Any = None
        self._waiting: Future[None] | None = None
        self._next_tag = 1
        self._lowest_tag = 1
        """First tag that no confirmation of several messages has covered."""
        self._returned: set[str] = set()

    def open(self) -> None:
        """Connect, and open the channel."""
        self._wait_for(self._start)

    def declare_exchange(self, name: str) -> None:
        """Declare a durable exchange of the type topic."""
        self._wait_for(
            lambda: self._channel.exchange_declare(name, exchange_type="topic", durable=True, callback=self._on_step)
        )

    def declare_queue(self, name: str) -> None:
        """Declare a durable queue."""
        self._wait_for(lambda: self._channel.queue_declare(name, durable=True, callback=self._on_step))

    def find_exchange(self, name: str) -> None:
        """Raise TopicMissing if there is no such exchange."""
        self._wait_for(lambda: self._channel.exchange_declare(name, passive=True, callback=self._on_step))

    def find_queue(self, name: str) -> None:
        """Raise TopicMissing if there is no such queue."""
        self._wait_for(lambda: self._channel.queue_declare(name, passive=True, callback=self._on_step))

    def publish(self, exchange: str, events: Sequence[Event]) -> Sequence[int]:
        """Publish the events soon, and return the tags of their confirmations."""
        tags = range(self._next_tag, self._next_tag + len(events))
        self._next_tag = tags.stop
        self._call(partial(self._publish_now, exchange, [(event, _properties(event)) for event in events]))
        return tags

    def take_returned(self) -> set[str]:
        """Routing keys of events that came back since the last call; all of them were confirmed."""
        returned, self._returned = self._returned, set()
        return returned

    def close(self) -> None:
        """Disconnect; the thread ends after a second at the latest."""
        with suppress(Exception):
            self._call(self._end)

    def _start(self) -> None:
        self._connection = pika.SelectConnection(
            self._parameters,
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._on_channel),
            on_open_error_callback=lambda _, exc: self._fail(exc),
            on_close_callback=lambda _, exc: self._fail(exc),
        )
        Thread(target=self._run, args=(self._connection.ioloop,), daemon=True, name="amqp").start()

    def _run(self, loop: Any) -> None:
        try:
            loop.start()
        except Exception as exc:  # noqa: BLE001 - it would end the thread, and nobody would know
            self._fail(exc)

    def _end(self) -> None:
        loop = self._connection.ioloop
        if self._connection.is_open:
            loop.call_later(1, loop.stop)
            self._connection.close()
        else:
            loop.stop()

    def _wait_for(self, begin: Callable[[], object]) -> None:
        """Call in the thread of the connection, and wait for `_on_step`. Raises the error that comes instead."""
        self._waiting = Future()
        if self._connection is None:
            begin()
        else:
            self._call(begin)
        try:
            self._waiting.result(self._timeout)
        except TimeoutError:
            raise DestinationUnavailable(f"{self._place} did not answer within {self._timeout:g} s") from None

    def _call(self, function: Callable[[], object]) -> None:
        self._connection.ioloop.add_callback_threadsafe(function)

    def _publish_now(self, exchange: str, messages: Sequence[tuple[Event, pika.BasicProperties]]) -> None:
        try:
            for event, properties in messages:
                name = routing_key(event.topic)
                self._channel.basic_publish(exchange, name, event.value or b"", properties, mandatory=True)
        except AMQPError as exc:
            self._fail(exc)

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(lambda _, exc: self._fail(exc))
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirmation, self._on_step)

    def _on_step(self, _frame: object) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _on_confirmation(self, frame: Any) -> None:
        method = frame.method
        tags = range(self._lowest_tag if method.multiple else method.delivery_tag, method.delivery_tag + 1)
        if method.multiple:
            self._lowest_tag = tags.stop
        if isinstance(method, pika.spec.Basic.Nack):
            self._answers.put(DestinationFull(f"{self._place} rejected an event: a queue is full or broken"))
        else:
            self._answers.put(BrokerAnswer(tags))

    def _on_return(self, _channel: object, method: Any, _properties: object, _body: bytes) -> None:
        # the confirmation follows, and the thread of the loop reads the set after it
        self._returned.add(method.routing_key)

    def _fail(self, exc: BaseException) -> None:
        error = _error(exc, self._place, self._parameters)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self._answers.put(error)


@lru_cache(maxsize=10_000)
def routing_key(topic: str) -> str:
    """Return the routing key of a topic. The broker removes line breaks from names, so they are percent-encoded."""
    return escape(topic.encode(), lambda char: char not in "\r\n")


def _properties(event: Event) -> pika.BasicProperties:
    headers: dict[str, str | bytes | bool] = {name: text_or_bytes(value) for name, value in event.headers}
    if event.key is not None:
        headers[KEY_HEADER] = text_or_bytes(event.key)
    if event.value is None:
        headers[TOMBSTONE_HEADER] = True
    return pika.BasicProperties(
        content_type=content_type(event),
        headers=headers,
        delivery_mode=_PERSISTENT,
        message_id=event.id,
    )


def _missing(name: str, exchange: str) -> TopicMissing:
    if exchange:
        return TopicMissing(
            f"exchange {exchange!r} has no queue for the routing key {name!r}",
            remedy="bind a queue to the exchange; the delivery continues as soon as it is there",
        )
    return TopicMissing(f"queue {name!r} does not exist")


def _error(exc: BaseException, place: str, parameters: pika.ConnectionParameters) -> CdcError:
    """Return the error of the delivery for an error of the library."""
    while inner := getattr(exc, "exception", None) or (getattr(exc, "exceptions", None) or [None])[-1]:
        exc = inner
    if isinstance(exc, ProbableAuthenticationError):
        return DestinationDenied(f"{place} refuses the user or the password")
    if isinstance(exc, ConnectionClosedByBroker | ChannelClosedByBroker):
        return _closed(exc, place, parameters.virtual_host)
    if isinstance(exc, ProbableAccessDeniedError):
        return DestinationDenied(f"{place} refuses access to the virtual host {parameters.virtual_host!r}")
    return connection_error(exc, place)


def _closed(exc: ConnectionClosedByBroker | ChannelClosedByBroker, place: str, virtual_host: str) -> CdcError:
    code, text = exc.reply_code, exc.reply_text
    if code == _NOT_FOUND:
        return TopicMissing(f"{place} answers: {text}")
    if code == _ACCESS_REFUSED:
        return DestinationDenied(f"{place} answers: {text}")
    if code == _NOT_ALLOWED:
        return DestinationDenied(f"{place} does not admit the user to the virtual host {virtual_host!r}: {text}")
    return DestinationUnavailable(f"{place} closed the connection: {text}")
