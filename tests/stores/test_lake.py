"""Reading a Delta sink: cdc/stores/lake.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.errors import ConfigError, SinkUnavailable
from cdc.stores.lake import At, Lake, bound
from cdc.stores.published import Published, TableRecord
from pipelines.sinks.delta import DeltaSettings, DeltaSink
from tests.contracts.folded import ORDERS, batch, put


def record(relation: int, topic: str) -> TableRecord:
    return TableRecord(relation, topic, f"/lake/{topic}", 20, 1, "streaming")


TABLES = {
    topic: record(n, topic) for n, topic in enumerate(["shop.orders", "shop.items", "stock.items", "shop.Odd one"])
}


@pytest.fixture
def lake(tmp_path):
    """A published cut with the row 1, and a later row 2 that is applied but not published."""
    template = f"{tmp_path}/{{schema}}/{{table}}"
    sink = DeltaSink(DeltaSettings("lake", template))
    sink.open("log-1")
    applied = sink.apply(batch([put(1, "a", 10)], 0, 20))
    sink.publish(Published(20, 5, {ORDERS.relation: applied}))
    sink.apply(batch([put(2, "b", 30)], 20, 40))
    return Lake.open(template)


def test_a_query_sees_the_published_cut(lake):
    assert lake.query("select item from shop.orders").read_all().to_pylist() == [{"item": "a"}]


def test_a_query_at_latest_sees_what_is_applied(lake):
    assert lake.query("select count(*) as n from orders", At.LATEST).read_all().to_pylist() == [{"n": 2}]


def test_columns_may_be_qualified_by_either_name(lake):
    found = lake.query("select orders.id, shop.orders.item from shop.orders where orders.id = 1").read_all()

    assert found.to_pylist() == [{"id": 1, "item": "a"}]


def test_a_refused_query_names_the_tables_there_are(lake):
    with pytest.raises(ConfigError) as caught:
        lake.query("select * from nothing")

    assert "shop.orders" in caught.value.fix


def test_a_sink_that_was_never_opened_has_no_record(tmp_path):
    lake = Lake.open(f"{tmp_path}/{{schema}}/{{table}}")

    assert (lake.published(), lake.tables()) == (None, [])


def test_a_missing_target_or_version_is_an_error(lake, tmp_path):
    with pytest.raises(SinkUnavailable):
        lake.read(f"{tmp_path}/nothing")
    with pytest.raises(SinkUnavailable):
        lake.read(lake.tables()[0].target, 99)


@pytest.mark.parametrize(
    ("sql", "expected", "used"),
    [
        ("select * from shop.orders", 'select * from "orders"', ["shop.orders"]),
        ("select * from SHOP.Orders o", 'select * from "orders" o', ["shop.orders"]),
        ("select 'shop.items' from stock.items", "select 'shop.items' from \"stock__items\"", ["stock.items"]),
        ("select 1 from items -- orders", "select 1 from items -- orders", []),
        ('select * from shop."Odd one"', 'select * from "Odd one"', ["shop.Odd one"]),
        ("select o.id from other.orders o", "select o.id from other.orders o", []),
    ],
)
def test_names_of_tables_become_names_the_engine_knows(sql, expected, used):
    text, found = bound(sql, TABLES)

    assert text == expected
    assert [table.topic for table in found.values()] == used


def test_a_record_survives_its_json():
    published = Published(20, 5, {7: replace(record(7, "shop.orders"), version=None, reason="CDC-3001 x")})

    assert Published.from_json(published.to_json()) == published


def test_a_record_of_a_newer_format_is_refused():
    with pytest.raises(ValueError, match="format"):
        Published.from_json('{"format": 2}')
