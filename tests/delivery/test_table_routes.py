"""Routes of tables: the first rule that matches a table applies, and unsent values come from the key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdc.delivery.table_routes import RoutedChanges, TableRoute
from cdc.errors import EventNotEncodable
from cdc.table import ReplicaIdentity
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
        ({"op": "u", "before": [(1, "7"), (2, "old")], "after": [(1, "7")]}, "unsent:old"),
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


ROUTE = {"match": "*.*", "topic": "t/{name}", "key": ["name"]}
DELETED = {"op": "d", "before": [(1, "7")], "after": None}
UNSENT = {"op": "u", "after": [(1, "7")], "partial": True}


@pytest.mark.parametrize("rule", [ROUTE, {"match": "*.*", "headers": {"h": "name"}}])
@pytest.mark.parametrize("fields", [DELETED, UNSENT])
def test_a_change_without_the_columns_of_its_route_is_refused_and_parks_its_own_row(
    rule: dict[str, Any], fields: dict[str, Any]
):
    sent = change(ORDERS, 20, 0, "1")
    lost = change(ORDERS, 20, 1, "7", **fields)
    truncate = change(ORDERS, 20, 2, "1", op="t", key=None, after=None)

    refused, *parts = routed(sent, lost, truncate, rules=[rule])

    assert isinstance(refused.refusal, EventNotEncodable)
    assert "'name'" in refused.refusal.message
    assert refused.indices.tolist() == [1]
    assert refused.key(0) == ("7",)
    assert sorted(index for part in parts for index in part.indices.tolist()) == [0, 2]
    assert {part.refusal for part in parts} == {None}


@pytest.mark.parametrize(
    ("rule", "identity", "expected"),
    [
        (ROUTE, ReplicaIdentity.DEFAULT, ("name",)),
        (ROUTE, ReplicaIdentity.FULL, ()),
        ({"match": "*.*", "topic": "{id}", "key": ["id"]}, ReplicaIdentity.DEFAULT, ()),
        ({"match": "*.*", "headers": {"h": "name"}}, ReplicaIdentity.DEFAULT, ("name",)),
        ({**ROUTE, "when": "op <> 'd'"}, ReplicaIdentity.DEFAULT, ()),
        ({**ROUTE, "when": "op <> 'c'"}, ReplicaIdentity.DEFAULT, ("name",)),
        ({"match": "*.*"}, ReplicaIdentity.DEFAULT, ()),
    ],
)
def test_columns_that_a_delete_does_not_contain_are_known(
    rule: dict[str, Any], identity: ReplicaIdentity, expected: tuple[str, ...]
):
    schema = replace(schema_version(ORDERS, "name"), replica_identity=identity)

    assert TableRoute(schema, settings_of(rules=[rule]), "shop").unsent_by_deletes == expected


def test_a_row_without_a_result_of_the_condition_is_refused_under_its_own_topic_and_key():
    schema = schema_version(ORDERS, "n")
    number = replace(schema.columns[1], type_oid=23, type_name="integer")
    schema = replace(schema, columns=(schema.columns[0], number))
    rule = {"match": "*.*", "topic": "t/{id}", "when": "after.n * 1000 > 10"}
    rows = [change(ORDERS, 20, n, str(n), after=[(1, str(n)), (2, text)]) for n, text in enumerate(("1", "2147483647"))]

    refused, kept = TableRoute(schema, settings_of(rules=[rule]), "shop").routed(table(*rows))

    assert (refused.changes.topic, refused.key(0), refused.indices.tolist()) == ("t/1", ("1",), [1])
    assert isinstance(refused.refusal, EventNotEncodable)
    assert (kept.changes.topic, kept.refusal) == ("t/0", None)
