"""Destination at NATS JetStream: at least once; within the time of its stream the server drops what is sent again.

The id of an event is the message id (`Nats-Msg-Id`). A stream may refuse one message and store the next, for example
while it elects a leader, so only one event of each key is unacknowledged. The client library needs an event loop, which
has a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Coroutine, Sequence
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from typing import Any, ClassVar, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from cdc.config.destinations import NatsDelivery
from cdc.delivery.destinations.acknowledgements import AcknowledgementWindow, Answers, BrokerAnswer
from cdc.delivery.destinations.broker_connection import (
    KEY_HEADER,
    TOMBSTONE_HEADER,
    address,
    connection_error,
    escape,
    repeated_header,
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

ID_HEADER: Final = "Nats-Msg-Id"
STREAM_HEADER: Final = "Nats-Expected-Stream"
_TOO_LARGE: Final = 10054
"""Error of a stream with a limit for the size of messages."""
_OTHER_STREAM: Final = 10060
"""Error of a stream that the message does not expect."""
_FULL: Final = frozenset({10002, 10023, 10028, 10047})
"""Errors of an account or a server whose memory or storage is used up."""
_EMPTY_PART: Final = re.compile(r"(?<=\.)\.|^\.|\.\Z")
"""A dot next to which a part of the subject would be empty."""
_NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


class NatsDestination:
    """Publishes events to the stream that has their subject."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: NatsDelivery, identity: DeliveryIdentity) -> None:
        self._settings, self._identity = settings, identity
        self._connection: _JetStreamConnection | None = None
        self._window: AcknowledgementWindow | None = None

    def open(self) -> bytes | None:
        """Connect, and create the stream if the delivery may do so."""
        settings = self._settings
        self._window = AcknowledgementWindow(self._publish, settings.in_flight, settings.timeout, one_per_key=True)
        self._connection = _JetStreamConnection(settings, self._window.answers)
        self._connection.open(f"cdc delivery {self._identity}")
        return None

    def check(self, topics: Collection[str]) -> None:
        """Connect, and look for the stream of each topic, unless the delivery may create its stream."""
        settings = self._settings
        connection = _JetStreamConnection(settings.model_copy(update={"create": False}), SimpleQueue())
        try:
            connection.open(f"cdc check {self._identity}")
            if not settings.create:
                connection.find_streams([subject_of(topic) for topic in sorted(topics)])
        finally:
            connection.close()

    def send(self, events: Sequence[Event]) -> None:
        """Publish the events; the call waits while earlier ones of their keys are not acknowledged."""
        assert self._window is not None  # noqa: S101 - the contract: opened before
        refuse((event, self._refusal(event)) for event in events)
        self._window.send(events)

    def commit(self, progress: bytes) -> None:
        """Wait until every event is acknowledged."""
        del progress
        assert self._window is not None  # noqa: S101 - the contract: opened before
        self._window.wait()

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _publish(self, events: Sequence[Event]) -> Sequence[int]:
        assert self._connection is not None  # noqa: S101 - the contract: opened before
        return self._connection.publish(events)

    def _refusal(self, event: Event) -> CdcError | None:
        """Return why the server cannot take the event; None if it can."""
        assert self._connection is not None  # noqa: S101 - the contract: opened before
        if not event.topic:
            return EventRefused(f"the topic of event {event.id!r} is empty")
        if repeated_header(event):
            return EventRefused(f"event {event.id!r} has two headers of one name")
        headers = sum(len(name) + len(value) + 4 for name, value in _headers(event, self._settings.stream).items())
        if headers + len(event.value or b"") + 12 > (largest := self._connection.max_payload):
            return EventTooLarge(f"event {event.id!r} is larger than the server accepts: {largest:,} bytes")
        return None


