"""Names and groups of messages: reversible, or hashed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.destinations.aws_messages import escaped_topic, group_of, text_message
from cdc.delivery.destinations.contract import Event
from tests.delivery.destinations.sending import event


def unescaped(name: str) -> str:
    """The topic of a name, by the rule in the guide."""
    found = re.sub(rb"(?:--[0-9A-F]{2})+|-", _piece, name.encode())
    return found.decode()


def _piece(match: re.Match[bytes]) -> bytes:
    return b"." if match[0] == b"-" else bytes.fromhex(match[0].replace(b"--", b"").decode())


@given(st.text(alphabet=st.sampled_from("ab_.-/ü0"), max_size=12) | st.text(max_size=12))
def test_the_name_of_a_topic_can_be_read_back(topic: str) -> None:
    name = escaped_topic(topic)

    assert re.fullmatch(r"[A-Za-z0-9_-]*", name)
    assert unescaped(name) == topic


def test_a_usual_topic_stays_readable() -> None:
    assert escaped_topic("shop.public.order_items") == "shop-public-order_items"


@given(st.binary(max_size=200))
def test_every_key_has_a_group_that_the_services_take(key: bytes) -> None:
    group = group_of(event(1, "orders", key, b"x"))

    assert re.fullmatch(r"[A-Za-z0-9!-/:-@\[-`{-~]{1,128}", group)


def test_different_keys_have_different_groups() -> None:
    keys = [b"a", b"", b" ", b"\x00", b"x" * 129, b"x" * 130, b"sha256:" + b"0" * 64, b'{"id": 1}', None]
    groups = [group_of(event(number, "orders", key, b"x")) for number, key in enumerate(keys)]

    assert len(set(groups)) == len(keys)
    assert groups[0] == "a"


@pytest.mark.parametrize("value", [b"", None, b"\x00", "ü".encode(), b"\xff", b"\x0b"])
def test_a_message_has_no_character_that_the_services_refuse(value: bytes | None) -> None:
    message = text_message(event(1, "orders", value, value, ("bytes", b"\xff")))

    assert message.body
    assert all(message.attributes.values())
    assert len(message.attributes) <= 10
    assert not re.search(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", message.body + "".join(message.attributes.values())
    )


def test_the_size_counts_text_and_attributes() -> None:
    small, large = (text_message(Event("id", 1, 0, "orders", b"k", value)) for value in (b"x", b"x" * 1001))

    assert large.size - small.size == 1000
    assert small.size > len("cdc.id" + "id" + "cdc.topic" + "orders" + "cdc.key" + "k" + "x")
