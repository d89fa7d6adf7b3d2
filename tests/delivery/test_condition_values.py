"""Types of columns in conditions, and the values that their texts have."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from cdc.delivery.condition_values import (
    DATE,
    LOCAL_TIMESTAMP,
    NUMERIC,
    TIMESTAMP,
    ConditionType,
    literal_of,
    reader_of,
    type_of,
)
from cdc.table import Column


def column(oid: int, typmod: int = -1, name: str = "any", **fields: Any) -> Column:
    return Column(id=1, name="a", type_oid=oid, type_name=name, typmod=typmod, **fields)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (column(23), "int"),
        (column(1700, ((10 << 16) | 2) + 4), "decimal(10,2)"),
        (column(1700), "numeric"),
        (column(1700, ((39 << 16) | 2) + 4), "numeric"),
        (column(1042, 9), "char(5)"),
        (column(1042), "text"),
        (column(1043, 9), "text"),
        (column(17), "other"),
        (column(1007, name="integer[]"), "other"),
        (column(99_999, base_type_oid=23), "int"),
        (column(99_999), "text"),
    ],
)
def test_a_column_has_a_type(given: Column, name: str) -> None:
    assert type_of(given).name == name


@pytest.mark.parametrize(
    ("given", "text", "value"),
    [
        (NUMERIC, "9007199254740993", Decimal(9007199254740993)),
        (DATE, "2024-02-29", date(2024, 2, 29)),
        (TIMESTAMP, "2024-01-01 00:00:00.5+00", datetime(2024, 1, 1, 0, 0, 0, 500_000, UTC)),
        (type_of(column(700)), "0.1", 0.10000000149011612),
        (type_of(column(16)), "t", True),
    ],
)
def test_a_text_of_postgres_has_a_value(given: ConditionType, text: str, value: object) -> None:
    assert reader_of(given)(text) == value


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (NUMERIC, "NaN"),
        (NUMERIC, "Infinity"),
        (DATE, "infinity"),
        (DATE, "0044-03-15 BC"),
        (TIMESTAMP, "10000-01-01 00:00:00+00"),
    ],
)
def test_a_value_that_spark_does_not_have_is_an_error(given: ConditionType, text: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        reader_of(given)(text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (DATE, "2024-1-1"), (DATE, "2024-01-01 00:00:00"), (DATE, "20240101"), (DATE, "2023-02-29"), (DATE, "today"),
        (TIMESTAMP, "2024-01-01 10:00"), (TIMESTAMP, "now"), (TIMESTAMP, "2024-01-01 10:00:00 Europe/Berlin"),
        (LOCAL_TIMESTAMP, "2024-01-01 10:00:00Z"),
    ],
)  # fmt: skip
def test_a_date_of_another_form_is_refused(given: ConditionType, text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|out of range|day"):
        literal_of(text, given)
