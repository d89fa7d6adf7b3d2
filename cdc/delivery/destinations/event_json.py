"""An event as one line of JSON, and its headers as a JSON array, for destinations that have no form of their own."""

from __future__ import annotations

import base64
import json

from cdc.delivery.destinations.contract import Event
from cdc.delivery.formats.contract import Headers


def line_of(event: Event) -> bytes:
    r"""Return an event as one line: `{"id", "topic", "key", "value", "headers"}`.

    Key and value are JSON where they are JSON, otherwise text; bytes that are not UTF-8 are `{"base64": …}`. The
    position and ordinal are in the id.
    """
    headers = {name: _text(value) for name, value in event.headers}
    head = json.dumps({"id": event.id, "topic": event.topic}, ensure_ascii=False)[:-1].encode()
    return b"".join(
        (
            head,
            b', "key": ',
            _json(event.key),
            b', "value": ',
            _json(event.value),
            b', "headers": ',
            _dumped(headers),
            b"}\n",
        )
    )


def header_list(headers: Headers) -> str:
    """Return headers as a JSON array of `[name, text]`, or `[name, base64, "base64"]` for bytes that are not UTF-8."""
    return json.dumps([_header(name, value) for name, value in headers])


def _header(name: str, value: bytes) -> list[str]:
    text = _text(value)
    return [name, text] if isinstance(text, str) else [name, text["base64"], "base64"]


def _json(content: bytes | None) -> bytes:
    """Return content as JSON: unchanged if it is a JSON object in one line."""
    if content is None:
        return b"null"
    if content[:1] == b"{" and content[-1:] == b"}" and b"\n" not in content and _is_json(content):
        return content
    return _dumped(_text(content))


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


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
