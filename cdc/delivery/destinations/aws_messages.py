"""Events as messages of SQS and SNS: names, groups, and a text with attributes from which the event can be read again.

Both services take text without most control characters, attributes with text that is not empty, and at most ten of
them. Other content is base64, and the attribute `cdc.encoding` says so.
"""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from typing import Any, Final, NamedTuple

from cdc.delivery.destinations.broker_connection import (
    HASHED,
    HEADERS_HEADER,
    KEY_BASE64_HEADER,
    KEY_HEADER,
    TOPIC_HEADER,
    hashed_key,
    text_of,
)
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, Event
from cdc.delivery.destinations.event_json import header_list
from cdc.delivery.destinations.keyed_requests import RequestEntry

ENTRIES: Final = 10
"""Messages that one request contains at most."""
ENCODING: Final = "cdc.encoding"
"""Attribute of a message whose text is not the value: `base64`, `empty` or `tombstone`."""
_OWN_HEADERS: Final = (ID_HEADER, POSITION_HEADER, XID_HEADER)
_NOT_SENT: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_GROUP: Final = re.compile(r"[A-Za-z0-9!-/:-@\[-`{-~]{1,128}\Z")
_RESERVED: Final = (HASHED, "event:")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_]\Z")
_FIFO: Final = ".fifo"


class TextMessage(NamedTuple):
    """An event as text and attributes."""

    body: str
    attributes: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes that count for the limits of the services."""
        return len(self.body.encode()) + sum(
            len(name) + len("String") + len(value.encode()) for name, value in self.attributes.items()
        )


def is_ordered(name: str) -> bool:
    """Return True if a queue or topic with this name keeps the order of a group."""
    return name.endswith(_FIFO)


def escaped_topic(topic: str) -> str:
    """Return a topic as a part of a name of letters, digits, `-` and `_`; no two topics become the same.

    A dot between two plain characters becomes `-`. Every other character becomes `--` and two hexadecimal digits for
    each of its bytes.
    """
    pieces: list[str] = []
    for index, character in enumerate(topic):
        if _PLAIN.match(character):
            pieces.append(character)
        elif (
            character == "." and _PLAIN.match(topic[index + 1 : index + 2]) and pieces and not pieces[-1].endswith("-")
        ):
            pieces.append("-")
        else:
            pieces += [f"--{byte:02X}" for byte in character.encode()]
    return "".join(pieces)


def group_of(event: Event) -> str:
    """Return the name of the group in which an event stays in order: its key, hashed unless it is a possible name."""
    if event.key is None:
        return f"event:{sha256(event.id.encode()).hexdigest()}"
    text = event.key.decode(errors="replace")
    if _GROUP.match(text) and not text.startswith(_RESERVED):
        return text
    return hashed_key(event.key)


def request_entry(event: Event, place: str) -> RequestEntry:
    """Return an event as a message for a request. place: name of a queue or topic, in which `{topic}` is replaced"""
    name, message = place.format(topic=escaped_topic(event.topic)), text_message(event)
    return RequestEntry(event, name, group_of(event) if is_ordered(name) else event.id, message.size, message)


def batch_entry(index: int, entry: RequestEntry) -> dict[str, Any]:
    """Return the entry of a batch without the text, of which the two services name the field differently."""
    attributes = entry.content.attributes.items()
    made: dict[str, Any] = {
        "Id": str(index),
        "MessageAttributes": {name: {"DataType": "String", "StringValue": value} for name, value in attributes},
    }
    if is_ordered(entry.place):
        # by this id the services drop an event that is sent again within 5 minutes
        made["MessageDeduplicationId"] = sha256(entry.event.id.encode()).hexdigest()
        made["MessageGroupId"] = entry.lane
    return made


def text_message(event: Event) -> TextMessage:
    """Return an event as a message."""
    headers = dict(event.headers)
    attributes = {ID_HEADER: event.id}
    for name in (POSITION_HEADER, XID_HEADER):
        if name in headers:
            attributes[name] = headers[name].decode()
    attributes[TOPIC_HEADER] = event.topic
    if event.key is not None:
        text = _plain_text(event.key)
        # an attribute cannot be empty, as the base64 of an empty key is
        attributes |= {KEY_HEADER: text} if text else {KEY_BASE64_HEADER: f"={base64.b64encode(event.key).decode()}"}
    others = tuple(header for header in event.headers if header[0] not in _OWN_HEADERS)
    if others:
        attributes[HEADERS_HEADER] = header_list(others)
    body, encoding = _body(event.value)
    if encoding:
        attributes[ENCODING] = encoding
    return TextMessage(body, attributes)


def _body(value: bytes | None) -> tuple[str, str]:
    if value is None:
        return "null", "tombstone"
    if not value:
        return "-", "empty"
    text = _plain_text(value)
    return (text, "") if text is not None else (base64.b64encode(value).decode(), "base64")


def _plain_text(content: bytes) -> str | None:
    """Return content as text; None if it is not UTF-8, or has characters that the services do not take."""
    text = text_of(content)
    return None if text is None or _NOT_SENT.search(text) else text
