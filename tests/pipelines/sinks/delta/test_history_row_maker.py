"""History row maker: which columns begin a new version, and which changes are merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdc.config import TableSettings
from pipelines.sinks.delta.history_row_maker import tracked_columns
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS

SHAPE = RowShape(ORDERS, TypePolicy.EXACT)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["item", "price"]),
        ({"track_history_column_list": ("price",)}, ["price"]),
        ({"track_history_except_column_list": ("price",)}, ["item"]),
    ],
)
def test_tracked_are_the_listed_columns_outside_of_the_key(settings: dict[str, Any], expected: list[str]) -> None:
    settings = {"stored_as_scd_type": 2, **settings}

    assert tracked_columns(SHAPE, ORDERS, TableSettings(**settings)) == expected


def test_a_tracked_column_is_named_as_at_the_source() -> None:
    renamed = replace(ORDERS, columns=tuple(replace(one, name=f"{one.name}_2") for one in ORDERS.columns))
    settings = TableSettings(stored_as_scd_type=2, track_history_column_list=("item_2",))

    assert tracked_columns(SHAPE, renamed, settings) == ["item"]
