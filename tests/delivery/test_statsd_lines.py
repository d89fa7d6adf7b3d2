"""Metrics from changes: which lines a change becomes."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config.deliveries import DeliverySettings
from cdc.config.destinations import StatsdDelivery, StdoutDelivery
from cdc.delivery.destinations import own_format
from cdc.delivery.formats.contract import EncodedEvents
from cdc.delivery.formats.table_changes import table_changes
from cdc.delivery.statsd_lines import StatsdFormat
from cdc.errors import TransformFailed
from tests.delivery.test_row_condition import GONE, NEW, ORDERS, PAID, SAME, image
from tests.log.rows import row, table


def encode(rows: list[dict[str, Any]], *metrics: dict[str, Any]) -> EncodedEvents:
    settings = StatsdDelivery.model_validate({"name": "counts", "type": "statsd", "metrics": list(metrics)})
    made = own_format(settings)
    assert isinstance(made, StatsdFormat)
    return made.encode(table_changes(ORDERS, "topic", table(*rows)))


def lines(rows: list[dict[str, Any]], *metrics: dict[str, Any]) -> list[tuple[int, str]]:
    found = encode(rows, *metrics)
    return list(zip(found.source.tolist(), found.values.to_pylist(), strict=True))


PLACED = {"metric": "orders.placed", "table": "shop.orders", "when": "op = 'c'"}


def test_a_counter_counts_the_changes_for_which_the_condition_is_true() -> None:
    assert lines([PAID, NEW, GONE, NEW], PLACED) == [(1, "orders.placed:1|c"), (3, "orders.placed:1|c")]


def test_a_counter_can_add_up_a_column() -> None:
    paid = {"metric": "revenue", "table": "shop.*", "when": "after.status = 'paid'", "value": "price"}
    assert lines([PAID, SAME, NEW], paid) == [(0, "revenue:20.00|c"), (1, "revenue:9.99|c")]


def test_a_gauge_is_the_value_of_a_column_and_a_delete_has_none() -> None:
    gauge = {"metric": "price", "table": "shop.orders", "type": "gauge", "value": "price"}
    odd = row(1, 4, after=image(5, "x", "NaN"))
    small = row(1, 5, after=image(5, "x", "1e-7"))
    assert lines([PAID, GONE, odd, small], gauge) == [(0, "price:20.00|g"), (3, "price:0.0000001|g")]


def test_the_events_of_one_change_have_different_ids() -> None:
    found = encode([NEW, NEW], PLACED, {"metric": "all", "table": "shop.*"}, {"metric": "none", "table": "other.*"})

    assert found.source.tolist() == [0, 0, 1, 1]
    assert found.suffixes == ["/0/orders.placed", "/1/all"] * 2
    assert found.keys.to_pylist() == ["orders.placed", "all"] * 2


@pytest.mark.parametrize("column", ["status", "missing"])
def test_a_value_that_is_no_number_is_refused(column: str) -> None:
    with pytest.raises(TransformFailed):
        encode([NEW], {"metric": "m", "table": "shop.*", "value": column})


def test_only_statsd_has_a_format_of_its_own() -> None:
    other: DeliverySettings = StdoutDelivery.model_validate({"name": "print", "type": "stdout"})
    assert own_format(other) is None
