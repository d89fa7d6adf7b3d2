"""Keys and images of one table in Debezium's representation."""

from __future__ import annotations

import numpy as np

from cdc.config.deliveries import DebeziumSettings
from cdc.delivery.formats.debezium_rows import DebeziumTable
from cdc.delivery.formats.event_rows import Refusals
from cdc.json_arrays import concatenated
from tests.delivery.formats.changes import ID, TOPIC, changes_of, column, log_row, schema_with

PLAIN = DebeziumSettings(schemas=False)
SCHEMA = schema_with(
    ID,
    column("code", key=1),
    column("price", 1700, "numeric", not_null=True),
    column("state", default="'new'::text", not_null=True),
)


def test_a_key_has_its_columns_in_key_order_and_null_parts() -> None:
    changes = changes_of(SCHEMA, log_row("c", 0, key=["1", "a"]), log_row("c", 1, key=["2", None]), log_row("t", 2))
    keys = DebeziumTable(SCHEMA, TOPIC, PLAIN).keys(changes, changes.key, Refusals("t"))
    assert keys.to_pylist() == ['{"id":1,"code":"a"}', '{"id":2,"code":null}', None]


def test_unsent_columns_that_are_not_null_have_their_default_or_zero_in_before() -> None:
    changes = changes_of(
        SCHEMA, log_row("d", 0, key=["1", "a"], before={1: "1", 2: "a"}), log_row("d", 1, key=["2", "b"])
    )
    pieces = DebeziumTable(SCHEMA, TOPIC, PLAIN).before(changes, np.array([True, True]), Refusals("t"))
    zero = '"price":{"scale":0,"value":"AA=="},"state":"new"'
    assert [concatenated(pieces)[row].as_py() for row in (0, 1)] == [
        f'{{"id":1,"code":"a",{zero}}}',
        f'{{"id":2,"code":"b",{zero}}}',
    ]


def test_an_image_that_is_not_wanted_is_null() -> None:
    changes = changes_of(SCHEMA, log_row("u", key=["1", "a"], before={1: "1", 2: "a"}, after={1: "1"}))
    table = DebeziumTable(SCHEMA, TOPIC, PLAIN)
    assert table.before(changes, np.array([False]), Refusals("t")) == ["null"]
    refusals = Refusals("t")
    table.after(changes, refusals)
    assert list(refusals.found) == [0]
