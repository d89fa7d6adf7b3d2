"""Selection, routes and events of log rows: backfills of other sinks, topics per row, keys, headers, messages."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.event_encoder import EventEncoder, Schemas
from cdc.delivery.event_part import EventPart
from cdc.errors import HiddenColumnRenamed, LogCorrupt, TransformFailed
from tests.delivery.loop_run import NAME, places_of, settings_of
from tests.delivery.plain_format import PlainFormat
from tests.delivery.sent_log import change, schema_version
from tests.log.rows import message_row, table
from tests.log.sample_log import ITEMS, ORDERS, schema_row


def schemas() -> Schemas:
    """The schemas of both tables."""
    return {ORDERS: schema_version(ORDERS, "name"), ITEMS: schema_version(ITEMS, "name")}


def encoded(*rows: dict[str, Any], known: Schemas | None = None, **fields: Any) -> EventPart:
    """The events of some rows."""
    encoder = EventEncoder(settings_of(**fields), DeliveryIdentity("shop", NAME, "LOG"), PlainFormat())
    return encoder.encode(encoder.selected(table(*rows)), schemas() if known is None else known)


def test_rows_that_a_backfill_reads_for_another_sink_have_no_events():
    part = encoded(
        change(ORDERS, 20, 0, "1"),
        change(ORDERS, 20, 1, "1", op="r", address="lake"),
        change(ORDERS, 20, 2, "2", op="r", address=NAME),
    )

    assert places_of(part.events) == [(20, 0), (20, 2)]


def test_only_the_chosen_tables_have_events_and_other_schemas_are_adopted_all_the_same():
    known = schemas()
    rows = [
        change(ORDERS, 20, 0, "1"),
        schema_row(20, 1, schema_version(ITEMS, "name", "note")),
        change(ITEMS, 20, 2, "1"),
    ]

    part = encoded(*rows, known=known, tables=["shop.orders"])

    assert places_of(part.events) == [(20, 0)]
    assert len(known[ITEMS].columns) == 3


def test_control_rows_have_no_events_apart_from_a_truncate():
    rows = [
        change(ORDERS, 20, 0, "1", op="g", key=None, after=None, payload=b"20"),
        change(ORDERS, 20, 1, "1", op="t", key=None, after=None),
    ]

    part = encoded(*rows)

    assert [json.loads(event.value or b"") for event in part.events] == [["t", [None], {}]]


def test_rows_without_a_schema_are_damage_and_not_skipped():
    with pytest.raises(LogCorrupt, match="relation 16384"):
        encoded(change(ORDERS, 20, 0, "1"), known={})


def test_a_topic_can_contain_a_column_of_the_row_and_rows_stay_in_log_order():
    rule = {"match": "shop.orders", "topic": "{pipeline}.{table}.{name}"}
    rows = [change(ORDERS, 20, n, str(n), after=[(1, str(n)), (2, "ab"[n % 2])]) for n in range(4)]
    rows.insert(2, change(ITEMS, 20, 9, "1", after=[(1, "1"), (2, None)]))
    rows.append(change(ORDERS, 20, 10, "1", op="d", before=[(1, "1"), (2, "c")], after=None))

    part = encoded(*rows, rules=[rule])

    found = [(event.ordinal, event.topic) for event in part.events]
    assert found == [
        (0, "shop.orders.a"),
        (1, "shop.orders.b"),
        (9, "shop.shop.items"),
        (2, "shop.orders.a"),
        (3, "shop.orders.b"),
        (10, "shop.orders.c"),
    ]


def test_a_rule_gives_key_and_headers():
    rule = {"match": "shop.orders", "key": ["name"], "headers": {"number": "id", "title": "name"}}
    rows = [
        change(ORDERS, 20, 0, "1", after=[(1, "1"), (2, "x")]),
        change(ORDERS, 20, 1, "2", after=[(1, "2"), (2, None)]),
    ]

    part = encoded(*rows, rules=[rule])

    assert [event.key for event in part.events] == [b'["x"]', b"[null]"]
    assert [dict(event.headers[3:]) for event in part.events] == [
        {"number": b"1", "title": b"x"},
        {"number": b"2"},
    ]
    assert part.letters(0).key == ("x",)


@pytest.mark.parametrize("rule", [{"key": ["none"]}, {"topic": "{none}"}, {"headers": {"a": "none"}}])
def test_a_rule_that_names_an_unknown_column_is_an_error(rule: dict[str, Any]):
    with pytest.raises(TransformFailed, match="'none'"):
        encoded(change(ORDERS, 20, 0, "1"), rules=[{"match": "*.*", **rule}])


@pytest.mark.parametrize("rule", [{"key": ["name"]}, {"topic": "{name}"}, {"headers": {"a": "name"}}])
def test_a_masked_column_can_be_in_no_topic_key_or_header(rule: dict[str, Any]):
    masked = {"match": "shop.orders", "transform": {"mask": {"name": "redact"}}, **rule}

    with pytest.raises(TransformFailed, match="is masked"):
        encoded(change(ORDERS, 20, 0, "1"), rules=[masked])


def test_a_masked_value_is_in_no_event_and_no_dead_letter():
    rule = {"match": "shop.orders", "transform": {"mask": {"name": "redact"}}}
    images = {"before": [(1, "1"), (2, "canary")], "after": [(1, "2"), (2, "canary")]}
    rows = [
        change(ORDERS, 20, 0, "1", after=images["after"]),
        change(ORDERS, 20, 1, "2", op="u", old_key=["1"], **images),
        change(ORDERS, 20, 2, "2", op="d", before=images["before"], after=None),
    ]

    part = encoded(*rows, rules=[rule])

    assert "canary" not in repr(part.events)
    assert "canary" not in repr([part.letters(n) for n in range(3)])
    assert json.loads(part.events[0].value or b"")[2]["name"] == "***"


@pytest.mark.parametrize("names", [("note", "name"), ("hidden", "note", "name")])
def test_events_end_where_a_masked_column_gets_another_name(names: tuple[str, ...]):
    rule = {"match": "shop.orders", "transform": {"mask": {"name": "redact"}}}
    known = {ORDERS: schema_version(ORDERS, "name", "note")}
    encoded(change(ORDERS, 20, 0, "1"), known=known, rules=[rule])

    with pytest.raises(HiddenColumnRenamed, match="had the name 'name'"):
        encoded(
            schema_row(30, 0, schema_version(ORDERS, *names)), change(ORDERS, 30, 1, "2"), known=known, rules=[rule]
        )


def test_dropped_and_renamed_columns_are_so_in_events():
    columns = schema_version(ORDERS, "name", "note")
    rule = {"match": "shop.orders", "transform": {"drop": ["note"], "rename": {"name": "title"}}}

    part = encoded(
        change(ORDERS, 20, 0, "1", after=[(1, "1"), (2, "a"), (3, "b")]), known={ORDERS: columns}, rules=[rule]
    )

    assert json.loads(part.events[0].value or b"")[2] == {"id": "1", "title": "a"}


def test_a_key_change_is_two_events_of_two_keys():
    rows = [
        change(ORDERS, 20, 0, "1", op="d", before=[(1, "1")], after=None),
        change(ORDERS, 20, 1, "2", op="u", old_key=["1"]),
    ]

    part = encoded(*rows)

    assert [event.key for event in part.events] == [b'["1"]', b'["2"]']


def test_messages_go_to_the_topic_of_the_first_prefix_that_matches_in_log_order():
    messages = [{"prefix": "a.*", "topic": "{pipeline}.{prefix}"}, {"prefix": "*", "topic": "rest"}]
    rows = [
        message_row(20, 0, "a.x", payload=b"1"),
        change(ORDERS, 20, 1, "1"),
        message_row(20, 2, "b", payload=b"\xff2"),
        message_row(20, 3, "a.y", payload=b"3"),
    ]

    part = encoded(*rows, messages=messages)
    silent = encoded(*rows)

    assert [(event.ordinal, event.topic) for event in part.events] == [
        (0, "shop.a.x"),
        (1, "shop.shop.orders"),
        (2, "rest"),
        (3, "shop.a.y"),
    ]
    assert part.events[2].value == b"\xff2"
    assert [part.letters(n).table for n in (0, 2, 3)] == ["a.x", "b", "a.y"]
    assert [part.letters(n).key for n in (0, 2, 3)] == [("a.x",), ("b",), ("a.y",)]
    assert places_of(silent.events) == [(20, 1)]


def test_messages_of_one_topic_are_dead_letters_by_their_own_prefix_or_key():
    messages = [{"prefix": "k.*", "topic": "all", "key": "id"}, {"prefix": "*", "topic": "all"}]
    contents = [b'{"id": 7}', b'{"id": "x"}', b'{"id": 7, "a": 1}', b"no JSON", b"[]", b'{"id": null}']
    rows = [message_row(20, n, "k.a", payload=content) for n, content in enumerate(contents)]

    part = encoded(*rows, message_row(20, 9, "p"), message_row(20, 10, "q"), messages=messages)

    assert [event.ordinal for event in part.events] == [0, 1, 2, 9, 10]
    assert [event.key for event in part.events[:3]] == [b"7", b"x", b"7"]
    assert [part.letters(n).key for n in range(5)] == [("7",), ("x",), ("7",), ("p",), ("q",)]
    assert [part.letters(n).table for n in (0, 3, 4)] == ["k.a", "p", "q"]
    assert [(letter.first.ordinal, letter.table, reason.code) for letter, reason in part.refused] == [
        (number, "k.a", "CDC-7007") for number in (3, 4, 5)
    ]


def test_a_table_without_a_key_has_events_and_one_order():
    keyless = schema_version(ORDERS, "name")
    keyless = type(keyless).from_json(
        keyless.to_json().replace(b'"key": 0', b'"key": null').replace(b'"key":0', b'"key":null')
    )
    rows = [change(ORDERS, 20, n, "x", key=None) for n in range(2)]

    part = encoded(*rows, known={ORDERS: keyless})

    assert len(part.events) == 2
    assert part.letters(0).key == part.letters(1).key == ()


def test_rows_of_nobody_are_no_event():
    part = encoded(change(ORDERS, 20, 0, "1"), tables=[])

    assert not part.events
    with pytest.raises(IndexError):
        part.letters(0)


def test_selected_rows_are_one_chunk():
    encoder = EventEncoder(settings_of(), DeliveryIdentity("shop", NAME, "LOG"), PlainFormat())
    rows = pa.concat_tables([table(change(ORDERS, 20, 0, "1")), table(change(ORDERS, 20, 1, "1", address="lake"))])

    assert encoder.selected(rows)["position"].num_chunks == 1
