"""The outbox: inserted rows are events with the payload as content; everything else of the table is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdc.config.deliveries import Outbox
from cdc.delivery.outbox_route import OutboxRoute
from cdc.errors import TransformFailed
from cdc.table import TableSchema
from tests.delivery.sent_log import change, schema_version
from tests.log.rows import table
from tests.log.sample_log import ORDERS

COLUMNS = ("aggregatetype", "aggregateid", "type", "payload", "tenant")


def outbox_schema(payload: int = 114) -> TableSchema:
    """The outbox table; its payload has this type."""
    schema = schema_version(ORDERS, *COLUMNS)
    columns = (replace(one, type_oid=payload) if one.name == "payload" else one for one in schema.columns)
    return replace(schema, columns=tuple(columns))


def inserted(number: int, *texts: str | None, op: str = "c") -> dict[str, Any]:
    """A row of the outbox."""
    return change(ORDERS, 20, number, str(number), op=op, after=list(enumerate((str(number), *texts), start=1)))


def outbox(**fields: Any) -> Outbox:
    """Settings of the outbox."""
    return Outbox.model_validate({"table": "shop.orders", **fields})


def test_inserted_rows_are_events_with_topic_key_and_headers_from_columns():
    route = OutboxRoute(outbox_schema(), outbox(headers={"tenant": "tenant"}), "shop")
    rows = table(
        inserted(0, "order", "7", "OrderPlaced", '{"a": 1}', "x"),
        inserted(1, "invoice", "8", None, None, None, op="r"),
    )

    topics, events = route.encode(rows)

    assert topics == ["outbox.event.order", "outbox.event.invoice"]
    assert events.keys.to_pylist() == ["7", "8"]
    assert events.values.to_pylist() == ['{"a": 1}', None]
    assert events.headers == [(("id", b"0"), ("eventType", b"OrderPlaced"), ("tenant", b"x")), (("id", b"1"),)]


def test_updates_and_deletes_of_the_outbox_are_no_events():
    route = OutboxRoute(outbox_schema(), outbox(), "shop")
    rows = table(
        inserted(0, "order", "7", "A", "{}", None, op="u"),
        inserted(1, "order", "7", "A", "{}", None),
        change(ORDERS, 20, 2, "1", op="d", before=[(1, "1")], after=None),
    )

    topics, events = route.encode(rows)

    assert topics == ["outbox.event.order"]
    assert events.source.tolist() == [1]


def test_a_bytea_payload_is_sent_as_bytes():
    route = OutboxRoute(outbox_schema(payload=17), outbox(topic="{pipeline}-{type}"), "shop")

    topics, events = route.encode(table(inserted(0, "order", "7", "A", "\\xff00", None)))

    assert topics == ["shop-order"]
    assert events.values.to_pylist() == [b"\xff\x00"]


def test_a_missing_column_is_an_error():
    with pytest.raises(TransformFailed, match="has no column 'tenant_id'"):
        OutboxRoute(outbox_schema(), outbox(headers={"a": "tenant_id"}), "shop")
