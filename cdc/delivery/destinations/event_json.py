"""An event as one line of JSON, and its headers as a JSON array, for destinations that have no form of their own."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Final

from cdc.config.deliveries import DeliverySettings, EventEncoding
from cdc.delivery.destinations.contract import Event
from cdc.delivery.formats.contract import Headers

_encode: Final = json.JSONEncoder(ensure_ascii=False).encode


def line_encoder(settings: DeliverySettings) -> Callable[[Event], bytes]:
    r"""Return a function that makes one line of an event: `{"id", "topic", "key", "value", "headers"}`.

    Key and value are JSON where they are JSON objects, otherwise text; bytes that are not UTF-8 are `{"base64": …}`.
    The position and ordinal are in the id.
    """
    is_foreign = settings.outbox is not None or any(rule.key is not None for rule in settings.messages)
    return partial(_line, is_ours=settings.encoding is EventEncoding.JSON and not is_foreign)


def _line(event: Event, *, is_ours: bool) -> bytes:
    """is_ours: whether formats have made all keys and values, so that what looks like a JSON object is one."""
    headers = {name: _text(value) for name, value in event.headers}
    head = f'{{"id": {_encode(event.id)}, "topic": {_encode(event.topic)}, "key": '.encode()
    tail = f', "headers": {_encode(headers)}}}\n'.encode()
    return b"".join((head, _json(event.key, is_ours), b', "value": ', _json(event.value, is_ours), tail))


def header_list(headers: Headers) -> str:
    """Return headers as a JSON array of `[name, text]`, or `[name, base64, "base64"]` for bytes that are not UTF-8."""
    return json.dumps([_header(name, value) for name, value in headers])


def _header(name: str, value: bytes) -> list[str]:
    text = _text(value)
    return [name, text] if isinstance(text, str) else [name, text["base64"], "base64"]


def _json(content: bytes | None, is_ours: bool) -> bytes:  # noqa: FBT001 - called for each key and value
    """Return content as JSON: unchanged if it is a JSON object in one line."""
    if content is None:
        return b"null"
    if content[:1] == b"{" and content[-1:] == b"}" and b"\n" not in content and (is_ours or _is_json(content)):
        return content
    return _encode(_text(content)).encode()


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _text(content: bytes) -> str | dict[str, str]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
