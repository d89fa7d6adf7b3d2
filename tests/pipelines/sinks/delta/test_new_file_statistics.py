"""Statistics: bounds hold every value of their column, and what cannot be spelled exactly is left out."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pipelines.sinks.delta.new_file_statistics import MAX_TEXT_BOUND, statistics

ROWS = pa.table(
    {
        "id": pa.array([3, 1, 2], pa.int64()),
        "name": ["b", "ü", None],
        "made": pa.array([datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC), None, None], pa.timestamp("us", tz="UTC")),
        "day": pa.array([date(2026, 1, 31), date(1, 1, 1), None], pa.date32()),
        "price": pa.array([Decimal("1.50"), None, None], pa.decimal128(12, 2)),
        "active": [True, None, False],
        "empty": pa.nulls(3, pa.string()),
    }
)


def told(rows: pa.Table, *columns: str) -> Any:
    return json.loads(statistics(rows, columns))


def test_bounds_and_nulls_are_told_as_delta_spells_them() -> None:
    found = told(ROWS, "id", "name", "made", "day")
    assert found["numRecords"] == 3
    assert found["minValues"] == {"id": 1, "name": "b", "made": "2026-01-02T03:04:05.678Z", "day": "0001-01-01"}
    assert found["maxValues"] == {"id": 3, "name": "ü", "made": "2026-01-02T03:04:05.678Z", "day": "2026-01-31"}
    assert found["nullCount"] == {"id": 0, "name": 1, "made": 2, "day": 1}


def test_a_type_without_an_exact_spelling_has_no_bounds_but_its_nulls() -> None:
    found = told(ROWS, "price", "active", "empty")
    assert (found["minValues"], found["maxValues"]) == ({}, {})
    assert found["nullCount"] == {"price": 2, "active": 1, "empty": 3}


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_a_moment_before_1970_is_never_before_its_bound(zone: str | None) -> None:
    moments = pa.array([-1, -1_500, -62_135_596_799_999_999], pa.timestamp("us", tz=zone))
    for moment in moments:
        least = told(pa.table({"made": pa.array([moment.as_py()], moments.type)}), "made")["minValues"]["made"]
        assert pa.array([least.removesuffix("Z").replace("T", " ")]).cast(pa.timestamp("us"))[0].value <= moment.value


def test_nothing_is_said_of_columns_that_were_not_asked_for_or_are_not_there() -> None:
    assert told(ROWS, "id", "other")["nullCount"] == {"id": 0}


def test_a_long_text_is_never_outside_of_its_bounds() -> None:
    long = "x" * (MAX_TEXT_BOUND + 1)
    found = told(pa.table({"note": [long]}), "note")
    assert found["minValues"] == {"note": long[:MAX_TEXT_BOUND]}
    assert found["maxValues"] == {}
