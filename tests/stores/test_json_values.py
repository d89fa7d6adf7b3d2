"""JSON values: those of single values of a Delta table."""

from __future__ import annotations

import json
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from cdc.stores.json_values import json_value


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
