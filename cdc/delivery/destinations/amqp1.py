"""Destination at brokers of AMQP 1.0: durable messages over one connection, at least once, settled one by one.

The broker may accept, reject, release or modify each message. At most one message of each topic and key is unsettled,
so no event passes an earlier one of its key. A rejected event becomes a dead letter, unless the reason may pass; what
the broker released, modified or settled without an outcome is sent again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, Final

import proton
from proton.reactor import SenderOption
from proton.utils import BlockingConnection, BlockingSender, LinkDetached

from cdc import failpoint
from cdc.config.destinations import Amqp1Delivery
from cdc.delivery.destinations.broker_connection import (
    KEY_HEADER,
    TOMBSTONE_HEADER,
    address,
    content_type,
    escape,
    hashed_key,
    repeated_header,
    text_or_bytes,
)
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise, refuse
from cdc.delivery.destinations.keyed_requests import KeyedLimits, KeyedRequests, RequestAnswer, RequestEntry
from cdc.errors import (
    CdcError,
    DestinationDenied,
    DestinationFull,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)

_LIMITS: Final = KeyedLimits(entries=500, size=8 << 20, parallel=1)
MOST_LINKS: Final = 100
"""Addresses with an open link; for a further one, the oldest link is closed."""
_IDLE: Final = 15.0
"""Seconds without an event after which a new connection is made: the broker may have ended the old one."""
_LONGEST_GROUP: Final = 128
_FULL: Final = ("amqp:resource-limit-exceeded",)
_MAY_PASS: Final = ("amqp:internal-error", "amqp:resource-locked")
_TOO_LARGE: Final = "amqp:link:message-size-exceeded"
_DENIED: Final = ("amqp:unauthorized-access", "amqp:not-allowed")
_DENIED_BY_ARTEMIS: Final = "does not have permission"
"""In the text of an internal error, with which Artemis answers a user who may not make an address."""
_MISSING: Final = ("amqp:not-found", "amqp:resource-deleted")
_CREATE: Final = "create the address at the broker, or let the broker create it; the delivery then continues"
_CONDITION: Final = re.compile(r"""Condition\('([^']+)'(?:, (['"])(.*?)\2)?""", re.DOTALL)
"""Name and description of the reason, in the text of an error of the library."""


