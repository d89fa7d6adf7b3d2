"""Routes of tables: the first rule that matches a table applies, and unsent values come from the key."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.delivery.table_routes import RoutedChanges, TableRoute
from tests.delivery.loop_run import settings_of
from tests.delivery.sent_log import change, schema_version
from tests.log.rows import table
from tests.log.sample_log import ORDERS


def routed(*rows: dict[str, Any], **fields: Any) -> list[RoutedChanges]:
    """The changes of each topic."""
    return list(TableRoute(schema_version(ORDERS, "name"), settings_of(**fields), "shop").routed(table(*rows)))


def test_the_first_rule_that_matches_applies():
    rules = [{"match": "shop.o*", "topic": "first"}, {"match": "*.*", "topic": "second"}]

    (part,) = routed(change(ORDERS, 20, 0, "1"), rules=rules)

    assert part.changes.topic == "first"


def test_a_topic_without_columns_is_filled_in_once():
    (part,) = routed(change(ORDERS, 20, 0, "1"), topic="{pipeline}/{schema}/{table}/x")

    assert part.changes.topic == "shop/shop/orders/x"


def test_control_rows_are_left_out_and_indices_point_to_the_rows():
    rows = [change(ORDERS, 20, n, str(n), op=op) for n, op in enumerate("cgcu")]

    (part,) = routed(*rows)

    assert part.indices.tolist() == [0, 2, 3]
    assert [part.key(n) for n in range(3)] == [("0",), ("2",), ("3",)]


def test_only_control_rows_have_no_changes():
    assert routed(change(ORDERS, 20, 0, "1", op="g")) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"after": [(1, "7"), (2, None)]}, "null:"),
        ({"op": "u", "after": [(2, "x")]}, "key:x"),
        ({"op": "u", "before": [(1, "7"), (2, "old")], "after": [(1, "7")]}, "unsent:"),
        ({"op": "d", "before": [(1, "7"), (2, "old")], "after": None}, "delete:old"),
    ],
)
def test_a_topic_column_is_that_after_the_change_or_before_a_delete(fields: dict[str, Any], expected: str):
    rule = {"match": "*.*", "topic": expected.split(":", maxsplit=1)[0] + ":{name}"}

    (part,) = routed(change(ORDERS, 20, 0, "7", **fields), rules=[rule])

    assert part.changes.topic == expected


def test_an_unsent_key_column_is_that_of_the_key():
    rule = {"match": "*.*", "topic": "{id}", "headers": {"id": "id"}, "key": ["id"]}

    (part,) = routed(change(ORDERS, 20, 0, "7", op="u", after=[(2, "x")]), rules=[rule])

    assert part.changes.topic == "7"
    assert part.headers == [(("id", b"7"),)]
    assert part.key(0) == ("7",)
