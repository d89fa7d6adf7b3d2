"""Google Pub/Sub: one message per event, at least once, with the key of the event as ordering key.

Pub/Sub takes a request as a whole or not at all, and a request has messages of one ordering key only. So a request has
the next events of one key, and the following ones of the key are sent when it is acknowledged (`one_lane` of
KeyedRequests). A request without an answer is sent again before anything later of its key: a consumer may see events
twice, but the first time in order. Keys do not wait for each other. Where most events have a key of their own, each
needs a request, which takes longer than all else; `ordering_keys` lets several keys share one.

The requests are those of the official client's lower layer (`google.pubsub_v1`). Its upper one collects messages
itself: it waits for more of them first, starts a thread for each request, and repeats a failed request of a key without
end. After other errors it stops the key and drops its later messages until `resume_publish`. The loop sends a whole
batch and then asks whether it has arrived, so all of this would have to be undone.

A message is published where it reaches the service. Pub/Sub keeps the order of what arrives in one region, so a
delivery from several regions needs the endpoint of one.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit
from zlib import crc32

import google.auth
import grpc
from google.api_core.exceptions import AlreadyExists, GoogleAPICallError, PermissionDenied
from google.auth.exceptions import GoogleAuthError
from google.oauth2 import service_account
from google.pubsub_v1 import PublisherClient, types
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from cdc import failpoint
from cdc.config.destinations import LOCAL_HOSTS, PubsubDelivery
from cdc.delivery.destinations.broker_connection import (
    HASHED,
    HEADERS_HEADER,
    KEY_BASE64_HEADER,
    KEY_HEADER,
    TOMBSTONE_HEADER,
    TOPIC_HEADER,
    escape,
    hashed_key,
    text_of,
)
from cdc.delivery.destinations.contract import (
    ID_HEADER,
    POSITION_HEADER,
    XID_HEADER,
    DeliveryIdentity,
    Event,
    Promise,
    refuse,
)
from cdc.delivery.destinations.event_json import header_list
from cdc.delivery.destinations.keyed_requests import KeyedLimits, KeyedRequests, RequestAnswer, RequestEntry
from cdc.errors import (
    CdcError,
    DeliveryError,
    DestinationDenied,
    DestinationFull,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)

EMULATOR: Final = "PUBSUB_EMULATOR_HOST"
"""Environment variable of Google's tools: host and port of an emulator, without TLS."""
LARGEST: Final = 10_000_000 - 400
"""Bytes of the messages of a request: the limit of Pub/Sub less the name of the topic."""
_ENTRIES: Final = 1_000
_ATTRIBUTES: Final = 100
_LONGEST_NAME: Final = 256
_LONGEST_VALUE: Final = 1024
"""Bytes of the value of an attribute, and of an ordering key."""
_NO_TOPIC: Final = "cdc.check"
"""Topic that a check without topics looks for; it need not exist."""
_TOPIC_NAME: Final = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9_.~+%-]{2,254}\Z")
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~+")
_Message: Final = types.PubsubMessage.pb()
_Request: Final = types.PublishRequest.pb()
_CHANNEL_OPTIONS: Final = (
    # otherwise a channel that is opened after a failure waits as long as the one before it
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_send_message_length", -1),
)
_BY_STATUS: Final[Mapping[str, tuple[type[DeliveryError], str | None]]] = {
    "NOT_FOUND": (TopicMissing, None),
    "PERMISSION_DENIED": (
        DestinationDenied,
        "grant 'roles/pubsub.publisher' for the topic, with 'create' 'roles/pubsub.editor' for the project",
    ),
    "UNAUTHENTICATED": (
        DestinationDenied,
        "replace the credentials: they are expired, revoked or not for this service",
    ),
    "INVALID_ARGUMENT": (EventRefused, None),
    "OUT_OF_RANGE": (EventRefused, None),
    "RESOURCE_EXHAUSTED": (DestinationFull, "raise the quota that Google shows as used up, or lower 'parallel'"),
}
_BY_TEXT: Final[Mapping[str, tuple[type[DeliveryError], str | None]]] = {
    "CERTIFICATE_VERIFY_FAILED": (DestinationNotTrusted, None),
    "metadata from plugin failed": (DestinationDenied, "replace the credentials: they yield no access token"),
    "larger than max": (EventTooLarge, None),
}
"""What the client library and servers of gRPC say with statuses that have other meanings, too."""


