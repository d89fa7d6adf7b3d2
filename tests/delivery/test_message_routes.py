"""Rules of logical messages: which applies, which topic and which key it gives."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config.deliveries import MessageTopic
from cdc.delivery.message_routes import MessageRoutes, RoutedMessages
from tests.log.rows import message_row, row, table


def routed(*rows: dict[str, Any], **rule: str) -> list[RoutedMessages]:
    rules = [MessageTopic.model_validate({"prefix": "*", "topic": "{pipeline}.{prefix}", **rule})]
    return list(MessageRoutes(rules, "shop").routed(table(*rows)))


def test_messages_are_grouped_by_topic_and_other_rows_are_left_out():
    found = routed(message_row(20, 0, "b"), row(20, 1), message_row(20, 2, "a"), message_row(20, 3, "b"))

    assert [(one.messages.topic, one.indices.tolist()) for one in found] == [("shop.a", [2]), ("shop.b", [0, 3])]
    assert found[1].key(1) == ("b",)


def test_a_prefix_that_no_rule_matches_has_no_topic():
    assert routed(message_row(20, 0, "b"), prefix="a*") == []


@pytest.mark.parametrize(
    ("content", "key"),
    [('{"id": "a b"}', "a b"), ('{"id": 1.50}', "1.5"), ('{"id": {"a": "ü"}}', '{"a": "ü"}'), ('{"id": ""}', "")],
)
def test_a_key_is_the_text_of_a_field(content: str, key: str):
    (found,) = routed(message_row(20, 0, "b", payload=content.encode()), key="id")

    assert found.keys == [key]
    assert found.refusal is None


def test_large_numbers_keep_their_digits():
    (found,) = routed(message_row(20, 0, "b", payload=b'{"id": 12345678901234567890123}'), key="id")

    assert found.keys == ["12345678901234567890123"]
