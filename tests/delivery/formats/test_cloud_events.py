"""Format `cloudevents`: the attributes of CloudEvents 1.0 around the format `cdc`."""

from __future__ import annotations

from cdc.delivery.formats.cloud_events import CONTENT_TYPE
from cdc.delivery.formats.contract import LogicalMessages
from tests.delivery.formats.changes import (
    ID,
    changes_of,
    column,
    format_named,
    keys_of,
    log_row,
    log_rows,
    schema_with,
    values_of,
)


def test_a_change_is_the_content_of_a_cloud_event() -> None:
    changes = changes_of(schema_with(ID, column("note")), log_row("u", 3, key=["1"], after={1: "1", 2: "x"}))
    events = format_named("cloudevents").encode(changes)
    value = values_of(events)[0]
    assert value.pop("data") == values_of(format_named("cdc").encode(changes))[0]
    assert value == {
        "specversion": "1.0",
        "id": "LOG/0/16E9058/3",
        "source": "/cdc/shop",
        "type": "cdc.u",
        "subject": "shop.orders",
        "time": "2019-05-28T08:58:24.863123Z",
        "datacontenttype": "application/json",
    }
    assert keys_of(events) == [{"id": 1}]
    assert events.headers == [(CONTENT_TYPE,)]


def test_the_prefix_of_a_message_is_its_subject_unless_it_is_empty() -> None:
    rows = log_rows([log_row("m", payload=b"x", key=[prefix, "t", "0/10"]) for prefix in ("orders.paid", "")])
    values = values_of(format_named("cloudevents").encode_messages(LogicalMessages("shop.m", rows)))
    assert [value.get("subject") for value in values] == ["orders.paid", None]
    assert values[0]["data"]["content"] == "eA=="
