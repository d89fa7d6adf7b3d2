"""JSON values: those of single values and texts; test_table_search.py compares a search with a query."""

from __future__ import annotations

import json
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from cdc.table import Column
from cdc.targets.json_values import conversion_of, json_value
from tests.contracts.folded import column


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (-0.0, -0.0),
        (Decimal("1E-10"), "0.0000000001"),
        (Decimal("1E+3"), "1000"),
        (b"\x00\xff", "\\x00ff"),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), "2026-01-31T12:00:00+00:00"),
        (time(10), "10:00:00"),
        ([True, None, [Decimal("1.50")]], [True, None, ["1.50"]]),
        ({"at": [b"a"]}, {"at": ["\\x61"]}),
        ([("key", float("inf"))], [["key", "Infinity"]]),
        (pa.scalar((0, 1, 0), pa.month_day_nano_interval()).as_py(), "MonthDayNano(months=0, days=1, nanoseconds=0)"),
    ],
)
def test_a_value_is_what_json_has(value: Any, expected: Any) -> None:
    assert json.dumps(json_value(value), allow_nan=False) == json.dumps(expected)


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (column(1, "c", "boolean", oid=16), "***"),
        (column(1, "c", "integer", oid=23), "***"),
        (column(1, "c", "real", oid=700), "Infinity"),
        (column(1, "c", "double precision", oid=701), "NaN"),
        (column(1, "c", "timestamp", oid=1114), "infinity"),
        (column(1, "c", "timestamptz", oid=1184), "0044-03-15 12:00:00+00 BC"),
        (column(1, "c", "timestamp", oid=1114), "10000-01-01 00:00:00"),
        (column(1, "c", "integer[]", oid=1007), "{{1},{2}}"),
        (column(1, "c", "integer[]", oid=1007), "[0:1]={1,2}"),
        (column(1, "c", "integer[]", oid=1007, key=0), "{1,2}"),
        (column(1, "c", "box[]", oid=1020), "{(1,1),(0,0)}"),
    ],
)
def test_a_text_without_a_value_in_a_delta_table_stays_text(of: Column, text: str) -> None:
    assert conversion_of(of)(text) == text
