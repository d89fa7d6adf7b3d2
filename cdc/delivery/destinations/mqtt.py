"""Destination at a broker of MQTT 5: at least once, by messages of quality of service 1.

The broker may refuse one message and take the next, so only one event of each key is unacknowledged. A message reaches
the subscribers that the broker knows at that time; it keeps messages only for sessions that continue while their
subscriber is away, and the last one of each topic if `retain` is set.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final
from uuid import uuid4

from paho.mqtt.client import CallbackAPIVersion, Client, MQTTv5
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from cdc.config.destinations import MqttDelivery
from cdc.delivery.destinations.acknowledgements import AcknowledgementWindow, BrokerAnswer
from cdc.delivery.destinations.broker_connection import (
    KEY_HEADER,
    TOMBSTONE_HEADER,
    address,
    connection_error,
    escape,
    tls_context,
)
from cdc.delivery.destinations.contract import ID_HEADER, DeliveryIdentity, Event, Promise, refuse
from cdc.errors import CdcError, DestinationDenied, DestinationFull, DestinationUnavailable, EventRefused, EventTooLarge

AT_LEAST_ONCE: Final = 1
"""Quality of service."""
LONGEST: Final = 65_535
"""Bytes of the longest topic, and of the longest text of a property."""
LEVELS: Final = 200
"""Levels of a topic that every broker takes."""
KEEPALIVE: Final = 30
_FAILURE: Final = 0x80
"""Reason codes from here on are failures."""
_DENIED: Final = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C})
_REFUSED: Final = frozenset({0x90, 0x99})
"""Reason codes of a message with a topic or a content that the broker does not take."""
_QUOTA_EXCEEDED: Final = 0x97
_PACKET_OVERHEAD: Final = 32
"""Bytes of a packet besides topic, properties and content, at most."""


class MqttDestination:
    """Publishes each event to its topic."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: MqttDelivery, identity: DeliveryIdentity) -> None:
        self._settings, self._identity = settings, identity
        host, port, self._is_secure = address(settings.url, 1883, 8883)
        self._address = host, port
        self._place = f"{host}:{port}"
        self._client: Client | None = None
        self._window: AcknowledgementWindow | None = None
        self._largest: int | None = None
        """Bytes of the largest packet that the broker takes; None: any."""

    def open(self) -> bytes | None:
        """Connect, with the limits that the broker states."""
        self._open(f"cdc-{self._identity}")
        return None

    def check(self, topics: Collection[str]) -> None:
        """Connect under another name, because a broker ends an older connection of the same name."""
        del topics
        try:
            self._open(f"cdc-{self._identity}-check-{uuid4().hex}")
        finally:
            self.close()

    def _open(self, client_id: str) -> None:
        settings = self._settings
        self._client = client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=MQTTv5,
            reconnect_on_failure=False,
        )
        client.max_inflight_messages_set(0)  # the window limits them, so that the library queues nothing
        client.connect_timeout = settings.timeout
        if settings.user is not None:
            client.username_pw_set(settings.user, settings.password.current() if settings.password else None)
        if self._is_secure:
            client.tls_set_context(tls_context(settings))
        connected: SimpleQueue[CdcError | Properties] = SimpleQueue()
        client.on_connect = lambda _client, _data, _flags, code, properties: connected.put(
            self._refused_connection(code) or properties
        )
        client.on_disconnect = lambda _client, _data, _flags, code, _properties: connected.put(self._closed(code))
        try:
            client.connect(*self._address, keepalive=KEEPALIVE, clean_start=True)
        except (OSError, ValueError) as exc:
            raise connection_error(exc, self._place) from exc
        client.loop_start()
        self._apply_limits(self._first(connected))

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
        client, self._client = self._client, None
        if client is not None:
            client.on_disconnect = client.on_publish = None
            client.disconnect()
            client.loop_stop()

    def _first(self, connected: SimpleQueue[CdcError | Properties]) -> Properties | None:
        """Return the properties of the broker, when it has accepted the connection."""
        try:
            found = connected.get(timeout=self._settings.timeout)
        except Empty:
            raise DestinationUnavailable(f"{self._place} did not answer within {self._settings.timeout:g} s") from None
        if isinstance(found, CdcError):
            raise found
        return found

    def _apply_limits(self, properties: Properties | None) -> None:
        assert self._client is not None  # noqa: S101 - connected just before
        if getattr(properties, "MaximumQoS", AT_LEAST_ONCE) < AT_LEAST_ONCE:
            raise DestinationUnavailable(f"{self._place} does not acknowledge messages: its maximum QoS is 0")
        if self._settings.retain and not getattr(properties, "RetainAvailable", 1):
            raise DestinationDenied(f"{self._place} does not keep messages ('retain')")
        limit = min(self._settings.in_flight, getattr(properties, "ReceiveMaximum", LONGEST))
        self._largest = getattr(properties, "MaximumPacketSize", None)
        self._window = AcknowledgementWindow(self._publish, limit, self._settings.timeout, one_per_key=True)
        answers = self._window.answers
        self._client.on_publish = lambda _client, _data, number, code, _properties: answers.put(
            self._answer(number, code)
        )
        self._client.on_disconnect = lambda _client, _data, _flags, code, _properties: answers.put(self._closed(code))
        if not self._client.is_connected():
            raise DestinationUnavailable(f"{self._place} closed the connection")

    def _publish(self, events: Sequence[Event]) -> Sequence[int]:
        assert self._client is not None  # noqa: S101 - the contract: opened before
        numbers = []
        for event in events:
            info = self._client.publish(
                topic_name(event.topic), event.value or b"", AT_LEAST_ONCE, self._settings.retain, _properties(event)
            )
            if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
                raise DestinationUnavailable(f"the connection to {self._place} is lost")
            numbers.append(info.mid)
        return numbers

    def _refusal(self, event: Event) -> CdcError | None:
        """Return why the broker cannot take the event; None if it can."""
        name = topic_name(event.topic)
        if not 0 < len(name.encode()) <= LONGEST or name.count("/") >= LEVELS:
            return EventRefused(
                f"the topic of event {event.id!r} is empty, longer than {LONGEST:,} bytes, or has {LEVELS} levels"
            )
        texts = [text for pair in _user_properties(event) for text in pair]
        if any(len(text) > LONGEST for text in texts):
            return EventTooLarge(f"event {event.id!r} has a key or a header of more than {LONGEST:,} bytes")
        size = len(name.encode()) + sum(len(text) + 4 for text in texts) + len(event.value or b"") + _PACKET_OVERHEAD
        if self._largest is not None and size > self._largest:
            return EventTooLarge(f"event {event.id!r} is larger than the broker accepts: {self._largest:,} bytes")
        return None

    def _answer(self, number: int, code: Any) -> BrokerAnswer | CdcError:
        """Return what the acknowledgement of a message says."""
        if code.value < _FAILURE:
            return BrokerAnswer((number,))
        text = f"{self._place} refuses an event: {code}"
        if code.value in _REFUSED:
            return BrokerAnswer((number,), EventRefused(text))
        if code.value == _QUOTA_EXCEEDED:
            return DestinationFull(text)
        return DestinationDenied(text) if code.value in _DENIED else DestinationUnavailable(text)

    def _refused_connection(self, code: Any) -> CdcError | None:
        if code.value < _FAILURE:
            return None
        if code.value in _DENIED:
            return DestinationDenied(f"{self._place} refuses the connection: {code}")
        return DestinationUnavailable(f"{self._place} refuses the connection: {code}")

    def _closed(self, code: Any) -> CdcError:
        if code.value in _DENIED:
            return DestinationDenied(f"{self._place} closed the connection: {code}")
        return DestinationUnavailable(f"{self._place} closed the connection: {code}")


