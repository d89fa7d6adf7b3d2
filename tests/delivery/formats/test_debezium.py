"""Events of the format `debezium`: whole events are in data/debezium_events.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.config.deliveries import DebeziumSettings, DeliverySettings, EventFormat
from cdc.delivery.formats.contract import TOMBSTONE, EncodedEvents, LogicalMessages
from cdc.delivery.formats.debezium import NEW_KEY, OLD_KEY, DebeziumFormat
from cdc.delivery.formats.table_changes import TransactionNumbers
from cdc.errors import EventNotEncodable
from cdc.table import ReplicaIdentity, TableSchema
from tests.delivery.formats.changes import (
    ID,
    NAMES,
    changes_of,
    column,
    format_named,
    keys_of,
    log_row,
    log_rows,
    schema_with,
    values_of,
)

EXPECTED = json.loads((Path(__file__).parent / "data/debezium_events.json").read_text())
CUSTOMERS = schema_with(
    column("id", 23, "integer", key=0, not_null=True, default="nextval('customers_id_seq'::regclass)"),
    column("first_name", 1043, "character varying", not_null=True),
    column("last_name", 1043, "character varying", not_null=True),
    column("email", 1043, "character varying"),
)
ANNE = {1: "1", 2: "Anne", 3: "Kretchmar", 4: "annek@noanswer.org"}
MARIE = {**ANNE, 2: "Anne Marie"}


def _format(**options: Any) -> DebeziumFormat:
    debezium = DebeziumSettings(**{"schemas": False, **options})
    settings = DeliverySettings(name="out", format=EventFormat.DEBEZIUM, debezium=debezium)
    return DebeziumFormat(settings, NAMES, clock=lambda: 1_559_033_904_961_654_789)


def _encoded(*rows: dict[str, Any], schema: TableSchema = CUSTOMERS, **options: Any) -> EncodedEvents:
    return _format(**options).encode(changes_of(schema, *rows))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("read", log_row("r", key=["1"], after=ANNE)),
        ("create", log_row("c", key=["1"], after=ANNE)),
        ("update_default", log_row("u", key=["1"], after=MARIE)),
        ("update_full", log_row("u", key=["1"], before=ANNE, after=MARIE)),
        ("update_unsent", log_row("u", key=["1"], partial=True, after={k: v for k, v in MARIE.items() if k < 4})),
        ("truncate", log_row("t")),
    ],
)
def test_a_change_is_one_event(name: str, row: dict[str, Any]) -> None:
    events = _encoded(row)
    assert [json.dumps(value) for value in values_of(events)] == [json.dumps(EXPECTED[name])]
    assert keys_of(events) == [None if name == "truncate" else {"id": 1}]
    assert (events.source.tolist(), events.suffixes, events.headers, events.refused) == ([0], None, None, {})


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("delete_default", log_row("d", key=["1"], before={1: "1"})),
        ("delete_default", log_row("d", key=["1"])),
        ("delete_full", log_row("d", key=["1"], before=MARIE)),
    ],
)
def test_a_delete_is_followed_by_a_tombstone(name: str, row: dict[str, Any]) -> None:
    events = _encoded(row)
    assert values_of(events) == [EXPECTED[name], None]
    assert keys_of(events) == [{"id": 1}, {"id": 1}]
    assert (events.source.tolist(), events.suffixes) == ([0, 0], ["", TOMBSTONE])
    without = _encoded(row, tombstones=False)
    assert (values_of(without), without.suffixes) == ([EXPECTED[name]], None)


def test_a_key_change_is_a_delete_a_tombstone_and_a_create() -> None:
    events = _encoded(
        log_row("c", 0, key=["9"], after={**ANNE, 1: "9"}),
        log_row("d", 1, key=["1"], before={1: "1"}),
        log_row("u", 2, key=["2"], old_key=["1"], before={1: "1"}, after={**ANNE, 1: "2"}),
    )
    values = values_of(events)
    assert values[1:] == [EXPECTED["moved_delete"], None, EXPECTED["moved_create"]]
    assert keys_of(events)[1:] == [{"id": 1}, {"id": 1}, {"id": 2}]
    new, old = (NEW_KEY, b'{"id":2}'), (OLD_KEY, b'{"id":1}')
    assert events.headers == [(), (new,), (new,), (old,)]


def test_a_delete_before_the_move_of_another_row_is_no_move() -> None:
    events = _encoded(
        log_row("d", 1, key=["9"], before={1: "9"}),
        log_row("u", 2, key=["2"], old_key=["1"], before={1: "1"}, after={**ANNE, 1: "2"}),
    )
    assert events.headers == [(), (), ((OLD_KEY, b'{"id":1}'),)]


def test_key_and_value_contain_their_schemas() -> None:
    events = _encoded(log_row("c", key=["1"], after=ANNE), schemas=True)
    assert [json.dumps(key) for key in keys_of(events)] == [
        json.dumps({"schema": EXPECTED["key_schema"], "payload": {"id": 1}})
    ]
    assert [json.dumps(value) for value in values_of(events)] == [
        json.dumps({"schema": EXPECTED["value_schema"], "payload": EXPECTED["create"]})
    ]


def test_the_block_transaction_is_an_option() -> None:
    row = log_row("c", key=["1"], after=ANNE)
    numbers = TransactionNumbers(pa.array([1, None]), pa.array([1, None]))
    events = _format(transaction=True).encode(replace(changes_of(CUSTOMERS, row, row), numbers=numbers))
    assert values_of(events) == [EXPECTED["create_with_transaction"], EXPECTED["create"]]


def test_an_unsent_value_comes_from_before_if_that_was_sent() -> None:
    rest = {number: text for number, text in MARIE.items() if number < 4}
    events = _encoded(log_row("u", key=["1"], before=ANNE, after=rest, partial=True))
    assert values_of(events)[0]["after"]["email"] == "annek@noanswer.org"


def test_an_unsent_value_without_placeholder_is_refused() -> None:
    schema = schema_with(ID, column("price", 1700, "numeric"), column("note"))
    events = _encoded(
        log_row("u", 0, key=["1"], after={1: "1", 3: "a"}),
        log_row("u", 1, key=["2"], after={1: "2", 2: "5"}),
        schema=schema,
    )
    assert values_of(events)[0]["after"] == {
        "id": 2, "price": {"scale": 0, "value": "BQ=="}, "note": "__debezium_unavailable_value",
    }  # fmt: skip
    assert isinstance(events.refused[0], EventNotEncodable)


def test_a_table_without_a_key_has_events_without_key_and_no_tombstones() -> None:
    schema = schema_with(column("id", 23, "integer"), replica_identity=ReplicaIdentity.FULL)
    events = _encoded(log_row("c", 0, after={1: "1"}), log_row("d", 1, before={1: "1"}), schema=schema)
    assert keys_of(events) == [None, None]
    assert [value["op"] for value in values_of(events)] == ["c", "d"]


def test_schema_versions_and_ends_of_copies_have_no_events() -> None:
    events = _encoded(log_row("s", 0), log_row("c", 1, key=["1"], after=ANNE), log_row("g", 2))
    assert events.source.tolist() == [1]
    assert values_of(events) == [EXPECTED["create"]]


def test_logical_messages_are_as_debezium_writes_them() -> None:
    rows = log_rows([
        log_row("m", 0, relation=None, topic=None, payload=b"bar", key=["foo", "t", "0/16E9050"]),
        log_row("m", 1, relation=None, topic=None, payload=b"bar", key=["foo", "f", "0/16E9050"]),
        log_row("m", 2, relation=None, topic=None, payload=None),
    ])  # fmt: skip
    events = _format().encode_messages(LogicalMessages("shop.message", rows))
    values = values_of(events)
    assert values[:2] == [EXPECTED["message"], EXPECTED["message_outside"]]
    assert values[2]["message"] == {"prefix": None, "content": ""}
    assert keys_of(events) == [{"prefix": "foo"}, {"prefix": "foo"}, {"prefix": None}]
    with_schema = _format(schemas=True).encode_messages(LogicalMessages("shop.message", rows))
    assert keys_of(with_schema)[0] == {"schema": EXPECTED["message_key_schema"], "payload": {"prefix": "foo"}}
    assert values_of(with_schema)[0] == {"schema": EXPECTED["message_value_schema"], "payload": EXPECTED["message"]}


def test_a_new_version_of_the_schema_is_used_at_once() -> None:
    encoder = format_named("debezium")
    encoder.encode(changes_of(CUSTOMERS, log_row("c", key=["1"], after=ANNE)))
    later = schema_with(ID, column("mail"))
    events = encoder.encode(changes_of(later, log_row("c", key=["1"], after={1: "1", 2: "x"})))
    assert values_of(events)[0]["after"] == {"id": 1, "mail": "x"}