class _JetStreamConnection:
    """A connection and its event loop, which live in a thread of their own."""

    def __init__(self, settings: NatsDelivery, answers: Answers) -> None:
        self._settings, self._answers = settings, answers
        host, port, self._is_secure = address(settings.url, 4222, 4222)
        self._host = host
        self._place = f"{host}:{port}"
        self._client = Client()
        self._loop = asyncio.new_event_loop()
        self._inbox = ""
        self._sent = 0
        self._failure: Exception | None = None
        self._is_open = False

    @property
    def max_payload(self) -> int:
        """Bytes of the largest message, headers included."""
        return self._client.max_payload

    def open(self, name: str) -> None:
        """Connect, and create the stream if that is wanted."""
        Thread(target=self._run, daemon=True, name="nats").start()
        try:
            self._wait(self._connect(name))
        except (APIError, nats.errors.Error, OSError, TimeoutError) as exc:
            raise self._error(self._failure or exc) from exc
        self._is_open = True

    def find_streams(self, subjects: Sequence[str]) -> None:
        """Raise TopicMissing if a subject has no stream, or another one than the delivery needs."""
        try:
            self._wait(self._find_streams(subjects))
        except (APIError, nats.errors.Error, OSError, TimeoutError) as exc:
            if "permissions" not in str(self._failure).lower():  # a user that may only publish cannot see streams
                raise self._error(self._failure or exc) from exc

    def publish(self, events: Sequence[Event]) -> Sequence[int]:
        """Publish the events soon, and return the numbers of their acknowledgements."""
        numbers = range(self._sent, self._sent + len(events))
        self._sent = numbers.stop
        asyncio.run_coroutine_threadsafe(self._publish_all(list(zip(numbers, events, strict=True))), self._loop)
        return numbers

    def close(self) -> None:
        """Disconnect; the thread ends after a second at the latest."""
        self._is_open = False
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        try:
            await asyncio.wait_for(self._client.close(), 1)
        except Exception as exc:  # noqa: BLE001 - the connection may be in any state
            self._failure = exc
        for task in asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        self._loop.stop()

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        limited = asyncio.wait_for(coroutine, self._settings.timeout)
        asyncio.run_coroutine_threadsafe(limited, self._loop).result()

    async def _connect(self, name: str) -> None:
        settings = self._settings
        login: dict[str, Any] = {}
        if settings.user is not None:
            login = {"user": settings.user, "password": self._password}
        elif settings.token is not None:
            login = {"token": self._password}
        if self._is_secure:
            login |= {"tls": tls_context(settings), "tls_hostname": self._host}
        await self._client.connect(
            f"nats://{self._place}",
            name=name,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=max(1, int(settings.timeout)),
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            **login,
        )
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(
            f"{self._inbox}.*", cb=self._on_answer, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        if settings.create:
            await self._create(settings)

    def _password(self) -> str:
        """Return the password or token, when the properties of the server are known."""
        # the library would send it unencrypted if a server, or somebody on the way, says that there is no TLS
        if self._is_secure and not self._client._server_info.get("tls_required"):  # noqa: SLF001
            raise nats.errors.Error("the server does not offer TLS")
        secret = self._settings.token or self._settings.password
        return secret.current() if secret else ""

    async def _create(self, settings: NatsDelivery) -> None:
        streams = self._client.jetstream(timeout=settings.timeout)
        assert settings.stream is not None  # noqa: S101 - the model requires it
        try:
            await streams.stream_info(settings.stream)
        except NotFoundError:
            await streams.add_stream(
                StreamConfig(
                    name=settings.stream,
                    subjects=list(settings.subjects),
                    storage=StorageType.FILE,
                    duplicate_window=settings.deduplicate,
                )
            )

    async def _find_streams(self, subjects: Sequence[str]) -> None:
        streams = self._client.jetstream(timeout=self._settings.timeout)
        for subject in subjects:
            try:
                found = await streams.find_stream_name_by_subject(subject)
            except NotFoundError:
                found = None
            if found is None:
                raise TopicMissing(f"no stream has the subject {subject!r}")
            if found != (self._settings.stream or found):
                raise TopicMissing(
                    f"stream {found!r} has the subject {subject!r}, but the delivery names another stream"
                )

    async def _publish_all(self, events: Sequence[tuple[int, Event]]) -> None:
        try:
            for number, event in events:
                await self._client.publish(
                    subject_of(event.topic),
                    event.value or b"",
                    reply=f"{self._inbox}.{number}",
                    headers=_headers(event, self._settings.stream),
                )
        except (nats.errors.Error, OSError) as exc:
            self._answers.put(self._error(exc))

    async def _on_answer(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        if message.headers and message.headers.get("Status") == "503":
            self._answers.put(_no_stream(self._settings.stream))
        elif b'"error"' in message.data and "error" in (answer := json.loads(message.data)):
            self._refuse(number, answer["error"])
        else:
            self._answers.put(BrokerAnswer((number,)))

    def _refuse(self, number: int, error: dict[str, Any]) -> None:
        text = str(error.get("description", "unknown error"))
        if error.get("err_code") == _TOO_LARGE:
            self._answers.put(BrokerAnswer((number,), EventTooLarge(f"the stream refuses an event: {text}")))
        elif error.get("err_code") == _OTHER_STREAM:
            self._answers.put(TopicMissing(f"stream {self._settings.stream!r} does not have the subject of an event"))
        else:
            is_full = error.get("err_code") in _FULL or "maximum" in text
            kind = DestinationFull if is_full else DestinationUnavailable
            self._answers.put(kind(f"the stream refuses an event: {text}"))

    async def _on_error(self, exc: Exception) -> None:
        self._failure = exc
        if self._is_open:
            self._answers.put(self._error(exc))

    async def _on_closed(self) -> None:
        if self._is_open:
            self._answers.put(DestinationUnavailable(f"{self._place} closed the connection"))

    def _error(self, exc: Exception) -> CdcError:
        text = str(exc).removeprefix("nats: ").strip("'")
        if isinstance(exc, nats.errors.AuthorizationError) or "uthorization" in text or "uthentication" in text:
            return DestinationDenied(f"{self._place} refuses the user, the password or the token")
        if "ermissions" in text:
            return DestinationDenied(f"{self._place} answers: {text}")
        if isinstance(exc, ServiceUnavailableError | nats.errors.NoRespondersError):
            return DestinationUnavailable(f"JetStream is not enabled at {self._place}, or does not answer")
        if isinstance(exc, APIError):
            return DestinationUnavailable(f"{self._place} answers: {exc.description}")
        if type(exc) is nats.errors.Error:
            return DestinationUnavailable(f"{self._place} answers: {text}")
        return connection_error(exc, self._place)


@lru_cache(maxsize=10_000)
def subject_of(topic: str) -> str:
    """Return the subject of a topic: white space, wildcards, `%` and dots next to an empty part are percent-encoded."""
    kept = escape(topic.encode(), lambda char: char not in "*>" and not char.isspace() and char.isprintable())
    if kept.startswith(("$", "_")):  # subjects of the server and of inboxes
        kept = f"%{ord(kept[0]):02X}{kept[1:]}"
    return _EMPTY_PART.sub("%2E", kept)


@lru_cache(maxsize=10_000)
def header_name(name: str) -> str:
    """Return the name of a header as the protocol takes it; one that the server would obey is changed."""
    kept = escape(name.encode(), _NAME_CHARACTERS.__contains__)
    return f"%{ord(kept[0]):02X}{kept[1:]}" if kept.lower().startswith("nats-") else kept


def _headers(event: Event, stream: str | None) -> dict[str, str]:
    found = {ID_HEADER: event.id}
    if stream is not None:
        found[STREAM_HEADER] = stream
    for name, value in event.headers:
        found[header_name(name)] = _header_value(value)
    if event.key is not None:
        found[KEY_HEADER] = _header_value(event.key)
    if event.value is None:
        found[TOMBSTONE_HEADER] = "true"
    return found


def _header_value(content: bytes) -> str:
    """Return the value of a header, as printable ASCII; the library removes spaces at its ends."""
    text = escape(content, lambda char: " " <= char <= "~")
    if text[:1] == " ":
        text = f"%20{text[1:]}"
    return f"{text[:-1]}%20" if text[-1:] == " " else text


def _no_stream(stream: str | None) -> TopicMissing:
    if stream is None:
        return TopicMissing("no stream has the subject of an event")
    return TopicMissing(f"no stream has the subject of an event, stream {stream!r} neither")
