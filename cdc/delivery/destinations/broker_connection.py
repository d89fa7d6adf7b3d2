"""What destinations at brokers have in common: certificates, errors of connections, names of headers, and texts."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

from cdc.config.destinations import BrokerDelivery
from cdc.delivery.destinations.contract import Event
from cdc.errors import DeliveryError, DestinationNotTrusted, DestinationUnavailable

KEY_HEADER: Final = "cdc.key"
"""Header with the key, where a protocol has no place for it."""
KEY_BASE64_HEADER: Final = "cdc.key_base64"
"""Header with a key that is not UTF-8, where headers are text."""
TOPIC_HEADER: Final = "cdc.topic"
"""Header with the topic of the event, where the name at the broker may be another one."""
HEADERS_HEADER: Final = "cdc.headers"
"""Header with other headers, as `header_list` writes them, where a protocol has no place for them."""
TOMBSTONE_HEADER: Final = "cdc.tombstone"
"""Header of an event without value, where a protocol cannot distinguish that from an empty one."""
HASHED: Final = "sha256:"
"""How a name begins that is the hash of a key."""


def tls_context(settings: BrokerDelivery) -> ssl.SSLContext:
    """Return the context of connections with TLS. Raises DestinationNotTrusted if a file cannot be read."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except (OSError, ssl.SSLError) as exc:
        raise DestinationNotTrusted(
            f"cannot read the certificates of delivery {settings.name!r}: {_reason(exc)}",
            remedy="correct 'ca_file', 'cert_file' and 'key_file' in the definition",
        ) from exc
    return context


def connection_error(exc: BaseException, place: str) -> DeliveryError:
    """Return the error of a delivery for a connection that failed. The text has nothing that the client has sent."""
    causes = _causes(exc)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return DestinationNotTrusted(f"the certificate of {place} is not trusted: {cause.verify_message}")
    failure = next((cause for cause in causes if isinstance(cause, OSError)), exc)
    return DestinationUnavailable(f"the connection to {place} failed: {_reason(failure)}")


def address(url: str, port: int, secure_port: int) -> tuple[str, int, bool]:
    """Return host, port and whether the connection uses TLS. The two ports are the defaults without and with TLS."""
    parts = urlsplit(url)
    is_secure = parts.scheme in {"amqps", "tls", "rediss", "mqtts"}
    return parts.hostname or "localhost", parts.port or (secure_port if is_secure else port), is_secure


def escape(content: bytes, keep: Callable[[str], bool]) -> str:
    """Return bytes as text, with `%XX` for each byte of `%`, of characters not to be kept, and of invalid UTF-8.

    Percent-decoding (RFC 3986) returns the bytes, so different bytes have different texts.
    """
    text = content.decode(errors="surrogateescape")
    if all(char != "%" and not "\ud800" <= char <= "\udfff" and keep(char) for char in text):
        return text
    return "".join(
        char
        if char != "%" and not "\ud800" <= char <= "\udfff" and keep(char)
        else "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogateescape"))
        for char in text
    )


def text_of(content: bytes) -> str | None:
    """Return content as text; None if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def text_or_bytes(content: bytes) -> str | bytes:
    """Return content as the type of field that most clients show as text, if it is UTF-8."""
    text = text_of(content)
    return content if text is None else text


def hashed_key(key: bytes) -> str:
    """Return a name for a key that cannot be one itself."""
    return f"{HASHED}{sha256(key).hexdigest()}"


def content_type(event: Event) -> str:
    """Return the media type of the value of an event."""
    return "application/json" if (event.value or b"")[:1] == b"{" else "application/octet-stream"


def repeated_header(event: Event) -> bool:
    """Return True if two headers have one name, which a table of headers cannot represent."""
    return len({name for name, _ in event.headers}) != len(event.headers)


def _causes(exc: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while exc is not None and exc not in found:
        found.append(exc)
        exc = exc.__cause__ or exc.__context__
    return found


def _reason(exc: BaseException) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return type(exc).__name__
