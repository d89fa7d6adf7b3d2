"""What destinations at brokers have in common: escaped names, addresses, and errors without what was sent."""

from __future__ import annotations

import ssl
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.destinations.broker_connection import address, connection_error, escape
from cdc.errors import DestinationNotTrusted, DestinationUnavailable


@given(content=st.binary() | st.text().map(str.encode))
def test_escaped_bytes_can_be_read_back(content: bytes) -> None:
    text = escape(content, lambda char: char not in "+#\n")

    assert unquote_to_bytes(text) == content
    assert not set("+#\n") & set(text)
    assert text.encode().decode() == text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://host", ("host", 1, False)),
        ("amqps://host/shop", ("host", 2, True)),
        ("tls://host:5", ("host", 5, True)),
        ("rediss://[::1]/3", ("::1", 2, True)),
        ("mqtt://127.0.0.1:7", ("127.0.0.1", 7, False)),
        ("mqtts://host", ("host", 2, True)),
    ],
)
def test_the_address_follows_from_the_url(url: str, expected: tuple[str, int, bool]) -> None:
    assert address(url, 1, 2) == expected


def wrapped(cause: Exception) -> Exception:
    """An error of a client library."""
    outer = RuntimeError("value of a row")
    outer.__cause__ = cause
    return outer


def test_the_cause_of_a_connection_error_is_found() -> None:
    untrusted = ssl.SSLCertVerificationError()
    untrusted.verify_message = "self-signed certificate"
    refused = connection_error(wrapped(ConnectionRefusedError(111, "Connection refused")), "host:1")
    unknown = connection_error(wrapped(ValueError("value of a row")), "host:1")
    silent = connection_error(TimeoutError(), "host:1")

    assert isinstance(connection_error(wrapped(untrusted), "host:1"), DestinationNotTrusted)
    assert isinstance(refused, DestinationUnavailable)
    assert "Connection refused" in str(refused)
    assert "no answer in time" in str(silent)
    assert "value of a row" not in str(unknown)