class PubsubDestination:
    """Topics of one project."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: PubsubDelivery, identity: DeliveryIdentity) -> None:
        del identity
        self._settings = settings
        self._client: PublisherClient | None = None
        self._requests: KeyedRequests | None = None

    def open(self) -> bytes | None:
        """Read the credentials and make the client; it connects when it sends."""
        self.close()
        self._client = PublisherClient(transport=_transport(self._settings))
        limits = KeyedLimits(_ENTRIES, LARGEST, self._settings.parallel, one_lane=True)
        self._requests = KeyedRequests(self._post, limits, self._settings.timeout)
        return None

    def check(self, topics: Collection[str]) -> None:
        """Look for the topics, as far as the credentials allow it: to send, they need no right to see topics."""
        client = PublisherClient(transport=_transport(self._settings))
        try:
            for topic in sorted(topics) or [_NO_TOPIC]:
                place = request_entry(Event("", 0, 0, topic, None, b""), self._settings).place
                try:
                    client.get_topic(topic=place, retry=None, timeout=self._settings.timeout)
                except PermissionDenied:
                    continue
                except GoogleAPICallError as exc:
                    error = meaning(exc, f"{place!r} cannot be found")
                    if not isinstance(error, TopicMissing) or not (self._settings.create or topic == _NO_TOPIC):
                        raise error from exc
        finally:
            client.transport.close()

    def send(self, events: Sequence[Event]) -> None:
        """Check the events, then let them wait for `commit`, or send them if many wait."""
        entries = [request_entry(event, self._settings) for event in events]
        refuse((entry.event, _refusal(entry)) for entry in entries)
        self._opened().add(entries)

    def commit(self, progress: bytes) -> None:
        """Return when Pub/Sub has acknowledged every event."""
        del progress
        self._opened().finish()
        failpoint.hit("pubsub_acknowledged")

    def close(self) -> None:
        """Forget the batch and disconnect."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._client is not None:
            self._client.transport.close()
            self._client = None

    def _opened(self) -> KeyedRequests:
        if self._requests is None:
            raise DestinationUnavailable("the client of Pub/Sub is closed")
        return self._requests

    def _post(self, place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        """Send one request, in any thread; when its content is refused, by halves, to find out the event."""
        error = self._publish(place, [entry.content for entry in entries])
        if error is None:
            return RequestAnswer()
        if not isinstance(error, EventRefused | EventTooLarge):
            return RequestAnswer(dict.fromkeys(range(len(entries)), error))
        if len(entries) == 1:
            return RequestAnswer(refused={0: error})
        half = len(entries) // 2
        answer = self._post(place, entries[:half])
        if answer.failed or answer.refused:  # no later event may overtake them
            waiting = dict.fromkeys(range(half, len(entries)), next(iter(answer.failed.values()), error))
            return RequestAnswer({**answer.failed, **waiting}, answer.refused)
        rest = self._post(place, entries[half:])
        return RequestAnswer(_moved(rest.failed, half), _moved(rest.refused, half))

    def _publish(self, place: str, messages: Sequence[Any]) -> CdcError | None:
        """Return why the messages are not published, if other messages or another attempt may be; None if they are."""
        assert self._client is not None  # noqa: S101 - requests end before it is closed
        request = types.PublishRequest.wrap(_Request(topic=place, messages=messages))
        try:
            self._client.publish(request=request, retry=None, timeout=self._settings.timeout)
        except GoogleAPICallError as exc:
            error = meaning(exc, f"events cannot be sent to {place!r}")
            if isinstance(error, TopicMissing) and self._settings.create:
                self._create(place)
                return error
            if isinstance(error, EventRefused | EventTooLarge | DestinationUnavailable):
                return error
            raise error from exc
        return None

    def _create(self, place: str) -> None:
        assert self._client is not None  # noqa: S101 - requests end before it is closed
        topic = types.Topic.pb()(name=place)
        topic.message_retention_duration.FromSeconds(int(self._settings.retention))
        try:
            self._client.create_topic(request=types.Topic.wrap(topic), retry=None, timeout=self._settings.timeout)
        except AlreadyExists:
            return  # another request has created it
        except GoogleAPICallError as exc:
            raise meaning(exc, f"{place!r} cannot be created") from exc


def request_entry(event: Event, settings: PubsubDelivery) -> RequestEntry:
    """Return an event as a message for a request."""
    name = settings.topic_name.format(topic=escape(event.topic.encode(), _PLAIN.__contains__))
    key = ordering_key(event.key, settings.ordering_keys)
    message = _Message(data=event.value or b"", attributes=attributes_of(event), ordering_key=key)
    # a request has a tag and a length of up to four bytes in front of each message
    return RequestEntry(event, f"projects/{settings.project}/topics/{name}", key, message.ByteSize() + 5, message)


def ordering_key(key: bytes | None, number: int | None = None) -> str:
    """Return the ordering key: the key, or its hash if it is empty or no text; empty for an event without key.

    number: of ordering keys; None: each key is one
    """
    if key is None:
        return ""
    if number is not None:
        return str(crc32(key) % number)
    text = text_of(key)
    return text if text and not text.startswith(HASHED) else hashed_key(key)


def attributes_of(event: Event) -> dict[str, str]:
    """Return the attributes of a message: topic, key, and the headers.

    Headers that can be no attributes are one JSON array: bytes that are not UTF-8, second ones of a name, and those
    with names that are too long, reserved by Google or used here.
    """
    found = {ID_HEADER: event.id, TOPIC_HEADER: event.topic}
    if event.key is not None:
        text = text_of(event.key)
        found |= {KEY_HEADER: text} if text is not None else {KEY_BASE64_HEADER: b64encode(event.key).decode()}
    if event.value is None:
        found[TOMBSTONE_HEADER] = "true"
    others: list[tuple[str, bytes]] = []
    for name, value in sorted(event.headers, key=_comes_later):
        text = text_of(value)
        if name == ID_HEADER and text == event.id:
            continue
        if text is None or name in found or not _is_attribute(name) or len(found) >= _ATTRIBUTES - 1:
            others.append((name, value))
        else:
            found[name] = text
    if others:
        found[HEADERS_HEADER] = header_list(tuple(others))
    return found


def _comes_later(header: tuple[str, bytes]) -> bool:
    """Return whether other headers come first, for the case that there are too many for the attributes."""
    return header[0] not in {POSITION_HEADER, XID_HEADER}


def _is_attribute(name: str) -> bool:
    own = KEY_HEADER, KEY_BASE64_HEADER, TOMBSTONE_HEADER, HEADERS_HEADER
    return bool(name) and name not in own and not name.startswith("goog") and len(name.encode()) <= _LONGEST_NAME


def _refusal(entry: RequestEntry) -> CdcError | None:
    """Return why Pub/Sub cannot take an event; None if it can."""
    event, name = entry.event, entry.place.rpartition("/")[2]
    if not _TOPIC_NAME.match(name):
        return EventRefused(
            f"{name!r} is no name of a topic in Pub/Sub: 3 to 255 characters, first a letter, not 'goog'",
            remedy="set 'topic' in a rule for the table, then run 'cdc dlq retry SINK'",
        )
    for attribute, value in entry.content.attributes.items():
        if len(value.encode()) > _LONGEST_VALUE:
            return EventRefused(
                f"{attribute!r} of event {event.id!r} is longer than an attribute of Pub/Sub may be, 1024 bytes",
                remedy="choose a shorter key, or fewer or shorter headers, then run 'cdc dlq retry SINK'",
            )
    if entry.size > LARGEST:
        return EventTooLarge(f"event {event.id!r} has {entry.size} bytes; Pub/Sub takes at most {LARGEST}")
    return None


def _moved(answers: Mapping[int, CdcError], by: int) -> dict[int, CdcError]:
    return {index + by: error for index, error in answers.items()}


def _transport(settings: PubsubDelivery) -> PublisherGrpcTransport:
    """Return the transport of a client; it has not connected yet."""
    endpoint = settings.endpoint or _emulator(settings)
    if endpoint is not None and endpoint.startswith("http:"):
        place = urlsplit(endpoint).netloc
        return PublisherGrpcTransport(host=place, channel=grpc.insecure_channel(place, _CHANNEL_OPTIONS))
    try:
        authorities = None if settings.ca_file is None else Path(settings.ca_file).read_bytes()
    except OSError as exc:
        raise DestinationNotTrusted(f"cannot read the certificates of delivery {settings.name!r}") from exc
    return PublisherGrpcTransport(
        host=urlsplit(endpoint).netloc if endpoint else PublisherGrpcTransport.DEFAULT_HOST,
        credentials=_credentials(settings),
        channel=_secure_channel,
        ssl_channel_credentials=grpc.ssl_channel_credentials(authorities),
        always_use_jwt_access=True,  # a token that is signed here instead of one that Google's server is asked for
    )


def _secure_channel(host: str, *, options: Sequence[tuple[str, Any]] = (), **given: Any) -> grpc.Channel:
    return PublisherGrpcTransport.create_channel(host, options=[*options, *_CHANNEL_OPTIONS], **given)


def _emulator(settings: PubsubDelivery) -> str | None:
    place = os.environ.get(EMULATOR)
    if not place:
        return None
    if urlsplit(f"http://{place}").hostname not in LOCAL_HOSTS and not settings.insecure_plaintext:
        raise DestinationNotTrusted(
            f"{EMULATOR} names another machine, to which events would be sent without TLS",
            remedy=f"set 'endpoint' or 'insecure_plaintext' in the delivery, or unset {EMULATOR}",
        )
    return f"http://{place}"


def _credentials(settings: PubsubDelivery) -> Any:
    scopes = PublisherGrpcTransport.AUTH_SCOPES
    try:
        if settings.credentials_file is not None:
            return service_account.Credentials.from_service_account_file(settings.credentials_file, scopes=scopes)
        return google.auth.default(scopes=scopes)[0]
    except (GoogleAuthError, OSError, ValueError) as exc:
        raise DestinationDenied(
            f"no credentials of Google Cloud for delivery {settings.name!r}: {type(exc).__name__}",
            remedy="set 'credentials_file' to the key of a service account, or run cdc where Application Default "
            "Credentials exist (GOOGLE_APPLICATION_CREDENTIALS, or 'gcloud auth application-default login')",
        ) from exc


def _status(exc: GoogleAPICallError) -> str:
    return exc.grpc_status_code.name if exc.grpc_status_code is not None else type(exc).__name__


def meaning(exc: GoogleAPICallError, what: str) -> CdcError:
    """Return what a failed call means. The text of the exception is omitted: it may contain content.

    what: names the call and the topic.
    """
    status, text = _status(exc), str(exc.message)
    kind, remedy = _BY_STATUS.get(status, (DestinationUnavailable, None))
    for part, special in _BY_TEXT.items():
        if part in text:
            kind, remedy = special
    return kind(f"{what}: {status!r}", remedy=remedy)