@lru_cache(maxsize=10_000)
def topic_name(topic: str) -> str:
    """Return the name of a topic: `%`, wildcards, control characters and a `$` at the beginning are percent-encoded."""
    kept = escape(topic.encode(), lambda char: char not in "+#" and _is_allowed(char))
    return f"%24{kept[1:]}" if kept.startswith("$") else kept


def _is_allowed(char: str) -> bool:
    """Return True unless a broker may refuse a text with the character: control and non-characters of Unicode."""
    code = ord(char)
    is_control = code < 0x20 or 0x7F <= code <= 0x9F  # noqa: PLR2004 - ranges of Unicode
    return not is_control and not 0xFDD0 <= code <= 0xFDEF and code & 0xFFFE != 0xFFFE  # noqa: PLR2004 - as above


def _text(content: bytes) -> str:
    return escape(content, _is_allowed)


def _user_properties(event: Event) -> list[tuple[str, str]]:
    found = [(_text(name.encode()), _text(value)) for name, value in event.headers]
    if all(name != ID_HEADER for name, _ in event.headers):
        found.append((ID_HEADER, event.id))
    if event.key is not None:
        found.append((KEY_HEADER, _text(event.key)))
    if event.value is None:
        found.append((TOMBSTONE_HEADER, "true"))
    return found


def _properties(event: Event) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)
    properties.UserProperty = _user_properties(event)
    return properties