class Amqp1Destination:
    """Addresses of one broker."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: Amqp1Delivery, identity: DeliveryIdentity) -> None:
        self._settings, self._name = settings, f"cdc.{identity}"
        host, port, self._is_secure = address(settings.url, 5672, 5671)
        self._place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._connection: BlockingConnection | None = None
        self._senders: dict[str, BlockingSender] = {}
        self._requests: KeyedRequests | None = None
        self._used_at = 0.0
        self._is_empty = True
        """Whether no event of the batch was sent."""

    def open(self) -> bytes | None:
        """Connect and log in."""
        self.close()
        settings = self._settings
        login = {"user": settings.user, "password": settings.password.current()} if settings.password else {}
        self._connection = _calling(
            lambda: BlockingConnection(
                f"{'amqps' if self._is_secure else 'amqp'}://{self._place}",
                timeout=settings.timeout,
                ssl_domain=_tls_domain(settings) if self._is_secure else None,
                allow_insecure_mechs=True,  # the definition decides whether a login may be sent without TLS
                sasl_enabled=True,
                **login,
            ),
            f"cannot connect to {self._place}",
        )
        self._requests = KeyedRequests(self._post, _LIMITS, settings.timeout)
        self._used_at, self._is_empty = time.monotonic(), True
        return None

    def check(self, topics: Collection[str]) -> None:
        """Connect and log in. The topics are not looked for: a link to an address may create it."""
        del topics
        try:
            self.open()
        finally:
            self.close()

    def send(self, events: Sequence[Event]) -> None:
        """Check the events, and let them wait for `commit`, or send them if many wait."""
        if self._is_empty and time.monotonic() - self._used_at > _IDLE:
            self.open()
        assert self._requests is not None  # noqa: S101 - the contract: opened before
        self._is_empty &= not events
        entries = [self._entry(event) for event in events]
        refuse((entry.event, self._refusal(entry)) for entry in entries)
        self._requests.add(entries)

    def commit(self, progress: bytes) -> None:
        """Return when the broker has settled every event."""
        del progress
        assert self._requests is not None  # noqa: S101 - the contract: opened before
        self._requests.finish()
        if not self._is_empty:
            self._used_at, self._is_empty = time.monotonic(), True
        failpoint.hit("amqp1_settled")

    def close(self) -> None:
        """Disconnect without waiting for the broker."""
        requests, self._requests = self._requests, None
        connection, self._connection = self._connection, None
        self._senders = {}
        if requests is not None:
            requests.close()
        if connection is not None:
            connection.timeout = 0
            if (transport := connection.conn.transport) is not None:
                transport.close_tail()  # otherwise the library waits for the broker
            with suppress(proton.ProtonException):
                connection.close()

    def _entry(self, event: Event) -> RequestEntry:
        place = self._settings.address.format(topic=address_of(event.topic))
        lane = event.id if event.key is None else f"{event.topic}\0{event.key.hex()}"
        content = _encoded(event)
        return RequestEntry(event, place, lane, len(content), content)

    def _refusal(self, entry: RequestEntry) -> CdcError | None:
        """Return why the broker cannot take an event; None if it can."""
        if not entry.place:
            return EventRefused(f"the topic of event {entry.event.id!r} is empty")
        if repeated_header(entry.event):
            return EventRefused(f"event {entry.event.id!r} has two headers of one name")
        most = self._settings.max_size
        largest = min(self._sender(entry.place).link.remote_max_message_size or most, most)
        if entry.size > largest:
            return EventTooLarge(
                f"event {entry.event.id!r} has {entry.size:,} bytes; {self._place} or 'max_size' allows {largest:,}"
            )
        return None

    def _sender(self, place: str) -> BlockingSender:
        found = self._senders.get(place)
        if found is None:
            if len(self._senders) == MOST_LINKS:
                oldest = self._senders.pop(next(iter(self._senders)))
                _calling(oldest.close, f"cannot close a link of {self._place}")
            connection = self._connection
            assert connection is not None  # noqa: S101 - the contract: opened before
            name, routing = f"{self._name}.{place}", _Capability(self._settings.routing)
            found = self._senders[place] = _calling(
                lambda: connection.create_sender(place, name=name, options=routing),
                f"cannot open address {place!r} of {self._place}",
            )
        return found

    def _post(self, place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        """Send messages, and return when the broker has settled each."""
        link = self._sender(place).link
        sent: list[Any] = []

        def send() -> None:
            assert self._connection is not None  # noqa: S101 - there is a link
            for entry in entries:
                sent.append(link.delivery(link.delivery_tag()))
                link.stream(entry.content)
                link.advance()
            try:
                self._connection.wait(lambda: all(delivery.settled for delivery in sent))
            except proton.Timeout:
                if link.credit >= 0:
                    raise
                raise DestinationFull(f"address {place!r} of {self._place} takes no more: it may be full") from None

        _calling(send, f"events were not settled by address {place!r} of {self._place}")
        failed: dict[int, CdcError] = {}
        refused: dict[int, CdcError] = {}
        for index, delivery in enumerate(sent):
            error = self._error(delivery, entries[index].event)
            if error is not None:
                (failed if isinstance(error, DestinationUnavailable) else refused)[index] = error
            delivery.settle()
        return RequestAnswer(failed, refused)

    def _error(self, delivery: Any, event: Event) -> CdcError | None:
        """Return why the broker has not accepted an event: DestinationUnavailable if it may do so later."""
        if delivery.remote_state == proton.Delivery.ACCEPTED:
            return None
        if delivery.remote_state != proton.Delivery.REJECTED:
            return DestinationUnavailable(f"{self._place} did not take event {event.id!r}: {delivery.remote_state}")
        name, reason = "amqp:rejected", "without a reason"
        if (condition := delivery.remote.condition) is not None:
            name, reason = condition.name, f"{condition.name}: {condition.description}"
        if name in _DENIED or _DENIED_BY_ARTEMIS in reason:
            raise DestinationDenied(f"{self._place} does not allow to send to {event.topic!r}: {reason}")
        if name in _MISSING:
            raise TopicMissing(f"{self._place} rejects an event of {event.topic!r}: {reason}", remedy=_CREATE)
        if name in _FULL:
            return DestinationFull(f"{self._place} has no room for event {event.id!r}: {reason}")
        if name in _MAY_PASS:
            return DestinationUnavailable(f"{self._place} did not take event {event.id!r}: {reason}")
        if name == _TOO_LARGE:
            return EventTooLarge(f"{self._place} does not take event {event.id!r}: {reason}")
        return EventRefused(f"{self._place} rejected event {event.id!r}: {reason}")


class _Capability(SenderOption):
    """Asks the broker for a queue, or for a topic, in case that it makes the address now."""

    def __init__(self, routing: str) -> None:
        self._routing = routing

    def apply(self, sender: Any) -> None:
        """See SenderOption."""
        sender.target.capabilities.put_array(False, proton.Data.SYMBOL)
        sender.target.capabilities.enter()
        sender.target.capabilities.put_symbol(proton.symbol(self._routing))
        sender.target.capabilities.exit()


def _tls_domain(settings: Amqp1Delivery) -> Any:
    domain = proton.SSLDomain(proton.SSLDomain.MODE_CLIENT)
    try:
        if settings.ca_file is not None:
            domain.set_trusted_ca_db(settings.ca_file)
        domain.set_peer_authentication(proton.SSLDomain.VERIFY_PEER_NAME)
        if settings.cert_file is not None:
            domain.set_credentials(settings.cert_file, settings.key_file, None)
    except proton.SSLException as exc:
        raise DestinationNotTrusted(
            f"cannot read the certificates of delivery {settings.name!r}",
            remedy="correct 'ca_file', 'cert_file' and 'key_file' in the definition",
        ) from exc
    return domain


def _calling(call: Callable[[], Any], what: str) -> Any:
    """Call the client library; raise a CdcError for its errors, with `what` at the beginning."""
    try:
        return call()
    except proton.ProtonException as exc:
        raise _meaning(exc, what) from exc
    except OSError as exc:
        raise DestinationUnavailable(f"{what}: {exc.strerror or type(exc).__name__}") from exc


def _meaning(exc: proton.ProtonException, what: str) -> CdcError:
    text = str(exc)
    found = _CONDITION.search(text)
    name, reason = (found[1], f"{found[1]}: {found[3]}") if found else ("", "the broker gives no reason")
    if isinstance(exc, LinkDetached):
        what = f"{what}: the link to {exc.link.target.address!r} was closed"
    if "certificate verify failed" in text:
        return DestinationNotTrusted(f"{what}: the certificate is not trusted")
    if name in _DENIED or _DENIED_BY_ARTEMIS in text:
        return DestinationDenied(f"{what}: {reason}")
    if name in _MISSING:
        return TopicMissing(f"{what}: {reason}", remedy=_CREATE)
    return DestinationUnavailable(f"{what}: {'no answer in time' if isinstance(exc, proton.Timeout) else reason}")


def _encoded(event: Event) -> bytes:
    """Return an event as an encoded message."""
    properties: dict[str, Any] = {name: text_or_bytes(value) for name, value in event.headers}
    if event.key is not None:
        properties[KEY_HEADER] = event.key
    if event.value is None:
        properties[TOMBSTONE_HEADER] = True
    message = proton.Message(
        body=event.value or b"",
        inferred=True,
        durable=True,
        id=event.id,
        subject=event.topic,
        properties=properties,
        content_type=proton.symbol(content_type(event)),
    )
    if event.key is not None:
        message.group_id = group_of(event.key)
    encoded: bytes = message.encode()
    return encoded


@lru_cache(maxsize=10_000)
def address_of(topic: str) -> str:
    """Return the address of a topic, with `%XX` for each byte of what may have a meaning at a broker."""
    return escape(topic.encode(), _is_plain)


def group_of(key: bytes) -> str:
    """Return the group of a key: its text, with `%XX` for other bytes, or a hash if that is empty or long."""
    text = escape(key, str.isprintable)
    return text if 0 < len(text) <= _LONGEST_GROUP else hashed_key(key)


def _is_plain(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character in "._-/")
